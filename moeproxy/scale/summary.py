"""From everything a meter saw to the figures of an `Emulation`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from moeproxy.scale.emulation import CATEGORIES, Holder, gathered, scratch, whole
from moeproxy.scale.meter import Course

_POINTS = 400
_HOLDERS = 20


def summarised(course: Course) -> dict[str, Any]:
    """Return the fields of an `Emulation` that follow from the course of a step."""
    kind_S = np.array(course.kind)
    delta_N, owner_N, phase_N = (np.array(values) for values in (course.delta, course.owner, course.phase))
    live_NC = np.zeros((len(delta_N), len(CATEGORIES)), np.int64)
    live_NC[np.arange(len(delta_N)), kind_S[owner_N]] = delta_N
    live_NC = live_NC.cumsum(axis=0)
    points_P = _fullest(live_NC.sum(axis=1), phase_N, course.peak_at)
    return {
        "peak_bytes": course.peak,
        "peak": dict(zip(CATEGORIES, live_NC[course.peak_at].tolist(), strict=True)),
        "peak_phase": course.phases[phase_N[course.peak_at]],
        "peak_module": _short(course.peak_module),
        "holders": _holders(course),
        "phases": tuple(course.phases),
        "timeline_PC": live_NC[points_P],
        "phase_P": phase_N[points_P],
        "traffic": gathered(course.collectives),
        "flops": dict(course.flops),
        "scratch_bytes": scratch(course.collectives),
        "whole_bytes": whole(course.collectives, course.peak),
    }


def _fullest(total_N: np.ndarray, phase_N: np.ndarray, peak_at: int) -> np.ndarray:
    """Return the places of the fullest moments: one of each stretch, stretches ending with their phase."""
    places = [peak_at]
    for phase in np.unique(phase_N):
        within = np.flatnonzero(phase_N == phase)
        share = max(1, round(_POINTS * len(within) / len(total_N)))
        places += [int(part[np.argmax(total_N[part])]) for part in np.array_split(within, min(share, len(within)))]
    return np.unique(places)


def _holders(course: Course) -> tuple[Holder, ...]:
    """Return who holds the peak, the largest first."""
    alive: dict[int, int] = defaultdict(int)
    for delta, owner in zip(course.delta[: course.peak_at + 1], course.owner, strict=False):
        alive[owner] += delta
    sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for owner, nbytes in alive.items():
        if nbytes:
            place = sums[course.kind[owner], _short(course.where[owner])]
            place[0] += nbytes
            place[1] += 1
    found = [Holder(CATEGORIES[kind], module, *place) for (kind, module), place in sums.items()]
    return tuple(sorted(found, key=lambda item: -item.nbytes)[:_HOLDERS])


def _short(module: str) -> str:
    """Drop the class name that torch's tracker puts before the path."""
    return module.partition(".")[2] or module
