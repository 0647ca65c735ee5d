"""What a catalogue entry is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeproxy.lab.settings import Injection

Seam = Callable[..., Any]
Act = Callable[[Seam, float], Seam]


@dataclass(frozen=True)
class TellTale:
    """A signal that moves when the fault acts.

    Args:
        signal: canonical name.
        direction: +1 when it rises, -1 when it falls, against the healthy run of the same seed; 0 when it becomes NaN.
    """

    signal: str
    direction: int


@dataclass(frozen=True)
class Fault:
    """One entry of the catalogue.

    Args:
        id: name used everywhere.
        family: two letters of the catalogue's families (NP numeric precision, OD optimisation, ...).
        title: a few words for people.
        seam: the seam of `moeproxy.lab.seams.Seams` that it patches.
        what: what exactly it does at strength s.
        tell_tales: signals that show it.
        twin: the public report or paper that it stands for.
        check: the check that tells it from its neighbours.
        remedy: what usually helps.
        act: takes the healthy seam and the strength, returns the broken seam.
        needs_experts: whether a dense model has nothing that it could break.
    """

    id: str
    family: str
    title: str
    seam: str
    what: str
    tell_tales: tuple[TellTale, ...]
    twin: str
    check: str
    remedy: str
    act: Act
    needs_experts: bool = False

    def patched(self, healthy: Seam, injection: Injection) -> Seam:
        """Return a seam that is healthy before the onset and broken from it on."""
        broken = self.act(healthy, injection.strength)

        def seam(*args: Any, step: int) -> Any:
            return (broken if step >= injection.onset else healthy)(*args, step=step)

        return seam
