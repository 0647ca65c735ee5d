"""What of a long series fits on a screen: smallest and largest of every column of pixels, and marks that do not merge.

A screen shows some thousand points, whatever is sent to it. Which points are taken decides what is seen: every value
that stands out stays, and what is no number at all is never dropped without a mark.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tsdownsample import MinMaxDownsampler

MAX_POINTS = 2000
"""Points of one line that are drawn at a time: two for each of a thousand columns of pixels."""

MAX_MARKS = 200
"""Marks of one kind that are drawn at a time; more would lie on each other."""

_SAMPLER = MinMaxDownsampler()


@dataclass(frozen=True, eq=False)
class Marks:
    """Places of something, those too close to tell apart taken together.

    Args:
        first_M: first place of each mark.
        last_M: last place.
        count_M: how many places there are.
    """

    first_M: np.ndarray
    last_M: np.ndarray
    count_M: np.ndarray


def extremes(steps_S: np.ndarray, values_S: np.ndarray, n: int = MAX_POINTS) -> np.ndarray:
    """Return the indices to draw, ascending: all when they are few, else the extremes of n / 2 equally wide parts.

    First and last point are always among them, and so are the smallest and the largest value.

    Args:
        steps_S: int64, not decreasing.
        values_S: float64, finite.
        n: how many indices at most, beside first and last; even.
    """
    if len(steps_S) <= n:
        return np.arange(len(steps_S))
    x_S, y_S = np.ascontiguousarray(steps_S, np.int64), np.ascontiguousarray(values_S, np.float64)
    chosen = _SAMPLER.downsample(x_S, y_S, n_out=n).astype(np.int64)
    return np.unique(np.concatenate([[0], chosen, [len(x_S) - 1]]))


def marked(places_S: np.ndarray, low: float, high: float, n: int = MAX_MARKS) -> Marks:
    """Return at most n marks for places within [low, high]; each place counts in exactly one of them.

    Args:
        places_S: int64, not decreasing.
        low, high: ends of what is seen.
        n: how many marks at most.
    """
    seen = places_S[np.searchsorted(places_S, low, "left") : np.searchsorted(places_S, high, "right")]
    if len(seen) <= n:
        return Marks(seen, seen, np.ones(len(seen), np.int64))
    width = max(high - low, 1.0) / n
    part = np.minimum(((seen - low) / width).astype(np.int64), n - 1)
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    stops = np.append(starts[1:], len(seen))
    return Marks(seen[starts], seen[stops - 1], stops - starts)
