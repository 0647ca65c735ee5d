"""The response of a run to a fault, in healthy spreads, so that nothing depends on the model's size.

A response is (faulty - healthy) / spread for two runs of the same seed. Norms and positive losses enter as
logs. The spread is the healthy seed-to-seed spread of the same model, from calibration seeds that are never
scored.

Few calibration seeds give a spread few degrees of freedom. What keeps it from being too small by luck: the
variance is pooled over all windows after the onset (one number a signal), corrected for C - 1 degrees of
freedom (windows of one run are correlated, so they are not counted as further ones), and never below what the
step-to-step noise of the healthy runs alone would give. The threshold is a quantile of
healthy-against-healthy responses whose spread was estimated without the judged seed, pooled over signals, so
it carries the uncertainty of the spread.

Axes: R run, C calibration seed, P pair of runs, X signal, S step, W window of steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln
from scipy.stats import norm
from scipy.stats import t as student_t

from moeproxy.traces.signals import SIGNALS, Signal
from moeproxy.traces.trace import Trace

CAP = 1000.0
"""Responses are cut here; a value that became NaN or infinite in the faulty run counts as this much."""

LOG_FLOOR = 0.02
"""Smallest spread believed on the log and logit scales: two per cent."""


@dataclass(frozen=True)
class Windows:
    """Consecutive windows of steps after the onset, each [start, stop)."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def shortest(self) -> int:
        """Steps in the shortest window."""
        return min(stop - start for start, stop in self.bounds)

    @staticmethod
    def after(onset: int, last: int, length: int) -> Windows:
        """Cut onset..last into windows of `length` steps; a rest under half a window joins the last one."""
        starts = list(range(onset, last + 1, length))
        if len(starts) > 1 and last + 1 - starts[-1] < length / 2:
            starts.pop()
        stops = [*starts[1:], last + 1]
        return Windows(tuple(zip(starts, stops, strict=True)))

    def means(self, values_XS: np.ndarray, steps_S: np.ndarray) -> Float[np.ndarray, "X W"]:
        """Return the mean over each window; NaN where half of the window or more is missing."""
        parts = [values_XS[:, (steps_S >= start) & (steps_S < stop)] for start, stop in self.bounds]
        return np.stack(
            [_present_mean(part, stop - start) for part, (start, stop) in zip(parts, self.bounds, strict=True)],
            axis=1,
        )


@dataclass(frozen=True)
class Spread:
    """How much healthy runs of one model differ from seed to seed.

    Args:
        window_X: spread of a window's mean, transformed unit.
        step_X: spread of a single step, transformed unit.
        threshold: |window response| beyond which it is significant.
        step_threshold: |step response| that a departure must hold over several steps.
        constant_X: whether the signal does not vary between healthy runs at all.
    """

    window_X: Float[np.ndarray, " X"]
    step_X: Float[np.ndarray, " X"]
    threshold: float
    step_threshold: float
    constant_X: np.ndarray

    def response(self, faulty_XW: np.ndarray, healthy_XW: np.ndarray) -> Float[np.ndarray, "X W"]:
        """Return window responses, cut at ±CAP; NaN where either run has no value."""
        return np.clip((faulty_XW - healthy_XW) / self.window_X[:, None], -CAP, CAP)

    def step_response(self, faulty_XS: np.ndarray, healthy_XS: np.ndarray) -> Float[np.ndarray, "X S"]:
        """Return responses step by step, cut at ±CAP; NaN where either run has no value."""
        return np.clip((faulty_XS - healthy_XS) / self.step_X[:, None], -CAP, CAP)


def matrix(trace: Trace, names: tuple[str, ...], steps_S: np.ndarray) -> Float[np.ndarray, "X S"]:
    """Return transformed signals; NaN is missing, ±inf was measured as not finite.

    Per-layer signals enter as the mean over the layers, so that models of different depth can be compared.
    """
    rows = [_row(trace, name) for name in names]
    values_XS = np.full((len(names), len(steps_S)), np.nan)
    _, ours, theirs = np.intersect1d(steps_S, trace.steps.index.to_numpy(), return_indices=True)
    values_XS[:, ours] = np.stack(rows)[:, theirs]
    return values_XS


def columns_of(trace: Trace, name: str) -> list[str]:
    """Return the columns that hold a signal and are not all missing: one, or one for each layer."""
    columns = [column for column in trace.signals if column.partition("/")[0] == name]
    return [column for column in columns if not trace.missing(column).all()]


def calibrate(
    values_CXS: Float[np.ndarray, "C X S"],
    steps_S: np.ndarray,
    windows: Windows,
    names: tuple[str, ...],
    *,
    alpha: float,
    persist: int,
) -> Spread:
    """Estimate the healthy spread and the thresholds of one model from at least two calibration runs."""
    with warnings.catch_warnings():
        # A step that no run logged has no mean; it stays NaN and is left out.
        warnings.simplefilter("ignore", RuntimeWarning)
        return _calibrate(values_CXS, steps_S, windows, names, alpha, persist)


def _calibrate(
    values_CXS: np.ndarray,
    steps_S: np.ndarray,
    windows: Windows,
    names: tuple[str, ...],
    alpha: float,
    persist: int,
) -> Spread:
    means_CXW = np.stack([windows.means(values_XS, steps_S) for values_XS in values_CXS])
    floor_X = np.array([_floor(SIGNALS[name]) for name in names])
    noise_X = _step_noise(values_CXS)
    step_floor_X = np.maximum(noise_X, floor_X)
    window_floor_X = np.maximum(noise_X / np.sqrt(windows.shortest), floor_X)
    constant_X = np.nanmax(np.nanmax(values_CXS, 0) - np.nanmin(values_CXS, 0), 1) == 0
    null_PXW = _left_out_responses(means_CXW, window_floor_X)
    null_PXS = _left_out_responses(values_CXS, step_floor_X)
    lasting_PX = np.array([persistent(null_XS, persist).max(1) for null_XS in null_PXS]).reshape(-1, len(names))
    return Spread(
        window_X=_spread(means_CXW, window_floor_X),
        step_X=_spread(values_CXS, step_floor_X),
        threshold=_threshold(null_PXW[:, ~constant_X], alpha),
        step_threshold=_threshold(lasting_PX[:, ~constant_X], alpha),
        constant_X=constant_X,
    )


def pair_responses(means_RXW: np.ndarray, spread: Spread) -> Float[np.ndarray, "P X W"]:
    """Return the responses of all ordered pairs of healthy runs: what `no fault` looks like."""
    pairs = permutations(range(len(means_RXW)), 2)
    return np.stack([spread.response(means_RXW[a], means_RXW[b]) for a, b in pairs])


def persistent(response_XS: Float[np.ndarray, "X S"], length: int) -> Float[np.ndarray, "X T"]:
    """Return the smallest |response| of every `length` consecutive steps, 0 where the sign is not one.

    T = S - length + 1 counts the first steps; a missing value has no sign.
    """
    runs_XTN = np.lib.stride_tricks.sliding_window_view(np.nan_to_num(response_XS), length, axis=1)
    one_sign = (runs_XTN > 0).all(-1) | (runs_XTN < 0).all(-1)
    return np.abs(runs_XTN).min(-1) * one_sign


def _row(trace: Trace, name: str) -> np.ndarray:
    signal = SIGNALS[name]
    rows = [transform(trace, column, signal) for column in columns_of(trace, name)]
    if not rows:
        return np.full(len(trace.steps), np.nan)
    # Not nanmean: a layer that is missing at a step makes the mean over layers another quantity.
    return np.mean(rows, axis=0)


def transform(trace: Trace, column: str, signal: Signal) -> np.ndarray:
    """Return a column on its signal's scale (S,); NaN is missing, ±inf was measured as not finite."""
    raw_S = trace.values(column)
    broken_S = ~np.isfinite(raw_S) & ~trace.missing(column)
    measured_S = np.where(broken_S, np.where(raw_S < 0, -np.inf, np.inf), raw_S)
    tiny = signal.resolution
    if signal.scale == "log":
        return np.log(np.maximum(measured_S, tiny))
    if signal.scale == "logit":
        inside_S = np.clip(measured_S, tiny, 1 - tiny)
        return np.where(broken_S, measured_S, np.log(inside_S / (1 - inside_S)))
    return measured_S


def _present_mean(part_XS: np.ndarray, length: int) -> np.ndarray:
    here_XS = ~np.isnan(part_XS)
    enough_X = here_XS.sum(1) > length / 2
    with np.errstate(invalid="ignore"):  # inf - inf: the value stays "not finite"
        total_X = np.where(here_XS, part_XS, 0).sum(1)
    return np.where(enough_X, total_X / np.maximum(here_XS.sum(1), 1), np.nan)


def _floor(signal: Signal) -> float:
    return signal.resolution if signal.scale == "linear" else LOG_FLOOR


def _step_noise(values_CXS: np.ndarray) -> np.ndarray:
    # Successive differences see the noise of single steps but not the trend of training.
    return np.sqrt(np.nanmean(np.diff(values_CXS, axis=2) ** 2, axis=(0, 2)) / 2)


def _spread(values_CXW: np.ndarray, floor_X: np.ndarray) -> np.ndarray:
    variance_X = np.nanmean(np.nanvar(values_CXW, axis=0, ddof=1), axis=-1)
    return np.maximum(np.sqrt(variance_X) / c4(len(values_CXW) - 1), floor_X)


def c4(freedom: int) -> float:
    """Return the mean of the sample standard deviation over the true one, for normal values."""
    return float(np.sqrt(2 / freedom) * np.exp(gammaln((freedom + 1) / 2) - gammaln(freedom / 2)))


def _left_out_responses(means_CXW: np.ndarray, floor_X: np.ndarray) -> np.ndarray:
    """Return (P, X, W): healthy pairs (a, b) in a spread estimated without a; P = 0 for two seeds."""
    n_seeds = len(means_CXW)
    rows = [np.empty((0, *means_CXW.shape[1:]))]
    for a in range(n_seeds if n_seeds > 2 else 0):
        others = np.delete(means_CXW, a, axis=0)
        rows.append((means_CXW[a] - others) / _spread(others, floor_X)[:, None])
    return np.concatenate(rows)


def _threshold(null_PXW: np.ndarray, alpha: float) -> float:
    # sqrt(2): a response is a difference of two runs. Two seeds allow no leaving out: Student's t then.
    seen = np.abs(null_PXW[np.isfinite(null_PXW)])
    if not seen.size:
        return float(np.sqrt(2) * student_t.isf(alpha / 2, df=2))
    # Never below what normal noise of a known spread would need.
    return max(float(np.sqrt(2) * norm.isf(alpha / 2)), float(np.quantile(seen, 1 - alpha)))
