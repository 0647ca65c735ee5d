"""The catalogue of machine faults: complete, written out, and each one made in a real job that comes through."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeproxy.errors import RecoveryError
from moeproxy.recovery.detection import PATIENCE
from moeproxy.recovery.hotswap import SwapPlan
from moeproxy.recovery.machine_faults import MACHINE_FAULTS, PAGE, machine_fault, page
from moeproxy.recovery.plan import ROLE_KINDS, Mishap, RolePlan


def test_the_page_is_up_to_date_and_every_entry_is_complete() -> None:
    assert PAGE.read_text("utf-8") == page()
    assert len(MACHINE_FAULTS) == 8
    for item in MACHINE_FAULTS.values():
        for words in (item.title, item.what, item.shows, item.twin, item.check, item.remedy):
            assert words


def test_every_fault_of_a_member_fits_a_plan() -> None:
    mishaps = tuple(item.mishap(3) for item in MACHINE_FAULTS.values() if item.made)
    of_roles = tuple(item for item in mishaps if item.kind in ROLE_KINDS)
    assert len(RolePlan(mishaps=of_roles).mishaps) == 6
    of_ranks = tuple(item for item in mishaps if item not in of_roles)
    assert [item.kind for item in SwapPlan(Path("model"), driver="sharded", mishaps=of_ranks).mishaps] == ["drop"]
    with pytest.raises(RecoveryError, match="mishaps of kind drop"):
        RolePlan(mishaps=mishaps)
    for driver, kind, phase in (("replicated", "drop", "update"), ("sharded", "disk_full", "publish")):
        with pytest.raises(RecoveryError, match=f"mishaps of kind {kind}"):
            SwapPlan(Path("model"), driver=driver, mishaps=(Mishap("trainer-1", 1, phase, kind),))
    assert machine_fault("rollout_killed").mishap(2, "rollout-1").member == "rollout-1"


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(RecoveryError, match=r"unknown machine fault 'flood'.*trainer_killed"):
        machine_fault("flood")
    with pytest.raises(RecoveryError, match="no fault of a member"):
        machine_fault("network_drop").mishap(3)


def test_what_is_said_of_a_rollout_that_hangs_names_the_patience_that_is_had() -> None:
    assert PATIENCE == 5  # "five times" in the docstring
    assert "five times" in " ".join(str(RolePlan.__doc__).split("rollout_hang:")[1].split("answer:")[0].split())
    assert f"after {PATIENCE:.0f} times as long" in machine_fault("hung_collective").remedy
