"""Faults that engines of hot swap leave to whoever started the job: before the first step, and of what is frozen."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from moeproxy import recovery
from moeproxy.errors import RecoveryError
from moeproxy.places import data_dir
from moeproxy.recovery import Mishap, read_events
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.hotswap import SwapPlan, SwapRun, hot_swap
from moeproxy.recovery.swap_plan import DRIVERS, REPLICATED, SHARDED
from moeproxy.recovery.swap_processes import LIGHTHOUSE, marked

LIMIT = 150.0
PLANS = {
    REPLICATED: SwapPlan(data_dir() / "models" / "qwen3-moe-tiny", steps=10),
    SHARDED: SwapPlan(data_dir() / "models" / "qwen3-moe-tiny", driver=SHARDED, steps=10, timeout=10.0),
}

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("fork_server")]
both = pytest.mark.parametrize("driver", [REPLICATED, SHARDED])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SwapRun]:
    found = {}
    for driver, plan in PLANS.items():
        if find_spec(DRIVERS[driver][0]):
            found[driver] = hot_swap(plan, tmp_path_factory.mktemp("calm") / driver, limit=LIMIT)
            assert found[driver].finished, found[driver]
    return found


def _swapped(plan: SwapPlan, folder: Path, calm: dict[str, SwapRun]) -> SwapRun:
    if plan.driver not in calm:
        pytest.skip("needs the extra: pip install 'moeproxy[recovery]'")
    found = hot_swap(plan, folder, limit=LIMIT)
    assert not marked(folder)
    return found


def _strike(folder: Path, members: list[str], event: str, step: int, number: int, victim: str = "") -> threading.Thread:
    """Send a signal to a victim (the first member), from outside, as soon as all members have logged an event."""

    def watch() -> None:
        while True:
            time.sleep(0.005)
            with contextlib.suppress(RecoveryError):
                told = {
                    found.member for found in read_events(folder) if (found.event, found.step or 0) == (event, step)
                }
                if told >= set(members):
                    os.kill(_pid(folder, victim or members[0]), number)
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def _pid(folder: Path, name: str) -> int:
    """Return the process that writes to the log of a name; its children do, too."""
    log = str(folder / f"{name}.log")
    return min(pid for pid in marked(folder) if os.readlink(f"/proc/{pid}/fd/1") == log)


@both
@pytest.mark.parametrize(
    ("member", "number"),
    [
        ("trainer-0", signal.SIGKILL),
        pytest.param("trainer-2", signal.SIGKILL, marks=pytest.mark.kill),
        pytest.param("trainer-2", signal.SIGSTOP, marks=pytest.mark.kill),
    ],
)
def test_a_rank_that_fails_before_the_first_step_costs_a_start(
    driver: str, member: str, number: int, calm: dict[str, SwapRun], tmp_path: Path
) -> None:
    _strike(tmp_path / "a", [member], "start", 0, number)
    found = _swapped(PLANS[driver], tmp_path / "a", calm)
    assert (found.finished, found.step) == (True, 10), found
    assert recovery.verify(calm[driver].folder, found.folder).equal
    kinds = {event.member: event.info["kind"] for event in read_events(found.folder) if event.event == "detect"}
    assert kinds[member] == ("died" if number == signal.SIGKILL else "hung")


@pytest.mark.kill
@pytest.mark.parametrize("member", ["trainer-0", "trainer-1"])
def test_a_replica_that_dies_in_the_first_step_costs_a_start(
    member: str, calm: dict[str, SwapRun], tmp_path: Path
) -> None:
    found = _swapped(replace(PLANS[REPLICATED], mishaps=(Mishap(member, 1, "update"),)), tmp_path / "a", calm)
    assert (found.finished, found.step) == (True, 10), found
    assert recovery.verify(calm[REPLICATED].folder, found.folder).equal
    reasons = [event.info["reason"] for event in read_events(found.folder) if event.event == "task_restart"]
    # The other one may end the step: what this one had to give to it was sent before.
    assert reasons in ([], [f"{member} died before the first step"])


@pytest.mark.kill
def test_a_replica_that_is_frozen_is_replaced_where_there_is_no_spare(calm: dict[str, SwapRun], tmp_path: Path) -> None:
    _strike(tmp_path / "a", ["trainer-1"], "step_begin", 5, signal.SIGSTOP)
    found = _swapped(replace(PLANS[REPLICATED], spares=0), tmp_path / "a", calm)
    assert (found.finished, found.step) == (True, 10), found
    assert recovery.verify(calm[REPLICATED].folder, found.folder).equal
    (outage,) = recovery.ettr(found.folder).outages
    assert (outage.member, outage.kind) == ("trainer-1", "hung")
    assert outage.detect - outage.fault > 15


@both
@pytest.mark.kill
def test_without_the_lighthouse_the_verdict_says_so(driver: str, calm: dict[str, SwapRun], tmp_path: Path) -> None:
    # A checkpoint is there once all who write a part of it have done so.
    writing = ["trainer-0"] if driver == REPLICATED else ["trainer-0", "trainer-1"]
    striking = _strike(tmp_path / "a", writing, "checkpoint", 5, signal.SIGKILL, LIGHTHOUSE)
    found = _swapped(replace(PLANS[driver], steps=500), tmp_path / "a", calm)
    striking.join(5)
    assert not found.finished
    assert "failed" in found.outcome, found
    assert "the newest checkpoint is that after step" in found.outcome, found


@both
def test_the_checkpoint_of_the_last_step_is_there(driver: str, calm: dict[str, SwapRun]) -> None:
    if driver not in calm:
        pytest.skip("needs the extra: pip install 'moeproxy[recovery]'")
    place = calm[driver].folder / "checkpoints"
    for shard in sorted(place.glob("shard-*")) or [place]:
        assert 10 in Checkpoints(shard).whole()


@pytest.mark.kill
def test_another_replica_writes_the_last_checkpoint_when_the_first_dies_at_it(
    calm: dict[str, SwapRun], tmp_path: Path
) -> None:
    found = _swapped(replace(PLANS[REPLICATED], mishaps=(Mishap("trainer-0", 10, "publish"),)), tmp_path / "a", calm)
    assert (found.finished, found.step) == (True, 10), found
    assert 10 in Checkpoints(found.folder / "checkpoints").whole()
