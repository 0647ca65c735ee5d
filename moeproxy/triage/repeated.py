"""Single steps that stand out again and again: one is a note, many are no single ones any more.

Judging takes lone values out, so that one decides nothing; without this, a gradient norm that explodes at every third
step would be taken out altogether.

Axes: R row, S step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEAST, WITHIN = 5, 20
"""So many lone values of one signal within so many steps are an alarm. Of 189 healthy runs of the benchmark one reaches
this alone and of 129 beside others none; with one value less it would be nine and one."""

RISE = 4
"""How many times as often as before they must come: a signal that always did so is noisy."""

BEGINNING = 10
"""Steps that say how often they came before."""


@dataclass(frozen=True)
class Repeated:
    """A signal whose single steps stand out again and again.

    Args:
        row: its index.
        places: indices of these steps, from the first that belongs to it on.
        most: how many of them come within `WITHIN` steps.
    """

    row: int
    places: tuple[int, ...]
    most: int


def repeated(spikes_RS: np.ndarray) -> list[Repeated]:
    """Return the rows in which lone values (R, S) become frequent, each with the first step of that."""
    found = []
    for row, spikes_S in enumerate(spikes_RS):
        places = np.flatnonzero(spikes_S)
        for first, last in zip(places, places[LEAST - 1 :], strict=False):
            before, after = spikes_S[:first].mean() if first else 0.0, spikes_S[first:].mean()
            if last - first < WITHIN and first >= BEGINNING and RISE * before <= after:
                mine = places[places >= first]
                most = max(int(np.sum((mine >= one) & (mine < one + WITHIN))) for one in mine)
                found.append(Repeated(row, tuple(int(place) for place in mine), most))
                break
    return found
