"""Recovery: what to do when a machine of an RL job dies, and whether the run afterwards is still the same run.

    recovery.verify("run-a", "run-b")    # at which step and tensor two runs part
    recovery.ettr("run-a")               # effective training time, and where the rest went

Public names are imported on first use: judging events needs no torch, and roles need Ray (the extra `recovery`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeproxy.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
