"""One proxy against the original: every measure of `agreement`, put into a ProxyResult.

Axes: R scored seed, P pair of healthy runs, X signal, S step, W window, N significant signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeproxy.triage import agreement, verdict
from moeproxy.triage.agreement import Interval, Marks, bootstrap
from moeproxy.triage.measured import Question, Responses
from moeproxy.triage.result import Matrix, ProxyResult

Library = dict[str, dict[int, np.ndarray]]
"""The original's squashed responses (X, W) by fault and seed: what the nearest fault is sought among."""


@dataclass(frozen=True)
class _Shared:
    """Responses of original and proxy on the seeds that both have; signals that never move are NaN."""

    seeds: tuple[int, ...]
    ours_RXW: np.ndarray
    theirs_RXW: np.ndarray
    healthy_PXW: np.ndarray

    @staticmethod
    def of(ours: Responses, theirs: Responses) -> _Shared:
        seeds = tuple(seed for seed in theirs.seeds if seed in ours.seeds)
        keep_X1 = (ours.moves_X | theirs.moves_X)[:, None]
        ours_RXW, theirs_RXW = ours.response_RXW[ours.rows(seeds)], theirs.response_RXW[theirs.rows(seeds)]
        parts = (np.where(keep_X1, part, np.nan) for part in (ours_RXW, theirs_RXW, theirs.healthy_PXW))
        return _Shared(seeds, *parts)


def judge(question: Question, ours: Responses, theirs: Responses, library: Library, marks: Marks) -> ProxyResult:
    """Return measures, controls and verdict of one proxy."""
    shared, rules, seed = _Shared.of(ours, theirs), question.rules, question.bootstrap_seed
    direction = bootstrap(agreement.direction(shared.theirs_RXW, marks), seed)
    found = bootstrap(agreement.found(shared.theirs_RXW, marks, theirs.spread.threshold), seed)
    rank = bootstrap(_ranks(shared.ours_RXW, shared.theirs_RXW), seed)
    null = agreement.rank_null(shared.ours_RXW, shared.healthy_PXW)
    null_median, null_high = _quantiles(null, (0.5, rules.null_quantile))
    later_R = onsets(theirs, shared.seeds, marks, question) - onsets(ours, shared.seeds, marks, question)
    onset = bootstrap(later_R, seed)
    retrieved = _retrieve(shared, theirs, library, rules.null_quantile)
    retrieval = bootstrap(np.array([float(name == question.fault) for name in retrieved]), seed)
    without = _without_strongest(shared, marks)
    best = ceiling(ours, seed)
    checks = verdict.checks(direction, found, rank, null_high, best, without, onset, retrieval, retrieved, rules)
    said, reason = verdict.judge(len(marks) > 0, checks, len(shared.seeds))
    run = next(iter(theirs.pairs.values())).faulty.provenance
    return ProxyResult(
        model=theirs.model,
        method=run.method,
        n_experts=run.n_experts,
        verdict=said,
        reason=reason,
        seeds=shared.seeds,
        direction=direction,
        found=found,
        rank=rank,
        rank_without_strongest=without,
        rank_null_high=null_high,
        rank_null_median=null_median,
        onset_difference=onset,
        retrieval=retrieval,
        retrieved=retrieved,
        control=theirs.control,
        response=as_matrix(shared.theirs_RXW.mean(0)),
        sources=theirs.sources,
        notes=theirs.notes + _missing_signals(theirs, question),
    )


def onsets(model: Responses, seeds: Sequence[int], marks: Marks, question: Question) -> np.ndarray:
    """Return (R,): first lasting departure of any of the original's significant signals; NaN if none."""
    if not len(marks):
        return np.full(len(seeds), np.nan)
    parts = model.step_RXS[model.rows(seeds)][:, marks.signals_N]
    persist = question.rules.persist
    return np.array([agreement.onset(part, question.steps_S, model.spread, persist) for part in parts])


def ceiling(ours: Responses, bootstrap_seed: int) -> Interval:
    """Return the rank correlation of the original with itself, each seed with all other seeds."""
    rows_RXW = np.where(ours.moves_X[:, None], ours.response_RXW, np.nan)
    values = [_mean_rank(rows_RXW[r], np.delete(rows_RXW, r, axis=0)) for r in range(len(rows_RXW))]
    return bootstrap(np.array(values), bootstrap_seed)


def as_matrix(values_XW: np.ndarray) -> Matrix:
    """Return an array as nested tuples."""
    return tuple(tuple(float(value) for value in row) for row in values_XW)


def _ranks(ours_RXW: np.ndarray, theirs_RXW: np.ndarray) -> np.ndarray:
    return np.array([agreement.rank_correlation(a, b) for a, b in zip(ours_RXW, theirs_RXW, strict=True)])


def _mean_rank(one_XW: np.ndarray, others_RXW: np.ndarray) -> float:
    values = [agreement.rank_correlation(one_XW, other) for other in others_RXW]
    return float(np.mean(values)) if values else float("nan")


def _without_strongest(shared: _Shared, marks: Marks) -> float:
    """Return the mean rank correlation without the original's strongest signal: does all hang on one?"""
    if not len(marks):
        return float("nan")
    ours, theirs = (np.delete(part, marks.signals_N[0], axis=1) for part in (shared.ours_RXW, shared.theirs_RXW))
    return bootstrap(_ranks(ours, theirs), 0).mean


def _quantiles(values: np.ndarray, levels: Sequence[float]) -> tuple[float, ...]:
    seen = values[np.isfinite(values)]
    return tuple(float(np.quantile(seen, level)) if seen.size else float("nan") for level in levels)


def _retrieve(shared: _Shared, theirs: Responses, library: Library, quantile: float) -> tuple[str, ...]:
    """Return the nearest fault of the original, seed by seed."""
    squashed_RXW = agreement.squash(shared.theirs_RXW, theirs.spread.threshold)
    healthy_PXW = agreement.squash(shared.healthy_PXW, theirs.spread.threshold)
    answers = []
    for seed, response_XW in zip(shared.seeds, squashed_RXW, strict=True):
        known = {fault: _other_seeds(by_seed, seed) for fault, by_seed in library.items()}
        answers.append(agreement.nearest(response_XW, known, agreement.healthy_level(healthy_PXW, known, quantile)))
    return tuple(answers)


def _other_seeds(by_seed: dict[int, np.ndarray], seed: int) -> np.ndarray:
    # The same seed saw the same prompts; without it a hit cannot come from that alone. One seed leaves no
    # choice.
    others = [response for other, response in by_seed.items() if other != seed]
    return np.mean(others or list(by_seed.values()), axis=0)


def _missing_signals(theirs: Responses, question: Question) -> tuple[str, ...]:
    empty = [name for x, name in enumerate(question.names) if np.isnan(theirs.response_RXW[:, x]).all()]
    return tuple(f"skipped: {theirs.model} needs {name}" for name in empty)
