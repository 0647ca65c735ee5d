"""Ranks that own a shard each are killed, and the job goes on bit for bit or says what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moeproxy import recovery
from moeproxy.errors import RecoveryError
from moeproxy.places import data_dir
from moeproxy.recovery import Mishap, read_events
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.digests import digest, read_digests
from moeproxy.recovery.events import Event, EventLog
from moeproxy.recovery.hotswap import SwapPlan, SwapRun, hot_swap
from moeproxy.recovery.machine_faults import machine_fault
from moeproxy.recovery.packing import unpack
from moeproxy.recovery.swap_plan import shard_folder
from moeproxy.recovery.swap_processes import marked
from tests.recovery.processes import watched

MODEL = data_dir() / "models" / "qwen3-moe-tiny"
LIMIT = 150.0  # a job takes ten seconds; on a busy machine its processes alone take that
PLAN = SwapPlan(MODEL, driver="sharded", steps=12, timeout=10.0)
APART = replace(PLAN, machine_survives=False)
FOUR = replace(APART, active=4, spares=2, steps=8, batch=8)

pytestmark = [pytest.mark.job, pytest.mark.usefixtures("fork_server")]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SwapPlan], SwapRun]:
    """A run without mishaps of the same number of ranks."""
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra: pip install 'moeproxy[recovery]'")
    made: dict[int, SwapRun] = {}

    def run(plan: SwapPlan) -> SwapRun:
        if plan.active not in made:
            folder = tmp_path_factory.mktemp("calm") / f"of-{plan.active}"
            made[plan.active] = hot_swap(replace(plan, mishaps=(), spares=0), folder, limit=LIMIT)
            assert (made[plan.active].finished, made[plan.active].lost) == (True, 0), made[plan.active]
        return made[plan.active]

    return run


def _restored(run: SwapRun) -> list[Event]:
    return [event for event in read_events(run.folder) if event.event == "ready"]


def _strike(folder: Path, members: set[str], step: int) -> threading.Thread:
    """Kill members at once, from outside, as soon as one of them is in a step."""

    def watch() -> None:
        while True:
            time.sleep(0.01)
            try:
                events = read_events(folder)
            except RecoveryError:
                continue
            if any((event.event, event.step) == ("step_begin", step) for event in events if event.member in members):
                break
        pids = {event.member: int(event.info["pid"]) for event in events if event.event == "start"}
        for member in members:
            os.kill(pids[member], signal.SIGKILL)
        for member in members:
            EventLog(folder, "trainer", member).add("fault", step, kind="kill")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "mishap",
    [
        Mishap("trainer-1", 7, "publish"),
        pytest.param(Mishap("trainer-0", 7, "publish"), marks=pytest.mark.kill),
        pytest.param(Mishap("trainer-1", 7, "update"), marks=pytest.mark.kill),
    ],
    ids=["while a snapshot is pushed", "rank 0 while a snapshot is pushed", "in an update"],
)
def test_a_process_that_dies_costs_no_step_where_its_machine_stays(
    mishap: Mishap, calm: Callable[[SwapPlan], SwapRun], tmp_path: Path
) -> None:
    found = hot_swap(replace(PLAN, mishaps=(mishap,)), tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step, found.lost) == (True, 12, 0), found
    assert recovery.verify(calm(PLAN).folder, found.folder).equal
    last = _restored(found)[-1].info
    assert (last["source"], last["moved"]) == ("memory", [])


@pytest.mark.kill
def test_all_that_die_at_once_cost_no_step_where_their_machines_stay(
    calm: Callable[[SwapPlan], SwapRun], tmp_path: Path
) -> None:
    _strike(tmp_path / "a", {"trainer-0", "trainer-1"}, 8)
    plan = replace(PLAN, spares=2)
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step, found.lost) == (True, 12, 0), found
    assert recovery.verify(calm(plan).folder, found.folder).equal
    assert {event.info["source"] for event in _restored(found)} == {"memory"}


@pytest.mark.parametrize(
    ("mishaps", "spares", "moved", "lost"),
    [
        ((Mishap("trainer-1", 7, "update"),), 1, [1], 0),
        pytest.param((Mishap("trainer-0", 7, "update"),), 1, [0], 0, marks=pytest.mark.kill),
        ((Mishap("trainer-1", 7, "publish"),), 1, [1], 1),
        pytest.param((Mishap("trainer-2", 6, "wait"),), 1, [], 1, marks=pytest.mark.kill),
        ((Mishap("trainer-1", 7, "update"), Mishap("trainer-3", 0, "recover")), 2, [1], 0),
    ],
    ids=["in an update", "rank 0", "while a snapshot is pushed", "the spare", "the spare as it takes over"],
)
def test_a_shard_comes_back_from_the_neighbours_memory(
    mishaps: tuple[Mishap, ...],
    spares: int,
    moved: list[int],
    lost: int,
    calm: Callable[[SwapPlan], SwapRun],
    tmp_path: Path,
) -> None:
    plan = replace(APART, spares=spares, mishaps=mishaps)
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 12), found
    assert recovery.verify(calm(plan).folder, found.folder).equal
    assert found.lost <= lost  # none that was pushed; a copy under way may cost the one step that it was of
    assert len(found.recoveries) == len(mishaps)
    last = _restored(found)[-1].info
    assert (last["source"], last["moved"]) == ("memory", moved)


def test_nobody_else_can_reach_ranks(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra: pip install 'moeproxy[recovery]'")
    folder = tmp_path / "a"
    with watched(lambda: marked(folder)) as seen:
        assert hot_swap(replace(PLAN, steps=6), folder, limit=LIMIT).finished
    members = {event.info["pid"] for event in read_events(folder) if event.event == "start"}
    assert len(members & seen.keys()) >= 2  # the spare waits for nobody; gloo's of the two others, and the lighthouse
    assert len(seen) >= 3
    assert set().union(*seen.values()) == {"127.0.0.1"}


@pytest.mark.parametrize("kind", ["drop", *(pytest.param(kind, marks=pytest.mark.kill) for kind in ("mute", "hang"))])
def test_a_network_that_fails_costs_no_rank(kind: str, calm: Callable[[SwapPlan], SwapRun], tmp_path: Path) -> None:
    mishap = replace(machine_fault("rank_drop").mishap(7), kind=kind)
    plan = replace(PLAN, spares=0, timeout=10.0 if kind == "drop" else 4.0, mishaps=(mishap,))
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 12), found
    assert recovery.verify(calm(plan).folder, found.folder).equal
    events = read_events(found.folder)
    assert sum(event.event == "start" for event in events) == 2
    assert not [event for event in events if event.event == "detect"]
    assert _restored(found)
    assert all((event.info["source"], event.info["moved"]) == ("memory", []) for event in _restored(found))
    (seconds,) = found.recoveries
    assert kind == "drop" or seconds > 2  # nothing tells of what is lost but time


@pytest.mark.kill
def test_a_straggler_is_no_failed_rank(calm: Callable[[SwapPlan], SwapRun], tmp_path: Path) -> None:
    plan = replace(PLAN, spares=0, mishaps=(Mishap("trainer-1", 7, "update", "slow", 0.4),))
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.recoveries, _restored(found)) == (True, (), []), found
    assert recovery.verify(calm(plan).folder, found.folder).equal
    commits = [event for event in read_events(found.folder) if event.event == "step_commit"]
    slow = [event.info["seconds"] for event in commits if (event.step or 0) >= 7 and event.member == "trainer-1"]
    assert min(slow) > 0.4


@pytest.mark.kill
def test_two_at_once_come_back_from_memory_when_they_are_no_neighbours(
    calm: Callable[[SwapPlan], SwapRun], tmp_path: Path
) -> None:
    _strike(tmp_path / "a", {"trainer-0", "trainer-2"}, 5)
    found = hot_swap(FOUR, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 8), found
    assert recovery.verify(calm(FOUR).folder, found.folder).equal
    assert found.lost <= 1
    assert {event.info["source"] for event in _restored(found)} == {"memory"}


def test_two_neighbours_at_once_cost_the_steps_since_the_checkpoint(
    calm: Callable[[SwapPlan], SwapRun], tmp_path: Path
) -> None:
    plan = replace(APART, spares=2)
    _strike(tmp_path / "a", {"trainer-0", "trainer-1"}, 8)
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 12), found
    assert recovery.verify(calm(plan).folder, found.folder).equal
    assert {(event.info["source"], event.step) for event in _restored(found)} == {("disk", 5)}


def test_without_a_spare_the_verdict_names_a_checkpoint_that_is_whole(
    calm: Callable[[SwapPlan], SwapRun], tmp_path: Path
) -> None:
    plan = replace(PLAN, spares=0, mishaps=(Mishap("trainer-1", 7, "update"),))
    found = hot_swap(plan, tmp_path / "a", limit=LIMIT)
    assert not found.finished
    assert "1 of 2 ranks are left and no spare; the newest checkpoint is that after step 5" in found.outcome
    known = {
        name: value for state in read_digests(calm(plan).folder / "digests.jsonl")[5] for name, value in state.items()
    }
    for rank in range(2):
        kept = Checkpoints(shard_folder(found.folder, rank)).newest()
        assert kept is not None
        assert kept.step == 5
        flat, at = unpack(kept.payload)["shard"], 0
        for name, shape in unpack(kept.payload)["layout"].items():
            part = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
            assert not part.numel() or digest(part) == known[f"{name}/shard-{rank}"]
        assert at == flat.numel()


@pytest.mark.kill
def test_a_checkpoint_that_cannot_be_written_ends_no_job(calm: Callable[[SwapPlan], SwapRun], tmp_path: Path) -> None:
    folder, plan = tmp_path / "a", replace(PLAN, spares=0)

    def block() -> None:
        while not (folder / "swap.json").exists():
            time.sleep(0.01)
        (folder / "checkpoints").write_text("no folder", encoding="utf-8")

    threading.Thread(target=block, daemon=True).start()
    found = hot_swap(plan, folder, limit=LIMIT)
    assert found.finished, found
    problems = [event.info["problem"] for event in read_events(folder) if event.event == "checkpoint"]
    assert len(problems) == 4  # of two ranks, after steps 5 and 10
    assert all("could not be written" in problem for problem in problems)
    assert recovery.verify(calm(plan).folder, folder).equal


@pytest.mark.kill
def test_an_ordinary_bug_does_not_start_over_for_ever(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra: pip install 'moeproxy[recovery]'")
    bug = tuple(Mishap("trainer-0", 3, "update", "raise") for _ in range(20))
    found = hot_swap(replace(PLAN, mishaps=bug), tmp_path / "a", limit=LIMIT)
    assert not found.finished
    assert "restarts in a row without a finished step" in found.outcome
    assert "there is no checkpoint" in found.outcome
    assert not marked(found.folder)


_PARENT = """
import sys
from pathlib import Path
from moeproxy.recovery.hotswap import SwapPlan, hot_swap
hot_swap(SwapPlan(Path(sys.argv[1]), driver="sharded", steps=10_000, timeout=10.0), sys.argv[2], limit=300)
"""


@pytest.mark.kill
def test_a_parent_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra: pip install 'moeproxy[recovery]'")
    folder = tmp_path / "a"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(MODEL), str(folder)])
    try:
        _until(lambda: "step_commit" in _seen(folder), 100)
        assert len(marked(folder)) >= 4  # the lighthouse, three members, and their monitors
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not marked(folder), 40)


def _seen(folder: Path) -> set[str]:
    try:
        return {event.event for event in read_events(folder)}
    except RecoveryError:
        return set()


def _until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
