"""How well a proxy's response to a fault agrees with the original's, with intervals and controls.

Axes: R scored seed, P pair of healthy runs, X signal, S step, W window, F fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from moeproxy.triage.response import Spread, persistent


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with a bootstrap interval.

    Args:
        mean: mean over the seeds that have a value; NaN when none has.
        low: lower end of the 95 % percentile interval; NaN with fewer than two seeds.
        high: upper end.
        by_seed: the value of each scored seed, NaN where it has none.
    """

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "none"
        return f"{self.mean:.2f}" + ("" if np.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]")


def bootstrap(values_R: np.ndarray, seed: int, *, resamples: int = 2000) -> Interval:
    """Return mean and 95 % percentile interval over seeds; few seeds give a coarse one (three: ten means)."""
    seen = values_R[np.isfinite(values_R)]
    by_seed = tuple(float(value) for value in values_R)
    if seen.size == 0:
        return Interval(np.nan, np.nan, np.nan, by_seed)
    if seen.size == 1:
        return Interval(float(seen[0]), np.nan, np.nan, by_seed)
    picks = np.random.default_rng(seed).integers(0, seen.size, (resamples, seen.size))
    low, high = np.quantile(seen[picks].mean(1), [0.025, 0.975])
    return Interval(float(seen.mean()), float(low), float(high), by_seed)


def significant(response_RXW: Float[np.ndarray, "R X W"], threshold: float, share: float) -> np.ndarray:
    """Return sign (X, W) in {-1, 0, 1}: which signal moved which way in which window, beyond the threshold.

    It counts when at least `share` of the seeds (and two, where there are two) pass the threshold with one
    sign and the mean passes it too. A single seed cannot be repeated, so it must pass twice the threshold.
    """
    n_seeds = len(response_RXW)
    limit = threshold if n_seeds > 1 else 2 * threshold
    needed = max(int(np.ceil(share * n_seeds - 1e-9)), min(2, n_seeds))
    filled_RXW = np.nan_to_num(response_RXW)
    mean_XW = filled_RXW.mean(0)
    up = ((filled_RXW > limit).sum(0) >= needed) & (mean_XW > limit)
    down = ((filled_RXW < -limit).sum(0) >= needed) & (mean_XW < -limit)
    return up.astype(int) - down.astype(int)


@dataclass(frozen=True)
class Marks:
    """The significant signals of a response, strongest first, each in the window where it is strongest.

    Axes: N significant signal.
    """

    signals_N: np.ndarray
    windows_N: np.ndarray
    signs_N: np.ndarray

    @staticmethod
    def of(response_RXW: np.ndarray, signs_XW: np.ndarray) -> Marks:
        """Pick them from responses and the signs that `significant` gave."""
        size_XW = np.abs(np.nan_to_num(response_RXW).mean(0)) * (signs_XW != 0)
        order = np.argsort(-size_XW.max(1), kind="stable")
        signals_N = order[signs_XW[order].any(1)]
        windows_N = size_XW[signals_N].argmax(1) if signals_N.size else np.empty(0, int)
        return Marks(signals_N, windows_N, signs_XW[signals_N, windows_N])

    def __len__(self) -> int:
        return len(self.signals_N)


def direction(proxy_RXW: np.ndarray, marks: Marks) -> np.ndarray:
    """Return (R,): share of the original's significant signals that the proxy moves the same way."""
    moved_RN = proxy_RXW[:, marks.signals_N, marks.windows_N]
    return _share(np.sign(moved_RN) == marks.signs_N, ~np.isnan(moved_RN))


def found(proxy_RXW: np.ndarray, marks: Marks, threshold: float) -> np.ndarray:
    """Return (R,): share of the original's significant signals that pass the proxy's threshold, same way."""
    moved_RN = proxy_RXW[:, marks.signals_N, marks.windows_N]
    return _share(moved_RN * marks.signs_N > threshold, ~np.isnan(moved_RN))


def rank_correlation(left_XW: np.ndarray, right_XW: np.ndarray) -> float:
    """Return Spearman's correlation over the signals and windows that both have; NaN if undefined."""
    both = np.isfinite(left_XW) & np.isfinite(right_XW)
    if both.sum() < 3:
        return float("nan")
    left, right = rankdata(left_XW[both]), rankdata(right_XW[both])
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def rank_null(original_RXW: np.ndarray, healthy_PXW: np.ndarray) -> np.ndarray:
    """Return (R * P,): the correlations that a proxy without any response would give."""
    return np.array([rank_correlation(one, other) for one in original_RXW for other in healthy_PXW])


def onset(step_response_XS: np.ndarray, steps_S: np.ndarray, spread: Spread, length: int) -> float:
    """Return the first step of a departure of any signal that lasts `length` steps; NaN without one."""
    lasting_S = (persistent(step_response_XS, length) > spread.step_threshold).any(0)
    return float(steps_S[lasting_S.argmax()]) if lasting_S.any() else float("nan")


def squash(response: np.ndarray, threshold: float) -> np.ndarray:
    """Return asinh(response / threshold): noise stays small, one huge signal does not drown all others."""
    return np.arcsinh(response / threshold)


def cosine(left_XW: np.ndarray, right_XW: np.ndarray) -> float:
    """Return the cosine over the entries that both have; 0 where one of them is nought."""
    both = np.isfinite(left_XW) & np.isfinite(right_XW)
    left, right = left_XW[both], right_XW[both]
    length = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / length if length > 0 else 0.0


def nearest(response_XW: np.ndarray, library: dict[str, np.ndarray], healthy_level: float) -> str:
    """Return the fault of `library` with the largest cosine, "healthy" if none exceeds `healthy_level`."""
    scores = {fault: cosine(response_XW, known_XW) for fault, known_XW in library.items()}
    best = max(scores, key=lambda fault: scores[fault])
    return best if scores[best] > healthy_level else "healthy"


def healthy_level(healthy_PXW: np.ndarray, library: dict[str, np.ndarray], quantile: float) -> float:
    """Return the cosine that a proxy without any response reaches to its nearest fault, at this quantile."""
    best_P = [max(cosine(pair_XW, known_XW) for known_XW in library.values()) for pair_XW in healthy_PXW]
    return float(np.quantile(best_P, quantile))


def false_response_rate(healthy_PXW: np.ndarray, threshold: float) -> float:
    """Return the share of healthy-against-healthy entries beyond the threshold; NaN without pairs."""
    seen = np.abs(healthy_PXW[np.isfinite(healthy_PXW)])
    return float((seen > threshold).mean()) if seen.size else float("nan")


def _share(hit_RX: np.ndarray, valid_RX: np.ndarray) -> np.ndarray:
    count_R = valid_RX.sum(1)
    return np.where(count_R > 0, (hit_RX & valid_RX).sum(1) / np.maximum(count_R, 1), np.nan)
