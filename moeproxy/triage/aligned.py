"""What a run did after its onset, window by window, so that two runs can be laid over one another at their onsets.

Axes: X signal, S step, W window after the onset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeproxy.triage.arrays import known_mean
from moeproxy.triage.departure import LEAST_BEFORE, MEMORY
from moeproxy.triage.fingerprint import broken_after
from moeproxy.triage.judged import Judged, groups
from moeproxy.triage.reference import Departures

WINDOWS = ((0, 2), (2, 5), (5, 9), (9, 14), (14, 20), (20, 30))
"""Windows after the onset, in steps: short ones first, since faults differ most where they begin."""

NOISE = 3.0
"""Standard errors up to which a change counts nearly in proportion, beyond it as its logarithm."""

BROKEN = 5.0
"""Response of a signal that is not finite any more."""


@dataclass(frozen=True)
class Aligned:
    """How every signal of a run went on from its onset.

    Args:
        names: signals (X).
        response_XW: asinh of the change of each window's mean over `NOISE` standard errors; NaN where half of the
            window is missing.
    """

    names: tuple[str, ...]
    response_XW: np.ndarray

    def match(self, other: Aligned) -> float:
        """Return the cosine of both responses over the signals and windows that both have; NaN without any."""
        common = [name for name in self.names if name in other.names]
        mine = self.response_XW[[self.names.index(name) for name in common]].ravel()
        theirs = other.response_XW[[other.names.index(name) for name in common]].ravel()
        known = np.isfinite(mine) & np.isfinite(theirs)
        length = float(np.linalg.norm(mine[known]) * np.linalg.norm(theirs[known]))
        return float(mine[known] @ theirs[known]) / length if length > 0 else float("nan")

    def strength_X(self) -> np.ndarray:
        """Return the mean response (X,) of each signal over the windows that it has."""
        return known_mean(self.response_XW, axis=1)


def aligned(table: Judged, found: Departures, onset: int) -> Aligned:
    """Return how a run went on from a step.

    Args:
        table: the run's signals.
        found: how far it strays, beside healthy runs or alone.
        onset: step from which it departs.
    """
    place, members = int(np.searchsorted(found.steps_S, onset)), groups(found.rows)
    mean_XS = np.clip(np.stack([known_mean(found.residual_RS[rows], axis=0) for _, rows in members]), -1e4, 1e4)
    before_XS = mean_XS[:, max(place - MEMORY, 0) : place]
    # Without a past to change from, the level against the healthy runs says the same.
    before_X = known_mean(before_XS, axis=1) if place >= LEAST_BEFORE else np.zeros(len(members))
    windows = [_change(mean_XS[:, place + start : place + stop], before_X, stop - start) for start, stop in WINDOWS]
    response_XW = np.stack(windows, axis=1)
    broken = broken_after(table, found, onset)
    response_XW[[name in broken for name, _ in members]] = BROKEN
    return Aligned(tuple(name for name, _ in members), response_XW)


def _change(values_XS: np.ndarray, before_X: np.ndarray, length: int) -> np.ndarray:
    count_X = np.isfinite(values_XS).sum(1)
    size_X = (known_mean(values_XS, axis=1) - before_X) * np.sqrt(count_X) / NOISE
    return np.where(count_X >= length / 2, np.arcsinh(size_X), np.nan)
