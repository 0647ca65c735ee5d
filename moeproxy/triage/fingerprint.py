"""The fingerprint of a departure: how every signal changed shortly after the onset and later on.

Changes are in units of what healthy runs reach, so that fingerprints of models of different size can be compared, and
fingerprints of runs judged beside healthy ones and alone each have their own units (`Units`).

Axes: R row, X signal, W window, S step, F feature (signal and window, then signal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moeproxy.triage.alarms import lasting_break
from moeproxy.triage.arrays import known_mean
from moeproxy.triage.departure import LEAST_BEFORE, shifts
from moeproxy.triage.judged import Judged, groups
from moeproxy.triage.reference import Departures

SPANS = ((0, 5), (5, 30))
"""Windows after the onset, in steps: at once, and what follows."""

WINDOW_NAMES = ("at once", "later")

NOISE = 0.5
"""Changes below this share of what healthy runs reach count as none: most entries are noise, and there are many."""

BROKEN = 3.0
"""Feature of a signal that is not finite any more, on the scale of asinh(change)."""

FEWEST = 3
"""Steps that a window must hold."""

QUANTILE, LEAST = 0.99, 2.5


@dataclass(frozen=True)
class Units:
    """What healthy runs reach: the 99 % quantile of their changes, in step noise, by signal and window."""

    by_signal: Mapping[str, tuple[float, ...]]

    @staticmethod
    def of(healthy: Sequence[Departures]) -> Units:
        """Learn from healthy runs, each measured as a run would be that is judged."""
        names = list(dict.fromkeys(name for one in healthy for name in one.names))
        changes: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for one in healthy:
            change_WXT = _changes(one, one.onset_T)[0]
            for index, name in enumerate(one.names):
                changes[name].append(np.abs(change_WXT[:, index]))
        least_W = LEAST / np.sqrt([stop - start for start, stop in SPANS])
        found = {}
        for name, parts in changes.items():
            quantile_W = np.nanquantile(np.concatenate(parts, axis=1), QUANTILE, axis=1)
            found[name] = tuple(float(value) for value in np.fmax(np.nan_to_num(quantile_W), least_W))
        return Units(found)


@dataclass(frozen=True)
class Fingerprint:
    """How a run changed at an onset.

    Args:
        names: signals (X).
        change_XW: change by window, in units of what healthy runs reach; NaN where a window is too short.
        broken_X: whether the signal is not finite any more.
    """

    names: tuple[str, ...]
    change_XW: np.ndarray
    broken_X: np.ndarray

    def features(self, names: Sequence[str]) -> np.ndarray:
        """Return the features (F,) of these signals; NaN where the run has none."""
        if not self.names:
            return np.full(len(names) * (len(SPANS) + 1), np.nan)
        place = {name: index for index, name in enumerate(self.names)}
        index_X = [place.get(name, -1) for name in names]
        known_X = np.array(index_X) >= 0
        change_XW = np.where(known_X[:, None], self.change_XW[index_X], np.nan)
        quiet_XW = np.where(np.abs(change_XW) < NOISE, 0.0, change_XW)
        broken_X = np.where(known_X, BROKEN * self.broken_X[index_X], np.nan)
        return np.concatenate([np.arcsinh(quiet_XW).ravel(), broken_X])


def fingerprint(table: Judged, found: Departures, onset: int, units: Units) -> Fingerprint:
    """Return the fingerprint of a run.

    Args:
        table: the run's signals.
        found: how far it strays, beside healthy runs or alone.
        onset: step from which it departs.
        units: of that way of judging.
    """
    if not set(found.names) & set(units.by_signal):
        return Fingerprint((), np.empty((0, len(SPANS))), np.empty(0))
    place = min(int(np.searchsorted(found.steps_S, onset)), len(found.steps_S) - FEWEST)
    change_WX, known_WX = (part[..., 0] for part in _changes(found, np.array([place])))
    known = [name in units.by_signal for name in found.names]
    unit_XW = np.array([units.by_signal.get(name, (np.nan,) * len(SPANS)) for name in found.names])
    change_XW = np.where(known_WX.T, change_WX.T / unit_XW, np.nan)
    # What any learning moves, and did not move further here, is no evidence: its change counts as a healthy run's.
    learns_X1 = np.array([name in found.learns for name in found.names])[:, None]
    only_X1 = learns_X1 & (found.excess_XT.max(1) <= 1)[:, None]
    change_XW = np.where(only_X1, np.clip(change_XW, -1, 1), change_XW)
    broken = broken_after(table, found, onset)
    broken_X = [name in broken for name, _ in groups(found.rows)]
    chosen = np.flatnonzero(known)
    return Fingerprint(tuple(found.names[x] for x in chosen), change_XW[chosen], np.array(broken_X, float)[chosen])


def broken_after(table: Judged, found: Departures, onset: int) -> set[str]:
    """Return the signals that are not finite any more from an onset on."""
    start = int(np.searchsorted(table.steps_S, onset))
    broken = {name for name, broken_S in zip(table.rows, table.broken_RS, strict=True) if _breaks(broken_S, start)}
    return {name for name, rows in groups(found.rows) if any(found.rows[r] in broken for r in rows)}


def _breaks(broken_S: np.ndarray, start: int) -> bool:
    return lasting_break(broken_S[max(start - 1, 0) :]) is not None


def _changes(found: Departures, onset_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return changes (W, X, T) in step noise, a signal's rows averaged, and whether they are known."""
    members = groups(found.rows)
    mean_XS = np.stack([known_mean(found.residual_RS[rows], axis=0) for _, rows in members])
    shift_WVXT = shifts(np.clip(mean_XS, -1e4, 1e4), onset_T, SPANS)
    # Without a past to change from, the level against the healthy runs says the same.
    view = 1 if onset_T.min() >= LEAST_BEFORE - 1 else 0
    length_WT = np.stack([_steps_in(span, onset_T, mean_XS.shape[1]) for span in SPANS])
    known_WXT = np.broadcast_to(length_WT[:, None] >= FEWEST, shift_WVXT[:, view].shape)
    return np.where(known_WXT, shift_WVXT[:, view], np.nan), known_WXT


def _steps_in(span: tuple[int, int], onset_T: np.ndarray, n_steps: int) -> np.ndarray:
    return np.minimum(onset_T + span[1], n_steps) - np.minimum(onset_T + span[0], n_steps)
