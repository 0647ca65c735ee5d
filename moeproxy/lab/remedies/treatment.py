"""What an entry of the catalogue of remedies is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeproxy.lab.seams import ROLLOUT_SEAMS
from moeproxy.lab.settings import GRPOSettings

Kind = Literal["mitigation", "repair"]
Seam = Callable[..., Any]
Act = Callable[[Seam], Seam]
Plan = Callable[[GRPOSettings], Mapping[str, Act]]


@dataclass(frozen=True)
class Treatment:
    """One entry of the catalogue.

    Args:
        id: name used everywhere.
        kind: "mitigation" is a setting or a guard that knows nothing of the cause; "repair" puts right code in the
            place of one part of the loop, which helps only where the diagnosis is right and so proves only that.
        title: a few words for people.
        what: what exactly it does.
        source: who does it so, or says that it helps.
        seams: where it acts.
        plan: takes the run's settings and returns, for each of `seams`, what makes the treated seam out of the seam as
            it is, faults and earlier remedies included. Called anew for every run: remedies may have a memory.
        needs_experts: whether a dense model has nothing that it could act on.
    """

    id: str
    kind: Kind
    title: str
    what: str
    source: str
    seams: tuple[str, ...]
    plan: Plan
    needs_experts: bool = False

    @property
    def needs_lab_engine(self) -> bool:
        """Whether it acts inside the lab's own rollout engine."""
        return bool(set(self.seams) & set(ROLLOUT_SEAMS))


def always(act: Act, seam: str) -> Plan:
    """Return the plan of a remedy that acts at one seam and does not look at the settings."""
    return lambda _settings: {seam: act}


def passed_through(*seams: str) -> Plan:
    """Return the plan of a repair: at these seams the loop's own code takes the place of whatever is there."""

    def through(_broken: Seam) -> Seam:
        return lambda value, *_rest, step: value

    return lambda _settings: dict.fromkeys(seams, through)
