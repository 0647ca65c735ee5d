"""One broken run against the original's library: direction, rank correlation, onset, nearest fault.

Axes: R seed of the original other than the judged one, X signal, W window, S step, N significant signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeproxy.triage.agreement import Marks, cosine, direction, found, rank_correlation, significant
from moeproxy.triage.response import persistent
from moeproxy.triage.study_runs import ABSENT, Case
from moeproxy.triage.study_scores import Grid, ModelScores, library, other_seeds, squash

NONE = "none"
"""The answer where a run does not differ from healthy."""

MEASURES: dict[str, str] = {
    "top1": "share of runs whose nearest fault of the original is the right one",
    "top3": "share of runs with the right fault among the three nearest",
    "reciprocal_rank": "mean of 1 / place of the right fault; 0 where the answer is none",
    "detected": "share of runs that differ from healthy as a whole",
    "top1_forced": "top1 where the answer none is not allowed: independent of the number of calibration runs",
    "top1_consequences": "top1 without every signal that some fault changes by its definition",
    "direction": "share of the original's significant signals that move the same way",
    "found": "share of them that move the same way significantly",
    "rank": "Spearman correlation with the original's response to the same fault",
    "rank_other": "the same with the original's responses to the other faults, their mean",
    "onset_difference": "first lasting departure, minus the original's with the same seed, in steps",
    "departs": "share of runs with a lasting departure, where the original has one",
}
"""What is measured of every run, averaged over seeds and faults."""


@dataclass(frozen=True)
class Cell:
    """The measures of one broken run; NaN where one is undefined.

    Args:
        nearest: the nearest fault of the original, or "none".
        second: the next nearest.
        similarity: cosine with the original's response to the right fault.
        best_other: largest cosine with another fault.
        signals: significant signals of the original, by its other seeds.
        others: those of them that the fault does not change by its definition.
    """

    status: str
    nearest: str = NONE
    second: str = NONE
    similarity: float = np.nan
    best_other: float = np.nan
    signals: int = 0
    others: int = 0
    top1: float = np.nan
    top3: float = np.nan
    reciprocal_rank: float = np.nan
    detected: float = np.nan
    top1_forced: float = np.nan
    top1_consequences: float = np.nan
    direction: float = np.nan
    found: float = np.nan
    rank: float = np.nan
    rank_other: float = np.nan
    onset_difference: float = np.nan
    departs: float = np.nan

    def row(self) -> dict[str, Any]:
        """Return it as a row of a table."""
        return asdict(self)


_LOST: dict[str, Any] = dict.fromkeys(
    ("top1", "top3", "reciprocal_rank", "detected", "top1_forced", "top1_consequences"), 0.0
)


def measure(ours: ModelScores, theirs: ModelScores, case: Case, known: tuple[str, ...], grid: Grid) -> Cell:
    """Return the measures of one run of a model against the original's runs of other seeds.

    Args:
        ours: the original.
        theirs: the model that is judged, which may be the original.
        case: fault, level and seed of the judged run.
        known: faults of the library.
        grid: signals, steps and protocol.
    """
    status = theirs.status.get(case) or theirs.runs.status(case)
    if status == ABSENT:
        return Cell(status)
    if case not in theirs.scores:  # it crashed, or the model has no part that the fault could break
        return Cell(status, **_LOST)
    entries = library(ours, case[1], case[2], known, grid.protocol.noise)
    scores_XW = theirs.scores[case]
    keep_X = grid.without(grid.protocol.defined(case[0]))
    return Cell(
        status,
        **_retrieval(scores_XW, entries, theirs, case[0], grid),
        **_ranks(ours, scores_XW, case, known, keep_X),
        **_movement(ours, theirs, case, keep_X, grid.protocol.persist),
    )


def nearest(scores_XW: np.ndarray, entries: Mapping[str, np.ndarray], noise: float) -> dict[str, float]:
    """Return the cosine of a response with every entry of the library, largest first."""
    squashed_XW = squash(scores_XW, noise)
    found_ = {fault: cosine(squashed_XW, entry_XW) for fault, entry_XW in entries.items()}
    return dict(sorted(found_.items(), key=lambda item: -item[1]))


def _retrieval(
    scores_XW: np.ndarray, entries: dict[str, np.ndarray], theirs: ModelScores, fault: str, grid: Grid
) -> dict[str, Any]:
    if fault not in entries:  # one seed only: the original says nothing about this fault without the judged one
        return {}
    noise = grid.protocol.noise
    similarity = nearest(scores_XW, entries, noise)
    order = [*similarity]
    detected = theirs.spread.responds(scores_XW, grid.protocol)
    place = _place(similarity, fault)
    rest_X = grid.without(grid.protocol.all_defined)
    consequences = nearest(scores_XW[rest_X], {name: entry[rest_X] for name, entry in entries.items()}, noise)
    return {
        "nearest": order[0] if detected else NONE,
        "second": next(iter(order[1:]), NONE) if detected else NONE,
        "similarity": similarity[fault],
        "best_other": max((value for name, value in similarity.items() if name != fault), default=np.nan),
        "top1": float(detected and place == 1),
        "top3": float(detected and place <= 3),
        "reciprocal_rank": detected / place,
        "detected": float(detected),
        "top1_forced": float(place == 1),
        "top1_consequences": float(detected and _place(consequences, fault) == 1),
    }


def _place(similarity: Mapping[str, float], fault: str) -> int:
    # Ties count against the right fault: a response of nothing is like every fault and points to none.
    return sum(value >= similarity[fault] for value in similarity.values())


def _ranks(
    ours: ModelScores, scores_XW: np.ndarray, case: Case, known: tuple[str, ...], keep_X: np.ndarray
) -> dict[str, Any]:
    # Ranks need no shrinking of noise, and would only see ties where it was set to 0.
    entries = library(ours, case[1], case[2], known, 0.0)
    ranks = {name: rank_correlation(scores_XW[keep_X], entry_XW[keep_X]) for name, entry_XW in entries.items()}
    others = np.array([value for name, value in ranks.items() if name != case[0]])
    seen = others[np.isfinite(others)]
    return {"rank": ranks.get(case[0], np.nan), "rank_other": float(seen.mean()) if seen.size else np.nan}


def _movement(ours: ModelScores, theirs: ModelScores, case: Case, keep_X: np.ndarray, persist: int) -> dict[str, Any]:
    others_RXW = other_seeds(ours, case)
    if not len(others_RXW):
        return {}
    signs_XW = significant(others_RXW, 1.0, 1.0)
    every = Marks.of(others_RXW, signs_XW)
    marks = Marks.of(others_RXW, signs_XW * keep_X[:, None])
    moved_1XW = theirs.scores[case][None]
    own = departure(theirs.step_scores[case], every, persist)
    same = departure(ours.step_scores[case], every, persist) if case in ours.step_scores else np.nan
    return {
        "signals": len(every),
        "others": len(marks),
        "direction": float(direction(moved_1XW, marks)[0]),
        "found": float(found(moved_1XW, marks, 1.0)[0]),
        "onset_difference": own - same,
        "departs": np.nan if np.isnan(same) else float(np.isfinite(own)),
    }


def departure(step_scores_XS: np.ndarray, marks: Marks, persist: int) -> float:
    """Return how many steps after the onset the first of the marked signals departs lastingly; NaN if none does."""
    if not len(marks) or step_scores_XS.shape[1] < persist:
        return float("nan")
    lasting_S = (persistent(step_scores_XS[marks.signals_N], persist) > 1).any(0)
    return float(lasting_S.argmax()) if lasting_S.any() else float("nan")
