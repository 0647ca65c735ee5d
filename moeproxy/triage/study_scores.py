"""Responses of one model to every fault: what all measures of the study are made from.

Scores are responses over their thresholds: beyond ±1 a signal moves significantly. Axes: X signal, W window, S step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import Trace
from moeproxy.triage.study_protocol import Protocol
from moeproxy.triage.study_runs import Case, ModelRuns, shared_steps
from moeproxy.triage.study_signals import logged, signal_table
from moeproxy.triage.study_spread import HealthySpread, calibrate, window_means


@dataclass(frozen=True)
class Grid:
    """What is compared in all runs: signals and steps."""

    names: tuple[str, ...]
    steps_S: np.ndarray
    protocol: Protocol
    seen: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def values(self, trace: Trace) -> np.ndarray:
        """Return transformed signals (X, S) of one run."""
        # A healthy run is the twin of many broken ones. Its id is safe: the caller holds all traces.
        if id(trace) not in self.seen:
            self.seen[id(trace)] = signal_table(trace, self.names, self.steps_S)
        return self.seen[id(trace)]

    def without(self, left_out: frozenset[str]) -> np.ndarray:
        """Return bool (X,): which signals are not among `left_out`."""
        return np.array([name not in left_out for name in self.names])


@dataclass(frozen=True)
class ModelScores:
    """Scores of one model.

    Args:
        runs: its runs.
        spread: its healthy spread.
        scores: scores (X, W) of every broken run; all 0 where the fault changed nothing.
        step_scores: the same step by step, from the onset to the end of the last window.
        status: what became of every broken run that was started.
        missing: signals that the original logs and this model does not.
    """

    runs: ModelRuns
    spread: HealthySpread
    scores: Mapping[Case, np.ndarray]
    step_scores: Mapping[Case, np.ndarray]
    status: Mapping[Case, str]
    missing: tuple[str, ...]


def make_grid(models: Mapping[str, ModelRuns], protocol: Protocol) -> tuple[Grid, list[tuple[str, str]]]:
    """Return signals and steps of the study, and the signals left out with the reason.

    A signal is compared when every healthy run of the original and every broken one logs it.

    Raises:
        ComparisonError: no signal is left.
    """
    ours = models[protocol.original]
    asked = (*protocol.signals, *protocol.derived)
    needed = [*ours.calibration, *ours.scored_healthy, *(twins.faulty for twins in ours.twins.values())]
    lacking: dict[str, str] = {}
    for trace in needed:
        for name in set(asked) - logged(trace, asked):
            lacking.setdefault(name, f"skipped: not logged in {trace.provenance}")
    names = tuple(name for name in asked if name not in lacking)
    if not names:
        raise ComparisonError("no signal is logged in all runs of the original", expected="at least one")
    return Grid(names, shared_steps(models), protocol), [(name, lacking[name]) for name in asked if name in lacking]


def score_model(runs: ModelRuns, grid: Grid) -> ModelScores:
    """Return the scores of one model.

    Raises:
        ComparisonError: too few healthy calibration runs.
    """
    try:
        values_CXS = np.stack([grid.values(trace) for trace in runs.calibration]) if runs.calibration else np.empty(0)
        spread = calibrate(values_CXS, grid.steps_S, grid.names, grid.protocol)
    except ComparisonError as error:
        raise ComparisonError(
            error.found, expected=error.expected, remedy=error.remedy, where=error.where or runs.label
        ) from error
    scores, step_scores = {}, {}
    for case, twins in runs.twins.items():
        both = [grid.values(trace) for trace in (twins.faulty, twins.healthy)]
        scores[case] = spread.scores(*(window_means(v, grid.steps_S, twins.onset, grid.protocol) for v in both))
        step_scores[case] = spread.step_scores(*(values_XS[:, _after(grid, twins.onset)] for values_XS in both))
    missing = [name for x, name in enumerate(grid.names) if np.isnan(values_CXS[:, x]).all()]
    status = {case: runs.status(case) for case in (*runs.twins, *runs.crashed)}
    return ModelScores(runs, spread, scores, step_scores, status, tuple(missing))


def _after(grid: Grid, onset: int) -> np.ndarray:
    stop = onset + max(stop for _, stop in grid.protocol.windows)
    return (grid.steps_S >= onset) & (grid.steps_S < stop)


def library(ours: ModelScores, level: str, seed: int, faults: Sequence[str], noise: float) -> dict[str, np.ndarray]:
    """Return the original's mean squashed scores (X, W) of every fault over the seeds other than `seed`."""
    found = {}
    for fault in faults:
        others = other_seeds(ours, (fault, level, seed))
        if len(others):
            found[fault] = squash(others, noise).mean(0)
    return found


def other_seeds(ours: ModelScores, case: Case) -> np.ndarray:
    """Return scores (R, X, W) of the original's runs of the same fault and level with other seeds."""
    fault, level, seed = case
    rows = [
        scores
        for (its_fault, its_level, its_seed), scores in sorted(ours.scores.items())
        if (its_fault, its_level) == (fault, level) and its_seed != seed
    ]
    return np.stack(rows) if rows else np.empty((0, 0, 0))


def squash(scores: np.ndarray, noise: float) -> np.ndarray:
    """Return asinh of scores, less that of `noise` and never beyond 0: one huge signal does not drown all others."""
    return np.sign(scores) * np.fmax(np.arcsinh(np.abs(scores)) - np.arcsinh(noise), 0 * scores)
