"""What every model gives for one question: responses to a fault, healthy spread, healthy controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import Trace
from moeproxy.triage.agreement import false_response_rate, significant
from moeproxy.triage.response import Spread, Windows, calibrate, matrix, pair_responses
from moeproxy.triage.result import Control, Rules
from moeproxy.triage.runs import Pair, Runs


@dataclass(frozen=True)
class Question:
    """What is asked of every model: which fault, which seeds, which signals, steps and windows."""

    fault: str
    strength: float
    onset: int
    original: str
    calibration_seeds: tuple[int, ...]
    scored_seeds: tuple[int, ...]
    names: tuple[str, ...]
    steps_S: np.ndarray
    windows: Windows
    rules: Rules
    bootstrap_seed: int
    seen: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def values(self, trace: Trace) -> np.ndarray:
        """Return transformed signals after the onset (X, S); ±inf was not finite, NaN is missing."""
        # The same run is asked for by several measures. Its id is safe: the caller holds all traces.
        if id(trace) not in self.seen:
            self.seen[id(trace)] = matrix(trace, self.names, self.steps_S)
        return self.seen[id(trace)]

    def healthy_values(self, trace: Trace) -> np.ndarray:
        """Return the same for a healthy run, where a value that is not finite says nothing."""
        values_XS = self.values(trace)
        return np.where(np.isfinite(values_XS), values_XS, np.nan)

    def means(self, values_XS: np.ndarray) -> np.ndarray:
        """Return window means (X, W)."""
        return self.windows.means(values_XS, self.steps_S)


@dataclass(frozen=True)
class Responses:
    """How one model responds to the fault, and what its healthy runs give.

    Args:
        model: its label.
        pairs: healthy and faulty run of each scored seed that has both.
        spread: healthy spread and thresholds, from the calibration seeds.
        response_RXW: responses of the scored seeds, in the order of `pairs`.
        step_RXS: the same step by step.
        healthy_PXW: responses between healthy calibration runs, all ordered pairs.
        moves_X: whether a signal takes more than one value in any of the runs.
        control: what the rules find in healthy runs that did not set them.
        notes: what a reader must know about the runs.
    """

    model: str
    pairs: dict[int, Pair]
    spread: Spread
    response_RXW: np.ndarray
    step_RXS: np.ndarray
    healthy_PXW: np.ndarray
    moves_X: np.ndarray
    control: Control
    notes: tuple[str, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Scored seeds."""
        return tuple(self.pairs)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the scored runs come from."""
        return tuple(sorted({source for pair in self.pairs.values() for source in pair.sources}))

    def rows(self, seeds: Sequence[int]) -> list[int]:
        """Return the places of some scored seeds in `response_RXW` and `step_RXS`."""
        return [self.seeds.index(seed) for seed in seeds]


def measure(runs: Runs, model: str, question: Question) -> Responses:
    """Return the responses of one model.

    Raises:
        ComparisonError: it has no scored pair of runs, or fewer than two healthy calibration runs.
    """
    pairs = scored_pairs(runs, model, question.fault, question.strength, question.scored_seeds)
    calibration_CXS = np.stack([question.healthy_values(trace) for trace in _calibration(runs, model, question)])
    rules = question.rules
    spread = calibrate(
        calibration_CXS,
        question.steps_S,
        question.windows,
        question.names,
        alpha=rules.alpha,
        persist=rules.persist,
    )
    means_CXW = np.stack([question.means(values_XS) for values_XS in calibration_CXS])
    faulty, healthy = _both(pairs, question)
    return Responses(
        model=model,
        pairs=pairs,
        spread=spread,
        response_RXW=respond(pairs, spread, question),
        step_RXS=np.stack([spread.step_response(f, h) for f, h in zip(faulty, healthy, strict=True)]),
        healthy_PXW=pair_responses(means_CXW, spread),
        moves_X=_moves([*calibration_CXS, *faulty, *healthy]),
        control=_control(runs, model, means_CXW, spread, question),
        notes=_notes(model, pairs, question),
    )


def respond(pairs: dict[int, Pair], spread: Spread, question: Question) -> np.ndarray:
    """Return the window responses (R, X, W) of some pairs of runs."""
    faulty, healthy = _both(pairs, question)
    means = [(question.means(f), question.means(h)) for f, h in zip(faulty, healthy, strict=True)]
    return np.stack([spread.response(faulty_XW, healthy_XW) for faulty_XW, healthy_XW in means])


def scored_pairs(runs: Runs, model: str, fault: str, strength: float, seeds: Sequence[int]) -> dict[int, Pair]:
    """Return the pairs of runs by seed.

    Raises:
        ComparisonError: there is none.
    """
    found = {seed: runs.pair(model, fault, strength, seed) for seed in seeds}
    pairs = {seed: pair for seed, pair in found.items() if pair is not None}
    if not pairs:
        raise ComparisonError(
            f"{model!r} has no healthy and faulty run of {fault!r} with one scored seed",
            expected=f"both, with a seed of {list(seeds)}",
            remedy="run them",
        )
    return pairs


def _both(pairs: dict[int, Pair], question: Question) -> tuple[list[np.ndarray], list[np.ndarray]]:
    faulty = [question.values(pair.faulty) for pair in pairs.values()]
    return faulty, [question.healthy_values(pair.healthy) for pair in pairs.values()]


def _calibration(runs: Runs, model: str, question: Question) -> list[Trace]:
    found = [runs.healthy(model, seed) for seed in question.calibration_seeds]
    traces = [trace for trace in found if trace is not None]
    if len(traces) < 2:
        raise ComparisonError(
            f"{model!r} has {len(traces)} healthy calibration runs",
            expected="two or more",
            remedy=f"run it healthy with the seeds {list(question.calibration_seeds)}",
        )
    return traces


def _control(runs: Runs, model: str, means_CXW: np.ndarray, spread: Spread, question: Question) -> Control:
    """Judge healthy pairs with at least one scored seed, as if the first of each pair were faulty."""
    found = [runs.healthy(model, seed) for seed in question.scored_seeds]
    scored = [question.means(question.healthy_values(trace)) for trace in found if trace is not None]
    pairs = [*combinations(scored, 2), *((one, other) for one in scored for other in means_CXW)]
    control_PXW = np.stack([spread.response(one, other) for one, other in pairs])
    # One independent pair a seed, like the pairs of the fault itself.
    twins_RXW = np.stack([spread.response(one, other) for one, other in zip(scored, means_CXW, strict=False)])
    signs_XW = significant(twins_RXW, spread.threshold, question.rules.replicate)
    rate = false_response_rate(control_PXW, spread.threshold)
    return Control(spread.threshold, rate, len(pairs), int(signs_XW.any(1).sum()))


def _moves(values: list[np.ndarray]) -> np.ndarray:
    rows = np.concatenate(values, axis=1)
    return np.array([len(np.unique(row[~np.isnan(row)])) > 1 for row in rows])


def _notes(model: str, pairs: dict[int, Pair], question: Question) -> tuple[str, ...]:
    notes = [f"{model}: no pair of runs for seed {seed}" for seed in question.scored_seeds if seed not in pairs]
    for seed, pair in pairs.items():
        if not _same_start(pair, question):
            notes.append(f"{model}, seed {seed}: the two runs differ before the onset already")
        if len(pair.sources) > 1:
            notes.append(f"{model}, seed {seed}: a {' and a '.join(sorted(pair.sources))} run are paired")
    return tuple(notes)


def _same_start(pair: Pair, question: Question) -> bool:
    steps_S = np.intersect1d(pair.healthy.steps.index.to_numpy(), pair.faulty.steps.index.to_numpy())
    before_S = steps_S[steps_S < question.onset]
    one, other = (matrix(trace, question.names, before_S) for trace in (pair.healthy, pair.faulty))
    return np.array_equal(one, other, equal_nan=True)
