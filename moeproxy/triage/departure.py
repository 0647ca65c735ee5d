"""How strongly, and from which step on, a run departs: statistics of one candidate onset after the other.

Axes: R row, S step, T candidate onset, W window after the onset, V view (0: level against the reference, 1: change
against the run's own past), D direction (0: rise, 1: fall).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPANS = ((0, 3), (0, 10), (0, 25))
"""Windows after a candidate onset, in steps, over which a departure is averaged: short and strong to long and weak."""

CONTRAST_SPANS = (5, 15, 60)
"""Lengths of the windows after a candidate onset that are set against the past."""

MEMORY = 60
"""Steps of the past that a change is measured against."""

LEAST_BEFORE, LEAST_AFTER = 4, 3
"""Steps that a candidate onset must have before and after it."""

SPIKE = 8.0
"""Size, in step noise, of a lone value that is taken out before judging: one step is a note, not an alarm."""

EXTREME = 5.0
"""Robust noises between a single value and the next of all others from which on it is told."""

LEAST_KNOWN = 5
"""Values from which on one can be called far from all others."""

CLIP = 30.0

_MEDIAN_TO_STD = 1.4826 / np.sqrt(2)  # of the median |difference| of two normal values


@dataclass(frozen=True)
class _Sums:
    """Sums of known values up to a step (R, S + 1), and how many there are."""

    total: np.ndarray
    count: np.ndarray

    @staticmethod
    def of(values_RS: np.ndarray) -> _Sums:
        here = np.isfinite(values_RS)
        zero = np.zeros((len(values_RS), 1))
        total = np.cumsum(np.where(here, values_RS, 0), axis=1)
        return _Sums(np.hstack([zero, total]), np.hstack([zero, np.cumsum(here, axis=1)]))

    def mean(self, start_T: np.ndarray, stop_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return means (R, T) of steps start..stop-1, 0 where there is none, and the counts."""
        count_RT = self.count[:, stop_T] - self.count[:, start_T]
        return (self.total[:, stop_T] - self.total[:, start_T]) / np.maximum(count_RT, 1), count_RT


def candidates(n_steps: int, first: int = LEAST_BEFORE) -> np.ndarray:
    """Return the places (T,) of candidate onsets from `first` on, as indices of steps; at most about a thousand."""
    last = n_steps - LEAST_AFTER
    return np.arange(first, last + 1, max(1, n_steps // 1000))


def shifts(values_RS: np.ndarray, onset_T: np.ndarray, spans: Sequence[tuple[int, int]] = SPANS) -> np.ndarray:
    """Return mean shifts (W, V, R, T) after each candidate onset, 0 where half of a window is missing.

    Args:
        values_RS: what is left of a run after the reference is taken off; NaN is missing.
        onset_T: candidate onsets, as indices of steps.
        spans: windows after the onset, [start, stop).
    """
    sums, n_steps = _Sums.of(values_RS), values_RS.shape[1]
    before_RT, n_before_RT = sums.mean(np.maximum(onset_T - MEMORY, 0), onset_T)
    rows = []
    for start, stop in spans:
        stop_T = np.minimum(onset_T + stop, n_steps)
        start_T = np.minimum(onset_T + start, stop_T - 1)
        mean_RT, count_RT = sums.mean(start_T, stop_T)
        known_RT = count_RT > (stop_T - start_T) / 2
        level_RT = np.where(known_RT, mean_RT, 0)
        past_RT = known_RT & (n_before_RT >= LEAST_BEFORE - 1)
        rows.append(np.stack([level_RT, np.where(past_RT, mean_RT - before_RT, 0)]))
    return np.stack(rows)


def contrast(noise_units_RS: np.ndarray, onset_T: np.ndarray, *, trend: bool = False) -> np.ndarray:
    """Return the size (R, T) of the change at each candidate onset, in standard errors (see `rises_and_falls`)."""
    return rises_and_falls(noise_units_RS, onset_T, trend=trend).max(0)


def rises_and_falls(noise_units_RS: np.ndarray, onset_T: np.ndarray, *, trend: bool = False) -> np.ndarray:
    """Return the sizes (2, R, T) of the rise and of the fall at each candidate onset, in standard errors; 0 for none.

    It is the two-sample statistic |after - before| / sqrt(1/n_after + 1/n_before), the largest over the lengths of
    `CONTRAST_SPANS`. Its maximum over T estimates the onset (the likelihood-ratio estimate for one shift of the mean).

    Args:
        noise_units_RS: residuals over step noise; clipped at ±30 so that one value decides nothing.
        onset_T: candidate onsets.
        trend: whether a change counts only as far as it exceeds what the trend of the past would have gone on to. A
            run without healthy ones beside it learns, and learning is no change.
    """
    values_RS = np.clip(noise_units_RS, -CLIP, CLIP)
    sums, n_steps = _Sums.of(values_RS), noise_units_RS.shape[1]
    start_T = np.maximum(onset_T - MEMORY, 0)
    before_RT, n_before_RT = sums.mean(start_T, onset_T)
    slope_RT = _slopes(values_RS, sums, start_T, onset_T) if trend else np.zeros_like(before_RT)
    best_DRT = np.zeros((2, len(noise_units_RS), len(onset_T)))
    for length in CONTRAST_SPANS:
        stop_T = np.minimum(onset_T + length, n_steps)
        after_RT, n_after_RT = sums.mean(onset_T, stop_T)
        known_RT = (n_after_RT > (stop_T - onset_T) / 2) & (n_before_RT >= LEAST_BEFORE - 1)
        weight_RT = n_after_RT * n_before_RT / np.maximum(n_after_RT + n_before_RT, 1)
        # The middle of the window after the onset lies this far from the middle of the past.
        gone_RT = slope_RT * (stop_T - start_T) / 2
        change_RT = after_RT - before_RT
        same_RT = np.sign(gone_RT) == np.sign(change_RT)
        size_RT = np.where(same_RT, np.maximum(np.abs(change_RT) - np.abs(gone_RT), 0), np.abs(change_RT))
        sized_RT = np.where(known_RT, size_RT * np.sqrt(weight_RT), 0)
        best_DRT = np.maximum(best_DRT, np.where(np.stack([change_RT > 0, change_RT < 0]), sized_RT, 0))
    return best_DRT


def _slopes(values_RS: np.ndarray, sums: _Sums, start_T: np.ndarray, stop_T: np.ndarray) -> np.ndarray:
    """Return least-squares slopes (R, T) over the steps start..stop-1; missing values count as the mean there."""
    place_S = np.arange(values_RS.shape[1], dtype=float)
    known_RS = np.isfinite(values_RS)
    first = _Sums.of(np.where(known_RS, values_RS * place_S, np.nan))
    places = _Sums.of(np.where(known_RS, place_S, np.nan))
    squares = _Sums.of(np.where(known_RS, place_S**2, np.nan))
    mean_RT, place_RT = sums.mean(start_T, stop_T)[0], places.mean(start_T, stop_T)[0]
    covariance_RT = first.mean(start_T, stop_T)[0] - mean_RT * place_RT
    variance_RT = squares.mean(start_T, stop_T)[0] - place_RT**2
    return np.where(variance_RT > 1e-9, covariance_RT / np.maximum(variance_RT, 1e-9), 0)


def robust_noise(values_RS: np.ndarray) -> np.ndarray:
    """Return the noise (R,) of single steps from the median of successive differences; 0 where there is none."""
    step_RS = np.abs(np.diff(values_RS, axis=-1))
    known_R = np.isfinite(step_RS).any(-1)
    noise_R = np.zeros(len(values_RS))
    noise_R[known_R] = np.nanmedian(step_RS[known_R], axis=-1) * _MEDIAN_TO_STD
    return noise_R


def step_noise(values_RS: np.ndarray, floor_R: np.ndarray) -> np.ndarray:
    """Return the noise (R,) of single steps, from successive differences: these do not see a slow trend.

    The smaller of the usual and a robust estimate (a jump or a spike makes the usual one large), but never less than
    seven tenths of the usual one: for signals that are constant at most steps the robust one is zero.
    """
    step_RS = np.diff(values_RS, axis=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row without any value has no noise
        usual_R = np.sqrt(np.nanmean(step_RS**2, axis=-1) / 2)
        robust_R = np.nanmedian(np.abs(step_RS), axis=-1) * _MEDIAN_TO_STD
    return np.fmax(np.fmax(np.fmin(usual_R, robust_R), 0.7 * usual_R), floor_R)


def lone_spikes(values_RS: np.ndarray, noise_R: np.ndarray) -> np.ndarray:
    """Return where (R, S) a single value stands out of both neighbours on one side, while these agree.

    The last value has none after it and is set against the two before: whether it lasts, no later step says.
    """
    left_RS, right_RS = values_RS[:, :-2], values_RS[:, 2:]
    middle_RS, noise_R1 = values_RS[:, 1:-1], noise_R[:, None]
    found_RS = np.zeros(values_RS.shape, bool)
    found_RS[:, 1:-1] = _stands_out(middle_RS, left_RS, right_RS, noise_R1)
    if values_RS.shape[1] > LEAST_AFTER:
        found_RS[:, -1:] = _stands_out(values_RS[:, -1:], values_RS[:, -2:-1], values_RS[:, -3:-2], noise_R1)
    return found_RS


def first_spikes(values_RS: np.ndarray, usual_RS: np.ndarray, noise_R: np.ndarray) -> np.ndarray:
    """Return where (R, S) the first value stands out of the next two on one side, while these agree.

    Args:
        values_RS: values.
        usual_RS: what healthy runs do at the first three steps (R, 3), which is taken off: many a signal begins with a
            zero. Zeros where nobody knows.
        noise_R: noise of single steps.
    """
    found_RS = np.zeros(values_RS.shape, bool)
    if values_RS.shape[1] > LEAST_AFTER:
        left_RS = values_RS[:, :3] - usual_RS
        found_RS[:, :1] = _stands_out(left_RS[:, :1], left_RS[:, 1:2], left_RS[:, 2:3], noise_R[:, None])
    return found_RS


def _stands_out(values: np.ndarray, one: np.ndarray, other: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return where a value lies on one side of two others, farther than a spike, while these agree."""
    with np.errstate(invalid="ignore"):
        up = (values - one > SPIKE * noise) & (values - other > SPIKE * noise)
        down = (one - values > SPIKE * noise) & (other - values > SPIKE * noise)
        return (up | down) & (np.abs(one - other) < SPIKE * noise)


def lone_extremes(values_RS: np.ndarray) -> np.ndarray:
    """Return single values (R, S) far beyond all others of their row, the first step's left out: it is often zero.

    By the robust noise of the whole row: a first value of zero makes the noise of a run's beginning large on a
    logarithmic scale, and hides a spike as large as the whole range of the signal.
    """
    noise_R = robust_noise(values_RS)
    found_RS = np.zeros(values_RS.shape, bool)
    for index, values_S in enumerate(values_RS):
        known = np.flatnonzero(np.isfinite(values_S))
        order = known[np.argsort(values_S[known])]
        if len(order) <= LEAST_KNOWN or not noise_R[index]:
            continue
        for last, next_to_last in ((order[-1], order[-2]), (order[0], order[1])):
            beyond = abs(values_S[last] - values_S[next_to_last])
            found_RS[index, last] |= last > 0 and beyond > EXTREME * noise_R[index]
    return found_RS


def without_spikes(values_RS: np.ndarray, spikes_RS: np.ndarray, first_R: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the values with the mean of both neighbours in the place of every lone spike, at the ends of the only one.

    Args:
        values_RS: values.
        spikes_RS: the spikes.
        first_R: by how much healthy runs' first values exceed their second ones.
    """
    between_RS = np.full_like(values_RS, np.nan)
    between_RS[:, 1:-1] = (values_RS[:, :-2] + values_RS[:, 2:]) / 2
    between_RS[:, -1:] = values_RS[:, -2:-1]
    between_RS[:, 0] = values_RS[:, 1] + first_R
    return np.where(spikes_RS, between_RS, values_RS)


def averages(values_RS: np.ndarray, start_T: np.ndarray, stop_T: np.ndarray) -> np.ndarray:
    """Return means (R, T) of the known values at start..stop-1, 0 where there is none."""
    return _Sums.of(values_RS).mean(start_T, stop_T)[0]


def smoothed(values_RS: np.ndarray, width: int = 7) -> np.ndarray:
    """Return running means over `width` steps, NaN left out; NaN where there is nothing."""
    sums, n_steps = _Sums.of(values_RS), values_RS.shape[1]
    place_S = np.arange(n_steps)
    mean_RS, count_RS = sums.mean(np.maximum(place_S - width // 2, 0), np.minimum(place_S + width // 2 + 1, n_steps))
    return np.where(count_RS > 0, mean_RS, np.nan)
