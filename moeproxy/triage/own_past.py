"""A run against its own beginning: its noise, lone spikes, what a log rounded, how much it changes at each step.

Axes: R row, S step, T candidate onset, D direction (0: rise, 1: fall).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.triage.departure import (
    candidates,
    first_spikes,
    lone_extremes,
    lone_spikes,
    rises_and_falls,
    shifts,
    step_noise,
    without_spikes,
)
from moeproxy.triage.judged import Judged, original_value, scale_of

EARLIEST = 10
"""First candidate onset, in steps: the beginning says how noisy a run is."""

FEWEST_STEPS = EARLIEST + 5

SHOWN = 10
"""Steps over which a level is averaged."""

FEWEST_LEVELS = 3
"""Different values from which on a log seems to have rounded them: two may be all that there is, as of a share."""


def _onsets(table: Judged) -> np.ndarray:
    n_steps = len(table.steps_S)
    if n_steps < FEWEST_STEPS:
        raise ComparisonError(
            f"a run of {n_steps} steps",
            expected=f"at least {FEWEST_STEPS} without healthy runs beside it",
            remedy="give healthy runs of the same settings, or a longer log",
        )
    return candidates(n_steps, EARLIEST)


@dataclass(frozen=True)
class OwnPast:
    """A run against its own beginning: values without lone spikes (R, S), what is left of them in step noise (R, S),
    rises and falls (D, R, T), lone spikes (R, S)."""

    onset_T: np.ndarray
    start_R: np.ndarray
    noise_R: np.ndarray
    left_RS: np.ndarray
    residual_RS: np.ndarray
    moves_DRT: np.ndarray
    spikes_RS: np.ndarray

    @property
    def contrast_RT(self) -> np.ndarray:
        """Size (R, T) of the change at each candidate onset, be it a rise or a fall."""
        return self.moves_DRT.max(0)

    @property
    def level_RT(self) -> np.ndarray:
        """Distance (R, T) of ten steps from each candidate on from the beginning, in standard errors of their mean."""
        return np.abs(shifts(self.residual_RS, self.onset_T, ((0, SHOWN),))[0, 0]) * np.sqrt(SHOWN)

    @staticmethod
    def of(table: Judged) -> OwnPast:
        """Measure a run.

        Raises:
            ComparisonError: it is too short.
        """
        onset_T, (values_RS, coarse_R) = _onsets(table), _unrounded(table)
        early = max(EARLIEST, len(table.steps_S) // 4)
        floor_R = np.fmax(table.floor_R, coarse_R)
        # One spike at the very first step would hide in a noise that is taken with it.
        later_R = step_noise(values_RS[:, 1:early], floor_R)
        first_RS = first_spikes(values_RS, np.zeros((len(values_RS), 3)), later_R) & ~_begins_with_zero(table)
        noise_R = np.where(first_RS[:, 0], later_R, step_noise(values_RS[:, :early], floor_R))
        spikes_RS = lone_spikes(values_RS, noise_R) | lone_extremes(values_RS) | first_RS
        left_RS = without_spikes(values_RS, spikes_RS)
        start_R = np.nan_to_num(_middle(left_RS[:, :EARLIEST]))
        residual_RS = (left_RS - start_R[:, None]) / noise_R[:, None]
        moves_DRT = rises_and_falls(residual_RS, onset_T, trend=True)
        return OwnPast(onset_T, start_R, noise_R, left_RS, residual_RS, moves_DRT, spikes_RS)


def _middle(values_RS: np.ndarray) -> np.ndarray:
    """Return medians (R,), NaN where nothing is known.

    A step of equal answers has a gradient of nearly zero, which on a logarithmic scale moves a mean by magnitudes.
    """
    known_R, found_R = np.isfinite(values_RS).any(1), np.full(len(values_RS), np.nan)
    found_R[known_R] = np.nanmedian(values_RS[known_R], axis=1)
    return found_R


def _begins_with_zero(table: Judged) -> np.ndarray:
    """Return which rows (R, 1) begin with a zero, as the divergence from the start of training does: no spike."""
    pairs = zip(table.rows, table.finite_RS[:, 0], strict=True)
    return np.array([[original_value(row, float(value)) == 0] for row, value in pairs])


def _unrounded(table: Judged) -> tuple[np.ndarray, np.ndarray]:
    """Return values (R, S) as they may have been before a log rounded them, and the step (R,) to which it did.

    Both are transformed; the step is 0 where the log did not seem to round. A loss printed with four decimals is 0.0000
    for many steps: its noise is not zero but less than it shows. On a logarithmic scale a zero stands for half a step,
    since the next value that shows is one step.
    """
    values_RS, coarse_R = table.finite_RS.copy(), np.zeros(len(table.rows))
    for row, name in enumerate(table.rows):
        is_log = scale_of(name) == "log"
        known_S = np.isfinite(values_RS[row])
        shown = [original_value(name, float(value)) for value in values_RS[row, known_S]] if is_log else []
        # To nine digits: exp(log(x)) is not quite x.
        values = np.unique([float(f"{one:.9g}") for one in shown] if is_log else values_RS[row, known_S])
        if not FEWEST_LEVELS <= len(values) < known_S.sum() / 2:
            continue
        step = float(np.diff(values).min())
        if is_log:
            values_RS[row, known_S] = np.fmax(values_RS[row, known_S], np.log(step / 2))
            early = float(np.median(shown[: max(EARLIEST, len(shown) // 4)]))
            step = float(np.log1p(step / max(early, step / 2)))
        coarse_R[row] = step
    return values_RS, coarse_R
