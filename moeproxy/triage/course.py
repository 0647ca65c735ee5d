"""The course of one signal after its onset: a jump, a drift, a transient that recovers, a lone spike.

Change points are those of `ruptures` (kernel change-point detection, an exact segmentation with a penalty), on what is
left of the signal after the healthy trend is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ruptures

from moeproxy.triage.departure import CLIP
from moeproxy.triage.excursion import SLACK, departs_again, edges, excursion_at

JUMP, DRIFT, TRANSIENT = "jump", "drift", "transient"

BEFORE = 20
"""Steps before the onset that say where it would be back: what a run has learned since is not lost again by that."""

SHORTEST = 3
"""Steps in the shortest segment."""

LONGEST = 2000
"""Steps beyond which a signal is averaged in blocks first: the segmentation takes quadratic time."""


@dataclass(frozen=True)
class Course:
    """What a signal does after its onset.

    Args:
        kind: "jump", "drift" or "transient".
        recovered: index of the step from which a transient is back, else None.
        again: index of the step at which it departs again, else None.
    """

    kind: str
    recovered: int | None = None
    again: int | None = None


def course(residual_S: np.ndarray, onset: int) -> Course:
    """Say how a signal that departs goes on.

    Args:
        residual_S: values less the healthy trend, in step noise; NaN is missing.
        onset: index of the first step of the departure.
    """
    excursion = excursion_at(residual_S, onset)
    if excursion and excursion[0] == onset:
        return Course(TRANSIENT, excursion[1], departs_again(residual_S, *excursion))
    filled_S = _filled(residual_S)
    before, after_S = float(filled_S[max(0, onset - BEFORE) : onset].mean()) if onset else 0.0, filled_S[onset:]
    means, starts = _segments(after_S)
    away = np.abs(means - before)
    # Back: the last segment lies closer to the past than to the farthest one, by far.
    if len(means) > 1 and away[-1] < 0.25 * away.max():
        first_back = next(i for i in range(len(means)) if (away[i:] < 0.25 * away.max()).all())
        return Course(TRANSIENT, onset + int(starts[first_back]))
    begins = abs(float(after_S[:SHORTEST].mean()) - before)
    return Course(JUMP if begins > 0.6 * abs(float(means[-1]) - before) else DRIFT)


def is_sudden(residual_S: np.ndarray, onset: int) -> bool:
    """Whether a signal jumps, or leaves for a while, at about this step: within a few, most of the change is one edge.

    Args:
        residual_S, onset: as for `course`.
    """
    if excursion_at(residual_S, onset, SLACK):
        return True
    first = max(0, onset - SHORTEST)
    size_S = np.abs(edges(np.clip(residual_S, -CLIP, CLIP), SHORTEST)[first : onset + SHORTEST + 1])
    return course(residual_S, first + int(size_S.argmax())).kind == JUMP


def _segments(values_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and starts of the segments between change points."""
    block = -(-len(values_S) // LONGEST)
    if block > 1:
        values_S = values_S[: len(values_S) // block * block].reshape(-1, block).mean(1) * np.sqrt(block)
    if len(values_S) < 2 * SHORTEST:
        return np.array([values_S.mean()]), np.array([0])
    # The signal is in units of its noise, so the usual penalty of a change of the mean applies (three log n).
    finder = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST).fit(np.clip(values_S, -30, 30)[:, None])
    stops = [int(stop) for stop in finder.predict(pen=3 * np.log(len(values_S))) or ()]
    starts = [0, *stops[:-1]]
    means = [values_S[start:stop].mean() for start, stop in zip(starts, stops, strict=True)]
    return np.array(means) / np.sqrt(block), np.array(starts) * block


def _filled(values_S: np.ndarray) -> np.ndarray:
    """Return the values with gaps bridged by what lies beside them; zeros when there is nothing."""
    known_S = np.isfinite(values_S)
    if not known_S.any():
        return np.zeros(len(values_S))
    place_S = np.arange(len(values_S))
    return np.interp(place_S, place_S[known_S], values_S[known_S])
