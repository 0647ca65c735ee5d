"""What healthy runs look like: the trend they share, how far they stray from it, and what a run must exceed to alarm.

Every healthy run is judged by the others, so that thresholds carry the uncertainty of a small reference.

Axes: N healthy run, R row, X signal (a group of rows), S step, T candidate onset, W window, V view.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import t as student_t

from moeproxy.errors import ComparisonError
from moeproxy.triage.arrays import finite
from moeproxy.triage.departure import (
    SPANS,
    candidates,
    contrast,
    first_spikes,
    lone_spikes,
    shifts,
    smoothed,
    without_spikes,
)
from moeproxy.triage.excursion import date_edges, date_excursions, excursions
from moeproxy.triage.judged import Judged, groups

FEWEST_RUNS = 6
"""Healthy runs below which the spread between them is not known: with four, 15 of 40 healthy synthetic runs alarmed."""

FEWEST_STEPS = 10
"""Steps that a run must have to be judged beside healthy ones."""

ALPHA = 0.02
"""Share of healthy runs that may be called an alarm."""

SIGNAL_QUANTILE, LEAST = 0.95, 3.0
"""A signal's own threshold: this quantile of what healthy runs reach, and never less than so many spreads."""

DOUBTFUL, ODD = 2.0, 2.5
"""Strength of one of several healthy runs, judged by the others, from which on it may be none, and is taken for none.

Of 36 draws of 6 to 12 healthy runs of the benchmark three held one beyond 2.0, none one beyond 2.3; a broken run among
eight or more reached 2.7 and more, also where there were two. Among six it reaches 2.1 however far it departs, since it
moves what the others are judged by: there it can only be doubted.
"""

STRONGEST = 3
"""A run is judged by the mean of its strongest signals: one alone strays in many a healthy run."""


ONE = 1.25
"""A run alarms by one signal alone beyond so many times what the strongest single signal of healthy runs reaches.

On the benchmark's runs no healthy one alarms by it that did not before (129 beside healthy runs, 189 alone), and 1 in
200 clear and 3 in 100 subtle faults do; with 1.0 two more healthy runs would, alone."""

REACH = "what healthy runs reach"
OWN_NOISE = "standard errors of its own noise"
"""What sizes are counted in without healthy runs."""


@dataclass(frozen=True)
class Limit:
    """A limit that a signal passed: how many times it did, and in words what that is."""

    ratio: float
    words: str


@dataclass(frozen=True)
class Departures:
    """How far one run strays, by signal and candidate onset.

    Args:
        names: signals (X).
        steps_S, onset_T: steps, and candidate onsets as indices of them.
        excess_XT: size over the signal's threshold.
        contrast_XT: size of the change there, over what healthy runs reach; its maximum is the onset.
        early_X: excess of the first steps alone; beyond the thresholds the run was off from its beginning.
        size_RT: largest shift of each row after each candidate, in healthy spreads.
        change_RT: whether that shift is one against the run's own past, rather than against healthy runs.
        trend_RS: what was expected of each row, on its transformed scale.
        residual_RS: what is left of each row, in step noise.
        noise_R: that noise.
        spikes_RS: lone values that were taken out.
        run_threshold: `strength_T` beyond which the run alarms.
        single_threshold: excess beyond which a signal of a run that alarms is evidence; with `ONE` times as much one
            signal alarms by itself.
        size_in: what sizes are counted in.
        limits: signals whose excess comes from a fixed limit rather than from what healthy runs reach.
        learns: signals that any learning moves, and that alone prove nothing.
    """

    names: tuple[str, ...]
    rows: tuple[str, ...]
    steps_S: np.ndarray
    onset_T: np.ndarray
    excess_XT: np.ndarray
    contrast_XT: np.ndarray
    early_X: np.ndarray
    size_RT: np.ndarray
    change_RT: np.ndarray
    trend_RS: np.ndarray
    residual_RS: np.ndarray
    noise_R: np.ndarray
    spikes_RS: np.ndarray
    run_threshold: float
    single_threshold: float
    size_in: str = "healthy spreads"
    limits: Mapping[str, Limit] = field(default_factory=dict)
    learns: Collection[str] = ()

    @property
    def departs(self) -> bool:
        """Whether the strongest signals together make the run alarm."""
        return bool(self.strength_T.max() > self.run_threshold)

    @property
    def by_one(self) -> bool:
        """Whether one signal makes the run alarm whatever the others do."""
        most_X = self.excess_XT.max(1, initial=0.0)
        counts = [name not in self.learns or name in self.limits for name in self.names]
        return bool((most_X[counts] > ONE * self.single_threshold).any())

    @property
    def strength_T(self) -> np.ndarray:
        """Mean excess (T,) of the strongest signals."""
        return strongest(self.excess_XT)

    @property
    def from_start(self) -> bool:
        """Whether the run was off from its beginning: its first steps are, and there is no change to look for."""
        return bool(strongest(self.early_X[:, None])[0] > self.run_threshold)

    @property
    def onset(self) -> int:
        """Index of the step from which the run departs."""
        if self.from_start:
            return 0
        score_T = strongest(self.contrast_XT)
        place = int(score_T.argmax()) if score_T.max() > 1 else int(np.argmax(self.strength_T > self.run_threshold))
        return int(self.onset_T[place])


@dataclass(frozen=True)
class Reference:
    """Healthy runs of one model and setting, fitted on the steps of a run to be judged.

    Args:
        rows, steps_S, onset_T: what is judged, and where.
        trend_RS: what the healthy runs share, smoothed.
        first_RS: medians of their first three steps, as they are: many a signal begins with a zero.
        unit_WVRT: spread of the shifts of healthy runs.
        noise_R: noise of single steps.
        threshold_X: shift, in spreads, that a signal must exceed.
        contrast_X: contrast that healthy runs reach.
        run_threshold, single_threshold: see `Departures`.
        n_runs: number of healthy runs.
        strength_N: strength of every healthy run, judged by the others.
    """

    rows: tuple[str, ...]
    steps_S: np.ndarray
    onset_T: np.ndarray
    trend_RS: np.ndarray
    first_RS: np.ndarray
    unit_WVRT: np.ndarray
    noise_R: np.ndarray
    threshold_X: np.ndarray
    contrast_X: np.ndarray
    run_threshold: float
    single_threshold: float
    n_runs: int
    strength_N: np.ndarray

    @property
    def odd(self) -> tuple[int, ...]:
        """Indices of healthy runs that depart from the others too far to be healthy like them."""
        return tuple(int(index) for index in np.flatnonzero(self.strength_N > ODD))

    @property
    def doubtful(self) -> tuple[int, ...]:
        """Indices of healthy runs that depart from the others farther than most healthy runs do; the odd ones too."""
        return tuple(int(index) for index in np.flatnonzero(self.strength_N > DOUBTFUL))

    @staticmethod
    def of(tables: Sequence[Judged], steps_S: np.ndarray, rows: Sequence[str] | None = None) -> Reference:
        """Fit healthy runs on the given steps, by the given rows where all of them log these (by default by all).

        Raises:
            ComparisonError: fewer than six runs, too few steps, or no row that all of them log.
        """
        _check(tables, steps_S)
        wanted = tables[0].rows if rows is None else rows
        rows = tuple(row for row in wanted if all(row in table.rows for table in tables))
        if not rows:
            raise ComparisonError(
                "no signal that the run and all healthy runs log", expected="runs of one program, or mapped alike"
            )
        floor_R = tables[0].floor_R[[tables[0].rows.index(row) for row in rows]]
        values_NRS = np.stack([finite(table.at(rows, steps_S)) for table in tables])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step that no run logged has no mean
            return _fit(values_NRS, rows, steps_S, floor_R)

    def departures(self, table: Judged) -> Departures:
        """Measure how far a run strays from these; rows that it does not log count as not moving."""
        values_RS = finite(table.at(self.rows, self.steps_S))
        spikes_RS = lone_spikes(values_RS, self.noise_R) | first_spikes(values_RS, self.first_RS, self.noise_R)
        usual_first_R = self.first_RS[:, 0] - self.first_RS[:, 1]
        left_RS = without_spikes(values_RS, spikes_RS, usual_first_R) - self.trend_RS
        shift_WVRT = shifts(left_RS, self.onset_T) / self.unit_WVRT
        size_KRT = np.abs(shift_WVRT).reshape(-1, *shift_WVRT.shape[2:])
        residual_RS = left_RS / self.noise_R[:, None]
        members, contrast_RT = groups(self.rows), contrast(residual_RS, self.onset_T)
        contrast_XT = grouped(contrast_RT, members) / self.contrast_X[:, None]
        found = excursions(residual_RS, self.onset_T, contrast_RT, members, contrast_XT)
        date_edges(residual_RS, self.onset_T, contrast_RT, members, contrast_XT)
        date_excursions(found, self.onset_T, members, contrast_XT)
        return Departures(
            names=tuple(name for name, _ in members),
            rows=self.rows,
            steps_S=self.steps_S,
            onset_T=self.onset_T,
            excess_XT=grouped(size_KRT.max(0), members) / self.threshold_X[:, None],
            contrast_XT=contrast_XT,
            early_X=grouped(np.abs(shift_WVRT[0, 0, :, :1]), members)[:, 0] / self.threshold_X,
            size_RT=size_KRT.max(0),
            change_RT=size_KRT.argmax(0) % shift_WVRT.shape[1] == 1,
            trend_RS=self.trend_RS,
            residual_RS=residual_RS,
            noise_R=self.noise_R,
            spikes_RS=spikes_RS,
            run_threshold=self.run_threshold,
            single_threshold=self.single_threshold,
        )


def strongest(excess_XT: np.ndarray) -> np.ndarray:
    """Return the mean (T,) of the largest few entries of each column."""
    return np.sort(excess_XT, axis=0)[-STRONGEST:].mean(0)


def _check(tables: Sequence[Judged], steps_S: np.ndarray) -> None:
    if len(tables) < FEWEST_RUNS:
        raise ComparisonError(
            f"{len(tables)} healthy runs",
            expected=f"at least {FEWEST_RUNS}, to know how far healthy runs stray",
            remedy="give more, or none: the run is then judged by its own beginning",
        )
    if len(steps_S) < FEWEST_STEPS:
        raise ComparisonError(f"a run of {len(steps_S)} steps", expected=f"at least {FEWEST_STEPS}")


def _fit(values_NRS: np.ndarray, rows: tuple[str, ...], steps_S: np.ndarray, floor_R: np.ndarray) -> Reference:
    onset_T, members = candidates(len(steps_S)), groups(rows)
    noise_R = np.fmax(np.sqrt(np.nanmean(np.diff(values_NRS, axis=2) ** 2, axis=(0, 2)) / 2), floor_R)
    left_NRS = np.stack([_left(values_NRS, index) for index in range(len(values_NRS))])
    shift_NWVRT = np.stack([shifts(left_RS, onset_T) for left_RS in left_NRS])
    unit_WVRT = _unit(shift_NWVRT, noise_R, floor_R)
    size_NXT = _sizes(shift_NWVRT, noise_R, floor_R, members)
    contrast_NX = np.stack(
        [grouped(contrast(left_RS / noise_R[:, None], onset_T), members).max(1) for left_RS in left_NRS]
    )
    strength_N, single_N = _honest(size_NXT)
    return Reference(
        rows=rows,
        steps_S=steps_S,
        onset_T=onset_T,
        trend_RS=smoothed(np.nanmean(values_NRS, axis=0)),
        first_RS=np.nanmedian(values_NRS[:, :, :3], axis=0),
        unit_WVRT=unit_WVRT,
        noise_R=noise_R,
        threshold_X=_threshold(size_NXT),
        contrast_X=np.fmax(np.quantile(contrast_NX, SIGNAL_QUANTILE, axis=0), 2.0),
        run_threshold=exceeded_by(strength_N, ALPHA),
        single_threshold=exceeded_by(single_N, ALPHA),
        n_runs=len(values_NRS),
        strength_N=strength_N,
    )


def _left(values_NRS: np.ndarray, index: int) -> np.ndarray:
    """Return what is left of one healthy run after the trend of the others is taken off."""
    return values_NRS[index] - smoothed(np.nanmean(np.delete(values_NRS, index, axis=0), axis=0))


def _sizes(
    shift_NWVRT: np.ndarray, noise_R: np.ndarray, floor_R: np.ndarray, members: list[tuple[str, np.ndarray]]
) -> np.ndarray:
    """Return the largest shifts (N, X, T) of healthy runs, each in a spread to which it did not contribute.

    A run that is judged later did not either; with a dozen runs its own share makes the difference between two and
    fifty false alarms in a hundred runs (measured on synthetic ones).
    """
    sizes = []
    for index, one in enumerate(shift_NWVRT):
        others_WVRT = _unit(np.delete(shift_NWVRT, index, axis=0), noise_R, floor_R)
        sizes.append(grouped((np.abs(one) / others_WVRT).max((0, 1)), members))
    return np.stack(sizes)


def _unit(shift_NWVRT: np.ndarray, noise_R: np.ndarray, floor_R: np.ndarray) -> np.ndarray:
    """Return the spread of shifts, smoothed over candidate onsets, never below what step noise alone gives."""
    square_WVRT = (shift_NWVRT**2).mean(0)
    flat = square_WVRT.reshape(-1, square_WVRT.shape[-1])
    unit_WVRT = np.sqrt(smoothed(flat, 9)).reshape(square_WVRT.shape)
    length_W = np.array([stop - start for start, stop in SPANS])
    floor_WR = np.maximum(noise_R / np.sqrt(length_W)[:, None], floor_R)
    return np.fmax(unit_WVRT, floor_WR[:, None, :, None])


def _threshold(size_NXT: np.ndarray) -> np.ndarray:
    return np.fmax(np.quantile(size_NXT.max(2), SIGNAL_QUANTILE, axis=0), LEAST)


def _honest(size_NXT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return strength and largest excess (N,) of every healthy run by thresholds of the others."""
    strength, single = [], []
    for index, size_XT in enumerate(size_NXT):
        excess_XT = size_XT / _threshold(np.delete(size_NXT, index, axis=0))[:, None]
        strength.append(strongest(excess_XT).max())
        single.append(excess_XT.max())
    return np.array(strength), np.array(single)


def exceeded_by(strength_N: np.ndarray, alpha: float, least: float = 1.0) -> float:
    """Return the strength that a healthy run exceeds with probability alpha, at least `least`.

    The empirical quantile, and at least what Student's t predicts for one more run from the spread of the logarithm:
    few runs know little of their own tail.
    """
    logs_N = np.log(np.fmax(strength_N, 1e-3))
    n_runs = len(logs_N)
    margin = student_t.isf(alpha, n_runs - 1) * logs_N.std(ddof=1) * np.sqrt(1 + 1 / n_runs)
    return max(float(np.quantile(strength_N, 1 - alpha)), float(np.exp(logs_N.mean() + margin)), least)


def grouped(values_RT: np.ndarray, members: list[tuple[str, np.ndarray]]) -> np.ndarray:
    """Return the largest value (X, T) over the rows of each signal."""
    return np.stack([values_RT[index_R].max(0) for _, index_R in members])
