"""A spare takes over for a dead rank: no step is lost, and every rank's weights stay equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeproxy import recovery
from moeproxy.errors import RecoveryError
from moeproxy.places import data_dir
from moeproxy.recovery import Mishap, hotswap, hotswap_replicated
from moeproxy.recovery.events import Event
from moeproxy.recovery.hotswap import SwapPlan, SwapRun, hot_swap
from moeproxy.recovery.swap_processes import marked
from moeproxy.recovery.swap_watch import with_state
from moeproxy.recovery.torchft_log import LEFT, torchft_events
from tests.recovery.processes import watched

MODEL = data_dir() / "models" / "qwen3-moe-tiny"
LIMIT = 180.0  # a job takes seconds; the first one also waits for imports, a minute on a busy machine
Sockets = dict[int, set[str]]


@pytest.fixture(scope="module")
def watched_job(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[SwapRun, Sockets]:
    """A job without mishaps, and who listened on which addresses meanwhile."""
    pytest.importorskip("torchft", reason="needs the extra: pip install 'moeproxy[recovery]'")
    folder = tmp_path_factory.mktemp("swap") / "calm"
    with watched(lambda: marked(folder)) as seen:
        found = hot_swap(SwapPlan(MODEL), folder, limit=LIMIT)
    assert found.finished, found
    return found, seen


@pytest.fixture(scope="module")
def calm(watched_job: tuple[SwapRun, Sockets]) -> SwapRun:
    return watched_job[0]


@pytest.mark.job
def test_nobody_else_can_reach_replicas(watched_job: tuple[SwapRun, Sockets]) -> None:
    found, seen = watched_job
    members = {event.info["pid"] for event in recovery.read_events(found.folder) if event.event == "start"}
    assert len(members) == 3
    assert members < seen.keys()  # store, manager and checkpoint server of each; and the lighthouse
    assert set().union(*seen.values()) == {"127.0.0.1"}


@pytest.mark.job
def test_a_spare_takes_over_without_losing_a_step(calm: SwapRun, tmp_path: Path) -> None:
    found = hot_swap(SwapPlan(MODEL, mishaps=(Mishap("trainer-1", 9, "update"),)), tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 20), found
    assert recovery.verify(calm.folder, found.folder).equal
    (seconds,) = found.recoveries
    assert seconds < 20
    # The same outage, seen by torchft's own log alone.
    effective = recovery.ettr(torchft_events(*found.folder.glob("trainer-*.torchft.log")))
    assert effective.steps == 20
    (outage,) = [item for item in effective.outages if item.kind == LEFT and item.step in (9, 10)]
    assert 0 < outage.seconds < seconds + 1
    assert not recovery.ettr(torchft_events(*calm.folder.glob("trainer-[01].torchft.log"))).repeated


@pytest.mark.job
@pytest.mark.parametrize(
    "mishaps",
    [
        pytest.param((Mishap("trainer-2", 9, "update"),), marks=pytest.mark.kill),
        pytest.param((Mishap("trainer-0", 10, "publish"),), marks=pytest.mark.kill),
        (Mishap("trainer-1", 9, "update"), Mishap("trainer-2", 9, "update")),
        (Mishap("trainer-1", 8, "update"), Mishap("trainer-3", 0, "recover")),
    ],
    ids=["the spare dies", "while a checkpoint is written", "two at once", "during recovery"],
)
def test_worse_faults_are_survived(mishaps: tuple[Mishap, ...], calm: SwapRun, tmp_path: Path) -> None:
    spares = 1 if all(item.member != "trainer-3" for item in mishaps) else 2
    found = hot_swap(SwapPlan(MODEL, spares=spares, mishaps=mishaps), tmp_path / "a", limit=LIMIT)
    assert (found.finished, found.step) == (True, 20), found
    assert recovery.verify(calm.folder, found.folder).equal


@pytest.mark.job
def test_when_no_replica_is_left_the_verdict_names_the_checkpoint(fork_server: None, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="needs the extra: pip install 'moeproxy[recovery]'")
    both = (Mishap("trainer-0", 8, "update"), Mishap("trainer-1", 8, "update"))
    found = hot_swap(SwapPlan(MODEL, spares=0, mishaps=both), tmp_path / "a", limit=LIMIT)
    assert not found.finished
    assert "0 of 2 ranks are left and no spare; the newest checkpoint is that after step 5" in found.outcome


def test_a_job_without_a_member_that_has_the_state_is_over() -> None:
    members = {"trainer-1", "trainer-3"}
    begun = Event(1.0, "trainer", "trainer-3", "start")
    step = Event(2.0, "trainer", "trainer-0", "step_commit", 1)
    healed = Event(3.0, "trainer", "trainer-3", "connected")
    assert with_state([begun], members) == members  # nobody has begun
    assert with_state([begun, step], members) == set()
    assert with_state([begun, step, healed], members) == {"trainer-3"}


def test_gradients_of_a_step_in_which_a_peer_died_come_back_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    whole: Any = torch.futures.Future()
    whole.set_result("averaged")

    def manager(future: object) -> Any:
        work = SimpleNamespace(wait=lambda: False, get_future=lambda: future)
        return SimpleNamespace(allreduce=lambda _: work)

    def found(future: object) -> object:
        return hotswap_replicated._averaged(manager(future), "own").value()

    assert found(SimpleNamespace(_fut=whole)) == "averaged"
    assert found(SimpleNamespace(_fut=None)) == "own"  # torchft's when it failed while it waited
    assert found(torch.futures.Future()) == "own"  # and when it had failed before


def test_what_cannot_be_swapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, words in (({"driver": "hope"}, "no driver"), ({"active": 1}, "active is 1"), ({"steps": 0}, "steps is")):
        arguments: dict[str, Any] = wrong
        with pytest.raises(RecoveryError, match=words):
            SwapPlan(MODEL, **arguments)
    with pytest.raises(RecoveryError, match="mishaps of trainer-7"):
        SwapPlan(MODEL, mishaps=(Mishap("trainer-7", 1, "update"),))
    monkeypatch.setattr(hotswap, "find_spec", lambda _: True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecoveryError, match=r"no folder for a job \((File exists|Not a directory)\)"):
        hot_swap(SwapPlan(MODEL), tmp_path / "file")
    with pytest.raises(RecoveryError, match="no such directory"):
        hot_swap(SwapPlan(tmp_path / "none"), tmp_path / "a")
    monkeypatch.setattr(hotswap, "find_spec", lambda _: None)
    with pytest.raises(RecoveryError, match=r"torchft is not installed.*pip install 'moeproxy\[recovery\]'"):
        hot_swap(SwapPlan(MODEL), tmp_path / "a")
    plan = SwapPlan(MODEL, mishaps=(Mishap("trainer-1", 9, "update"),))
    assert SwapPlan.from_dict(plan.to_dict()) == plan
