"""Excursions: a signal leaves its course at once and comes back at once, while the course itself goes on.

Without healthy runs beside it nobody knows where a run that learns was heading. But a course is smooth and both edges
of an excursion are not: within a window a parabola with a pulse on it fits better than one with a jump and a bend, or
with a ramp, on it. Ordinary least squares and the Bayesian information criterion.

Axes: R row, X signal, S step, T candidate onset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moeproxy.triage.arrays import known_mean
from moeproxy.triage.departure import CLIP, averages

SHORTEST, LONGEST = 3, 120
"""Steps of an excursion."""

BEFORE, AFTER = 40, 15
"""Steps of the course, at most, that are looked at before and after. What happens later is another matter."""

SETTLED = 5
"""Steps after it that say that the signal is back."""

LEAST_EDGE = 2.0
"""Step noises between the means of three steps before and after an edge."""

LEAST_CHANGE = 3.0
"""Height, in step noise, below which nothing is called an excursion."""

LEAST_KNOWN = 12
"""Known steps from which on a course can be fitted."""

SURE = 20.0
"""By how much the criterion must prefer the excursion; 10 is very strong evidence (Kass and Raftery, 1995) for one that
is asked about, and here many are tried."""

PERFECT = 0.01
"""Share of the noise's variance that may be left by any fit: constant signals are fitted to the last digit."""

AGAIN = 0.5
"""Share of an excursion's height that each of its edges is at least, and that departs again."""


SLACK = 20
"""Steps by which the largest change may lie beside the edge: one of many steps is largest in the middle of a window."""

REACH = 5
"""Steps around the largest change within which the sharpest edge is looked for."""

Groups = Sequence[tuple[str, np.ndarray]]
"""Signals, each with the indices of its rows."""


def excursion_at(residual_S: np.ndarray, edge: int, slack: int = 0) -> tuple[int, int] | None:
    """Return (start, stop) of the excursion that begins or ends at a step, as indices; None where there is none.

    Args:
        residual_S: values in step noise; NaN is missing.
        edge: index of a step at which the signal changes.
        slack: by how many steps that may be wrong.
    """
    values_S = np.clip(residual_S, -CLIP, CLIP)
    rise_S = edges(values_S, SHORTEST)
    size_S = np.abs(rise_S)
    sharpest_S = size_S >= np.fmax(np.roll(size_S, 1), np.roll(size_S, -1))  # beside an edge are lesser ones
    large = np.flatnonzero(sharpest_S & (size_S >= LEAST_EDGE))
    found = dict[tuple[int, int], float]()
    for one in large[np.abs(large - edge) <= slack]:
        for other in large[(rise_S[large] * rise_S[one] < 0) & (np.abs(large - one) <= LONGEST)]:
            start, stop = int(min(one, other)), int(max(one, other))
            if stop - start >= SHORTEST and stop + SETTLED <= len(values_S):
                found[start, stop] = _evidence(values_S, rise_S, start, stop)
    best = max(found, key=lambda pulse: found[pulse], default=None)
    return best if best and found[best] > SURE else None


def first_excursion(residual_S: np.ndarray, edge: int, slack: int) -> tuple[int, int] | None:
    """Return the excursion at a step, or the first of several like it shortly before; None where there is none there.

    Args:
        residual_S, edge, slack: as for `excursion_at`.
    """
    found = excursion_at(residual_S, edge, slack)
    if not found:
        return None
    start, stop = found
    height = _height(np.clip(residual_S, -CLIP, CLIP), start, stop)
    size_S = np.abs(edges(np.clip(residual_S, -CLIP, CLIP), SHORTEST))
    for earlier in range(max(SHORTEST, start - LONGEST), start - SETTLED):
        if size_S[earlier] >= AGAIN * height:
            # As if the run had ended with this one: between two excursions a signal is where it should be.
            edge = earlier + int(size_S[earlier : earlier + SHORTEST].argmax())
            before = excursion_at(residual_S[:stop], edge)
            if before and before[0] < start:
                return before
    return found


def departs_again(residual_S: np.ndarray, start: int, stop: int) -> int | None:
    """Return the index of the step at which a signal that is back departs again, None where it does not.

    Args:
        residual_S: values in step noise; NaN is missing.
        start, stop: of the excursion.
    """
    values_S = np.clip(residual_S, -CLIP, CLIP)
    size_S = np.abs(edges(values_S, SHORTEST))
    size_S[: stop + SHORTEST] = 0
    far = np.flatnonzero(size_S >= max(AGAIN * _height(values_S, start, stop), LEAST_CHANGE))
    return int(far[0] + size_S[far[0] : far[0] + SHORTEST].argmax()) if len(far) else None


def excursions(
    residual_RS: np.ndarray, onset_T: np.ndarray, contrast_RT: np.ndarray, groups: Groups, score_XT: np.ndarray
) -> dict[str, tuple[int, int]]:
    """Return [start, stop) of the signals that went and came back where they change most.

    Args:
        residual_RS: values in step noise.
        onset_T: candidate onsets.
        contrast_RT: size of the change at each.
        groups: signals, each with its rows.
        score_XT: what says where a signal changes most; above 1 that counts.
    """
    found = {}
    for x, (name, rows_R) in enumerate(groups):
        most = int(score_XT[x].argmax())
        row = rows_R[int(contrast_RT[rows_R, most].argmax())]
        if score_XT[x, most] > 1:
            excursion = first_excursion(residual_RS[row], int(onset_T[most]), SLACK)
            found |= {name: excursion} if excursion else {}
    return found


def date_edges(
    residual_RS: np.ndarray, onset_T: np.ndarray, contrast_RT: np.ndarray, groups: Groups, contrast_XT: np.ndarray
) -> None:
    """Date signals that jump from the very step, in place: in long windows many steps nearby do as well.

    Args:
        residual_RS, onset_T, contrast_RT, groups: as for `excursions`.
        contrast_XT: what dates a signal.
    """
    for x, (_, rows_R) in enumerate(groups):
        most = int(contrast_XT[x].argmax())
        row = rows_R[int(contrast_RT[rows_R, most].argmax())]
        size_S = np.abs(edges(np.clip(residual_RS[row], -CLIP, CLIP), SHORTEST))
        first = max(int(onset_T[most]) - REACH, 0)
        sharpest = first + int(size_S[first : int(onset_T[most]) + REACH + 1].argmax())
        if contrast_XT[x, most] > 1 and size_S[sharpest] >= LEAST_CHANGE:
            begin(contrast_XT[x], place_of(onset_T, sharpest), float(contrast_XT[x, most]))


def is_near(step: int, excursion: tuple[int, int] | None) -> bool:
    """Whether what changes at the step with this index is an excursion."""
    return excursion is not None and excursion[0] - SLACK <= step <= excursion[1] + SLACK


def date_excursions(
    found: Mapping[str, tuple[int, int]], onset_T: np.ndarray, groups: Groups, contrast_XT: np.ndarray
) -> None:
    """Date excursions from the way out, in place: the largest change may be the way back."""
    for x, (name, _) in enumerate(groups):
        if name in found:
            begin(contrast_XT[x], place_of(onset_T, found[name][0]), float(contrast_XT[x].max()))


def place_of(onset_T: np.ndarray, step: int) -> int:
    """Return the place among candidate onsets of the step with this index, or of the next one that is there."""
    return min(int(np.searchsorted(onset_T, step)), len(onset_T) - 1)


def begin(contrast_T: np.ndarray, place: int, size: float) -> None:
    """Make one place the onset of a signal, in place."""
    np.minimum(contrast_T, 0.9 * size, out=contrast_T)
    contrast_T[place] = size


def edges(values_S: np.ndarray, width: int) -> np.ndarray:
    """Return by how much (S,) the mean of this and the next steps exceeds that of the steps before; 0 at the ends."""
    place_S = np.arange(width, len(values_S) - width + 1)
    found_S = np.zeros(len(values_S))
    means = [averages(values_S[None], place_S + shift, place_S + shift + width)[0] for shift in (0, -width)]
    found_S[place_S] = means[0] - means[1]
    return found_S


def _height(values_S: np.ndarray, start: int, stop: int) -> float:
    """Return how far, in step noise, an excursion lies from where it comes back to."""
    inside, outside = (
        float(known_mean(part_S, axis=0)) for part_S in (values_S[start:stop], values_S[stop:][:SETTLED])
    )
    return abs(inside - outside)


def _evidence(values_S: np.ndarray, rise_S: np.ndarray, start: int, stop: int) -> float:
    """Return by how much the criterion prefers a pulse to a jump and a bend, or a ramp; 0 for too low a pulse."""
    first, last = max(0, start - BEFORE), stop + AFTER
    again = np.flatnonzero(np.abs(rise_S[stop + SETTLED : last]) >= AGAIN * _height(values_S, start, stop))
    part_S = values_S[first : stop + SETTLED + int(again[0]) if len(again) else last]
    known_S = np.isfinite(part_S)
    place_S = np.flatnonzero(known_S) + first
    if len(place_S) < LEAST_KNOWN:
        return 0.0
    course = _parabola(place_S)
    left_S = part_S[known_S] - course @ (course.T @ part_S[known_S])
    inside_S = ((place_S >= start) & (place_S < stop)).astype(float)
    ramp_S = np.clip(place_S, start, stop) - float(start)
    height, pulse = _fitted([inside_S], left_S, course)
    # Both edges are most of the way: a ramp beside a bend has none.
    if abs(height[0]) < LEAST_CHANGE or np.abs(rise_S[[start, stop]]).min() < AGAIN * abs(height[0]):
        return 0.0
    # All have two numbers more than the course: a jump and a bend, a ramp or a pulse and its length.
    bent = [[(place_S >= at).astype(float), np.fmax(place_S - at, 0.0)] for at in (start, stop)]
    other = min(_fitted(shapes, left_S, course)[1] for shapes in ([ramp_S], *bent))
    least = PERFECT * len(place_S)
    return float(len(place_S) * np.log(max(other, least) / max(pulse, least)))


def _parabola(place_S: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis (S, 3) of the parabolas over these steps."""
    unit_S = (place_S - place_S.mean()) / max(float(np.ptp(place_S)), 1.0)
    return np.linalg.qr(np.stack([np.ones(len(unit_S)), unit_S, unit_S**2], axis=1))[0]


def _fitted(shapes: list[np.ndarray], left_S: np.ndarray, course: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the heights of shapes beside the course, and the squared error that they leave."""
    both = np.stack(shapes, axis=1)
    own = both - course @ (course.T @ both)
    height = np.linalg.lstsq(own, left_S, rcond=None)[0]
    return height, float(((left_S - own @ height) ** 2).sum())
