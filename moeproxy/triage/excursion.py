"""Excursions: a signal leaves its course at once and comes back at once, while the course itself goes on.

Without healthy runs beside it nobody knows where a run that learns was heading. But a course is smooth and both edges
of an excursion are not: within a window a parabola with a pulse on it fits better than one with a jump and a bend, or
with a ramp, on it. Ordinary least squares and the Bayesian information criterion.

Axes: S step of the window, C candidate.
"""

from __future__ import annotations

import numpy as np

from moeproxy.triage.departure import CLIP

SHORTEST, LONGEST = 3, 30
"""Steps of an excursion."""

AROUND = 40
"""Steps of the course, at most, that are looked at before and after."""

SETTLED = 5
"""Steps after it that say that the signal is back."""

LEAST_KNOWN = 12
"""Known steps from which on a course can be fitted."""

SURE = 20.0
"""By how much the criterion must prefer the excursion: more is very strong evidence (Kass and Raftery, 1995)."""

PERFECT = 0.01
"""Share of the noise's variance that may be left by any fit: constant signals are fitted to the last digit."""

LEAST_CHANGE = 3.0
"""Height, in step noise, below which nothing is called an excursion."""


def excursion_at(residual_S: np.ndarray, edge: int, slack: int = 0) -> tuple[int, int] | None:
    """Return (start, stop) of the excursion that begins or ends at a step, as indices; None where there is none.

    Args:
        residual_S: values in step noise; NaN is missing.
        edge: index of a step at which the signal changes.
        slack: by how many steps that may be wrong.
    """
    edges = range(max(SHORTEST, edge - slack), min(edge + slack, len(residual_S) - SETTLED) + 1)
    pulses = _pulses(edges, len(residual_S))
    first = max(0, edge - LONGEST - AROUND)
    part_S = np.clip(residual_S[first : edge + LONGEST + AROUND], -CLIP, CLIP)
    known_S = np.isfinite(part_S)
    place_S = np.flatnonzero(known_S) + first
    if not pulses or len(place_S) < LEAST_KNOWN:
        return None
    course = _parabola(place_S)
    left_S = part_S[known_S] - course @ (course.T @ part_S[known_S])
    start_C1, stop_C1 = np.array(pulses).T[:, :, None]
    gain_C, height_C = _gains(((place_S >= start_C1) & (place_S < stop_C1)).astype(float), left_S, course)
    ramp_C, _ = _gains(np.clip(place_S, start_C1, stop_C1) - start_C1, left_S, course)
    best, total = int(gain_C.argmax()), float(left_S @ left_S)
    other = max(ramp_C.max(), *(_jump_and_bend(place_S, at, left_S, course) for at in edges))
    # All have two numbers more than the course: a jump and a bend, a ramp or a pulse and its length.
    least = PERFECT * len(place_S)
    better = len(place_S) * np.log(max(total - other, least) / max(total - gain_C[best], least))
    return pulses[best] if better > SURE and abs(height_C[best]) > LEAST_CHANGE else None


def _pulses(edges: range, n_steps: int) -> list[tuple[int, int]]:
    """Return [start, stop) of what begins or ends at one of these edges and has a course before and after it."""
    lengths, found = range(SHORTEST, LONGEST + 1), dict[tuple[int, int], None]()
    for edge in edges:
        found |= dict.fromkeys([(edge - length, edge) for length in lengths if edge - length >= SHORTEST])
        found |= dict.fromkeys([(edge, edge + length) for length in lengths if edge + length <= n_steps - SETTLED])
    return list(found)


def _parabola(place_S: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis (S, 3) of the parabolas over these steps."""
    unit_S = (place_S - place_S.mean()) / max(float(np.ptp(place_S)), 1.0)
    return np.linalg.qr(np.stack([np.ones(len(unit_S)), unit_S, unit_S**2], axis=1))[0]


def _gains(shape_CS: np.ndarray, left_S: np.ndarray, course: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return by how much (C,) each shape beside the course makes the squared error smaller, and its height (C,)."""
    own_CS = shape_CS - (shape_CS @ course) @ course.T
    size_C = np.fmax((own_CS**2).sum(1), 1e-9)
    fitted_C = own_CS @ left_S
    return fitted_C**2 / size_C, fitted_C / size_C


def _jump_and_bend(place_S: np.ndarray, edge: int, left_S: np.ndarray, course: np.ndarray) -> float:
    """Return by how much a jump and a bend at the edge make the squared error smaller."""
    after_S = np.fmax(place_S - edge, 0.0)
    both = np.stack([(place_S >= edge).astype(float), after_S / max(float(after_S.max()), 1.0)], axis=1)
    own = both - course @ (course.T @ both)
    fitted = own @ np.linalg.lstsq(own, left_S, rcond=None)[0]
    return float(fitted @ left_S)
