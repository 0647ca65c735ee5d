"""The catalogue of remedies, which of them belong to which fault, and the one way to apply them.

A remedy wraps a seam of the loop as it is, with whatever fault lies in it: it sees what a user of the loop could see
and does not know which fault was injected. What a *mitigation* does is a setting or a guard. A *repair* puts the
loop's own code in the place of one part; it helps only where that part is the broken one, and so proves the diagnosis
and nothing more. Both are told apart in every score.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.remedies import environment, mismatch, objective, optimiser, rollout
from moeproxy.lab.remedies.candidates import CANDIDATES
from moeproxy.lab.remedies.treatment import Act, Seam, Treatment
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import Application, GRPOSettings, RunSpec

__all__ = ["CANDIDATES", "REMEDIES", "Treatment", "candidates", "check_application", "remedy", "treat"]

_PARTS = (rollout, mismatch, optimiser, objective, environment)

REMEDIES: dict[str, Treatment] = {item.id: item for part in _PARTS for item in part.REMEDIES}
"""Every remedy by id."""


def remedy(remedy_id: str) -> Treatment:
    """Return the remedy with this id.

    Raises:
        LabError: no such remedy; the known ids are listed.
    """
    if remedy_id not in REMEDIES:
        raise LabError(f"unknown remedy {remedy_id!r}", expected=f"one of {', '.join(REMEDIES)}")
    return REMEDIES[remedy_id]


def candidates(fault: str, kind: str | None = None) -> tuple[str, ...]:
    """Return the remedies for a fault, the most likely first; with `kind` only mitigations or repairs.

    Raises:
        LabError: no remedy is known for this fault.
    """
    if fault not in CANDIDATES:
        raise LabError(f"no remedy is known for {fault!r}", expected=f"one of {', '.join(CANDIDATES)}")
    return tuple(name for name in CANDIDATES[fault] if kind in (None, REMEDIES[name].kind))


def check_application(application: Application, settings: GRPOSettings, *, experts: bool = True) -> Treatment:
    """Return the remedy of `application` after checking that a run of these settings can have it.

    Raises:
        LabError: the remedy is unknown, starts outside the run, or has nothing to act on.
    """
    item = remedy(application.remedy)
    if not 1 <= application.start <= settings.steps:
        raise LabError(f"it starts at step {application.start}", expected=f"1 to {settings.steps}", where=item.id)
    if item.needs_experts and not experts:
        raise LabError("the model has no experts", where=item.id, expected="a Mixture-of-Experts model")
    if item.needs_lab_engine and settings.engine != "lab":
        raise LabError("it acts inside the lab's own rollout engine", where=item.id, remedy="use engine='lab'")
    return item


@contextmanager
def treat(seams: Seams, spec: RunSpec) -> Iterator[None]:
    """Wrap the seams as they are in the run's remedies, in their order, and unwrap them at the end."""
    before = dict(vars(seams))
    try:
        for application in spec.remedies:
            plan = remedy(application.remedy).plan(spec.settings)
            for name, act in plan.items():
                setattr(seams, name, _from(application.start, act, getattr(seams, name)))
        yield
    finally:
        vars(seams).clear()
        vars(seams).update(before)


def _from(start: int, act: Act, seam: Seam) -> Seam:
    treated = act(seam)

    def chosen(*args: Any, step: int) -> Any:
        return (treated if step >= start else seam)(*args, step=step)

    return chosen
