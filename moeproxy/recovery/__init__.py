"""Recovery: what to do when a machine of an RL job dies, and whether the run afterwards is still the same run.

    recovery.verify("run-a", "run-b")    # at which step and tensor two runs part
    recovery.ettr("run-a")               # effective training time, and where the rest went

Public names are imported on first use: judging events needs no torch, and roles need Ray (the extra `recovery`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeproxy.recovery.calculator import Cluster, expected
    from moeproxy.recovery.effective import Ettr, ettr
    from moeproxy.recovery.events import read_events
    from moeproxy.recovery.hotswap import SwapPlan, SwapRun, hot_swap
    from moeproxy.recovery.job import Job
    from moeproxy.recovery.outcome import RoleRun
    from moeproxy.recovery.parting import Parting, verify
    from moeproxy.recovery.plan import Mishap, RolePlan

_HOMES = {
    "moeproxy.recovery.calculator": ("Cluster", "expected"),
    "moeproxy.recovery.effective": ("Ettr", "ettr"),
    "moeproxy.recovery.events": ("read_events",),
    "moeproxy.recovery.hotswap": ("SwapPlan", "SwapRun", "hot_swap"),
    "moeproxy.recovery.job": ("Job",),
    "moeproxy.recovery.outcome": ("RoleRun",),
    "moeproxy.recovery.parting": ("Parting", "verify"),
    "moeproxy.recovery.plan": ("Mishap", "RolePlan"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cluster",
    "Ettr",
    "Job",
    "Mishap",
    "Parting",
    "RolePlan",
    "RoleRun",
    "SwapPlan",
    "SwapRun",
    "ettr",
    "expected",
    "hot_swap",
    "read_events",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'moeproxy.recovery' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # found directly the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
