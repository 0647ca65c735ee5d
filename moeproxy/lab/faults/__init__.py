"""The fault catalogue and the one way to inject from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from moeproxy.errors import FaultError
from moeproxy.lab.faults import credit, framework, generation, numeric, operators, optimisation, rewards, routing, tools
from moeproxy.lab.faults.fault import Fault, TellTale
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import GRPOSettings, Injection

__all__ = ["FAULTS", "Fault", "TellTale", "check_injection", "fault", "inject"]

_FAMILIES = (numeric, framework, operators, routing, rewards, generation, optimisation, credit, tools)

FAULTS: dict[str, Fault] = {item.id: item for family in _FAMILIES for item in family.FAULTS}
"""Every fault by id, family by family."""


def fault(fault_id: str) -> Fault:
    """Return the fault with this id.

    Raises:
        FaultError: no such fault; the known ids are listed.
    """
    if fault_id not in FAULTS:
        raise FaultError(f"unknown fault {fault_id!r}", expected=f"one of {', '.join(FAULTS)}")
    return FAULTS[fault_id]


def check_injection(
    injection: Injection, steps: int, *, experts: bool = True, settings: GRPOSettings | None = None
) -> Fault:
    """Return the fault of `injection` after checking its settings against a run of `steps` steps.

    Args:
        injection: the fault and its settings.
        steps: of the run.
        experts: whether the run's model has any; some faults need them.
        settings: of the run, where they are known; some faults need a tool or a KL term.

    Raises:
        FaultError: the fault is unknown, its settings are impossible, or the model has nothing that it could break.
    """
    item = fault(injection.fault)
    if item.needs_experts and not experts:
        raise FaultError("the model has no experts", where=item.id, expected="a Mixture-of-Experts model")
    if settings is not None and injection.strength > 0:
        _check_acts(item, settings)
    if not 0 <= injection.strength <= 1:
        raise FaultError(f"strength is {injection.strength}", expected="0 to 1", where=item.id)
    if not 1 <= injection.onset <= steps:
        raise FaultError(f"onset is step {injection.onset}", expected=f"1 to {steps}", where=item.id)
    return item


def _check_acts(item: Fault, settings: GRPOSettings) -> None:
    """Refuse a fault that could change nothing: its run would be healthy and labelled as broken."""
    if item.family == "TE" and settings.environment != "calculator":
        raise FaultError("it breaks a tool, and the run has none", where=item.id, expected="environment='calculator'")
    if item.id == "kl_sign" and settings.beta == 0:
        raise FaultError("the run has no KL term", where=item.id, expected="beta above 0")


@contextmanager
def inject(seams: Seams, injections: Iterable[Injection], *, steps: int) -> Iterator[None]:
    """Patch the seams of the given faults and put them back at the end, also after an exception.

    A fault of strength 0 patches nothing. Two faults on one seam act one after the other, in the order given.
    """
    before = dict(vars(seams))
    try:
        for injection in injections:
            item = check_injection(injection, steps)
            if injection.strength > 0:
                setattr(seams, item.seam, item.patched(getattr(seams, item.seam), injection))
        yield
    finally:
        vars(seams).clear()
        vars(seams).update(before)
