"""Real GRPO in roles on Ray: members are killed in every phase, and the weights come out the same bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy import recovery
from moeproxy.errors import RecoveryError
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.places import data_dir
from moeproxy.recovery import Job, Mishap, RolePlan, RoleRun, crew
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.child import start_job
from moeproxy.recovery.crew import ray_running
from moeproxy.recovery.job import Report
from moeproxy.recovery.machine_faults import machine_fault
from tests.recovery.processes import descendants, gone, listening, running

pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")

Sockets = dict[int, set[str]]
SETTINGS = GRPOSettings(steps=10, prompts=4, samples=4, tasks=64)
SPEC = RunSpec(data_dir() / "models" / "qwen3-moe-tiny", seed=3, settings=SETTINGS)
LIMIT = 180.0  # a job takes seconds; the first one also waits for imports, a minute on a busy machine


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    with ray_running():
        yield


def _job(folder: Path, *mishaps: Mishap, report: Report | None = None, **plan: Any) -> RoleRun:
    made = Job(SPEC, folder, RolePlan(**({"checkpoint_every": 4} | plan), mishaps=mishaps), report).run(LIMIT)
    assert not _alive(folder), "processes of the job are left"
    return made


def _alive(folder: Path) -> set[int]:
    pids = {event.info["pid"] for event in recovery.read_events(folder) if event.event == "start"}
    return gone(lambda: {pid for pid in pids if running(pid)}, 5)


def _kills(*kills: Mishap, marks: Any = ()) -> Any:
    return pytest.param(kills, marks=marks, id="+".join(f"{kill.member}-{kill.phase}" for kill in kills))


@pytest.fixture(scope="module")
def watched(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[RoleRun, Sockets]:
    """The undisturbed job, and who listened on which addresses while it ran."""
    seen: Sockets = {}

    def look(board: dict[str, Any]) -> None:
        if board["step"]:
            seen.update(listening(descendants(os.getpid())))

    found = _job(tmp_path_factory.mktemp("roles") / "undisturbed", report=look, standby=False, heartbeat=0.1)
    assert found.finished
    assert not found.ettr().outages
    return found, seen


@pytest.fixture(scope="module")
def undisturbed(watched: tuple[RoleRun, Sockets]) -> RoleRun:
    return watched[0]


@pytest.mark.job
def test_nobody_else_can_reach_a_job(watched: tuple[RoleRun, Sockets]) -> None:
    found, seen = watched
    members = {event.info["pid"] for event in recovery.read_events(found.folder) if event.event == "start"}
    assert len(members) == 4  # trainer, two rollouts, manager; each serves Ray's calls, rollouts serve weights, too
    assert members < seen.keys()
    assert len(seen) >= 8  # and Ray's own processes
    assert set().union(*seen.values()) <= {"127.0.0.1", "::1"}


def test_a_socket_that_others_can_reach_is_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert listening([os.getpid()])[os.getpid()] >= {"0.0.0.0", "127.0.0.1"}


@pytest.mark.job
def test_with_one_share_and_no_lag_the_job_is_the_labs_own_run(one_ray: None, tmp_path: Path) -> None:
    found = _job(tmp_path / "job", shares=1, lag=0, rollouts=1, standby=False)
    assert found.trace().equals(run(SPEC))


@pytest.mark.job
def test_a_trainer_a_rollout_and_the_manager_killed_change_nothing(undisturbed: RoleRun, tmp_path: Path) -> None:
    kills = (Mishap("trainer", 3, "update"), Mishap("rollout-1", 5, "generate"), Mishap("manager", 10, "serve"))
    found = _job(tmp_path / "job", *kills)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert found.task_restarts == []
    effective = found.ettr()
    assert [(item.role, item.kind) for item in effective.outages] == [
        ("trainer", "died"),
        ("rollout", "died"),
        ("manager", "died"),
    ]
    assert effective.steps == SETTINGS.steps
    assert effective.repeated == 0  # no finished step was done again


@pytest.mark.job
@pytest.mark.parametrize(
    "kills",
    [
        _kills(Mishap("trainer", 1, "wait"), Mishap("rollout-0", 3, "weights"), marks=pytest.mark.kill),
        _kills(Mishap("trainer", 4, "publish"), Mishap("rollout-0", 6, "deliver"), marks=pytest.mark.kill),
        _kills(Mishap("rollout-0", 0, "idle"), Mishap("rollout-1", 4, "generate"), Mishap("trainer", 10, "publish")),
    ],
)
def test_a_kill_in_any_phase_changes_nothing(kills: tuple[Mishap, ...], undisturbed: RoleRun, tmp_path: Path) -> None:
    found = _job(tmp_path / "job", *kills)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert found.task_restarts == []


@pytest.mark.job
@pytest.mark.kill
def test_what_hangs_is_noticed_by_its_role_and_replaced(undisturbed: RoleRun, tmp_path: Path) -> None:
    """A collective that never returns: the trainer's process lives and answers. A rollout hangs the same way."""
    hangs = (Mishap("trainer", 3, "update", "hang"), Mishap("rollout-0", 7, "generate", "hang"))
    found = _job(tmp_path / "job", *hangs, trainer_hang=3.0, rollout_hang=0.8, heartbeat=0.2)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert [(item.role, item.kind) for item in found.ettr().outages] == [("trainer", "hung"), ("rollout", "hung")]
    assert found.ettr().outages[0].detect - found.ettr().outages[0].fault > 3.0


@pytest.mark.job
@pytest.mark.kill
def test_a_trainer_that_takes_nothing_or_is_frozen_while_it_waits_is_replaced(
    undisturbed: RoleRun, tmp_path: Path
) -> None:
    """One hangs with all it waits for at hand, and answers; the next is stopped by a signal, and answers nothing."""
    frozen: list[int] = []

    def freeze(board: dict[str, Any]) -> None:
        trainer = board["members"].get("trainer", {})
        if board["step"] >= 6 and not frozen and trainer.get("phase") == "wait":
            os.kill(trainer["pid"], signal.SIGSTOP)
            events = [event for event in recovery.read_events(tmp_path / "job") if event.member == "trainer"]
            if events[-1].info.get("phase") == "wait":  # and it still does
                frozen.append(trainer["pid"])
            else:
                os.kill(trainer["pid"], signal.SIGCONT)

    slow = [Mishap(name, 4, "generate", "slow", 0.4) for name in RolePlan().rollout_names]  # so that it waits
    hang = Mishap("trainer", 3, "wait", "hang")
    found = _job(tmp_path / "job", hang, *slow, report=freeze, trainer_hang=3.0, heartbeat=0.1)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert found.task_restarts == []
    assert len(frozen) == 1
    outages = found.ettr().outages
    assert [(item.role, item.kind) for item in outages] == [("trainer", "hung"), ("trainer", "hung")]
    assert outages[1].detect - outages[1].fault > 2.5, "nobody logged when it was frozen; by its last sign of life"


@pytest.mark.job
@pytest.mark.kill
def test_a_trainer_that_hangs_while_it_recovers_is_noticed(undisturbed: RoleRun, tmp_path: Path) -> None:
    """A second fault before a step is done is one of the paper's cases for a restart of the whole task."""
    mishaps = (Mishap("trainer", 5, "update"), Mishap("trainer", 0, "recover", "hang"))
    found = _job(tmp_path / "job", *mishaps, trainer_hang=2.0, heartbeat=0.1)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert [item.whole_task for item in found.ettr().outages] == [False, True]


@pytest.mark.job
@pytest.mark.kill
@pytest.mark.parametrize(
    ("mishaps", "reason", "back"),
    [
        ((Mishap("trainer", 1, "update", "raise"),), "trainer raised in the first step", 0),
        ((Mishap("trainer", 6, "wait"), Mishap("trainer", 6, "update")), "a second fault in step 6", 4),
    ],
)
def test_the_task_restarts_from_disk_in_the_papers_cases(
    mishaps: tuple[Mishap, ...], reason: str, back: int, undisturbed: RoleRun, tmp_path: Path
) -> None:
    found = _job(tmp_path / "job", *mishaps)
    assert found.finished, found
    (restart,) = found.task_restarts
    assert reason in restart
    same = recovery.verify(undisturbed.folder, found.folder)
    assert same.equal
    assert same.repeats == ((back + 1,) if back else ())  # from the checkpoint after step 4


@pytest.mark.job
def test_kills_at_any_time_from_outside_change_nothing(undisturbed: RoleRun, tmp_path: Path) -> None:
    any_time = random.Random(time.time_ns())  # the same in no two runs, on purpose: nothing compared depends on it
    job = Job(SPEC, tmp_path / "job", RolePlan(checkpoint_every=4))

    def strike() -> None:
        for member, step in (("rollout-0", 2), ("trainer", 5), ("rollout-1", 8)):
            while job.board()["step"] < step - 1 and not job.ended:
                time.sleep(0.01)
            time.sleep(any_time.uniform(0, 0.4))
            if not job.ended:
                with contextlib.suppress(RecoveryError):  # being replaced just now
                    job.kill(member)

    thread = threading.Thread(target=strike)
    thread.start()
    found = job.run(LIMIT)
    thread.join(10)
    assert found.finished, found
    assert recovery.verify(undisturbed.folder, found.folder).equal


@pytest.mark.job
@pytest.mark.kill
def test_a_bad_checkpoint_a_full_disk_and_a_slow_rollout_change_nothing(undisturbed: RoleRun, tmp_path: Path) -> None:
    """The checkpoint after step 4 is damaged, that after 6 finds no room; then the task has to go back to step 2."""
    mishaps = (
        machine_fault("slow_rank").mishap(2),
        machine_fault("corrupted_checkpoint").mishap(4),
        machine_fault("disk_full").mishap(6),
        Mishap("trainer", 7, "wait"),
        Mishap("trainer", 7, "update"),
    )
    found = _job(tmp_path / "job", *mishaps, checkpoint_every=2)
    assert found.finished, found
    same = recovery.verify(undisturbed.folder, found.folder)
    assert same.equal
    assert same.repeats == (3, 4, 5, 6)
    events = recovery.read_events(found.folder)
    (restart,) = [event for event in events if event.event == "task_restart"]
    assert restart.info["skipped"] == ["state-000004.pt: its checksum is wrong"]
    (full,) = [event for event in events if event.event == "checkpoint" and event.info["problem"]]
    assert (full.step, "File too large" in full.info["problem"]) == (6, True)


@pytest.mark.job
@pytest.mark.kill
@pytest.mark.parametrize("kind", ["corrupted_checkpoint", "disk_full"])
def test_the_last_checkpoint_is_written_again_from_memory(kind: str, undisturbed: RoleRun, tmp_path: Path) -> None:
    found = _job(tmp_path / "job", machine_fault(kind).mishap(SETTINGS.steps))
    assert (found.outcome, found.finished, found.step) == ("finished", True, SETTINGS.steps)
    assert recovery.verify(undisturbed.folder, found.folder).equal
    assert found.trace().equals(undisturbed.trace())
    assert SETTINGS.steps in Checkpoints(found.folder / "checkpoints").whole()
    first, again = [e for e in recovery.read_events(found.folder) if (e.event, e.step) == ("checkpoint", 10)]
    assert bool(first.info["problem"]) == (kind == "disk_full")
    assert (again.role, again.info["again"], again.info["problem"]) == ("job", True, "")


@pytest.mark.job
@pytest.mark.kill
def test_a_job_whose_last_state_cannot_be_kept_says_so(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RecoveryError("could not be written (No space left on device)")

    monkeypatch.setattr(Checkpoints, "save", full)  # in this process: the trainer has its own
    found = _job(tmp_path / "job", machine_fault("disk_full").mishap(SETTINGS.steps))
    assert not found.finished
    assert found.step == found.state()["step"] == 8
    words = "finished training, but the state after step 10 is nowhere on disk: could not be written (No space left"
    assert found.outcome.startswith(words)
    assert "the newest checkpoint is that after step 8" in found.outcome
    assert words in repr(found)


@pytest.mark.job
def test_a_job_that_cannot_go_on_ends_with_a_verdict_and_a_checkpoint(one_ray: None, tmp_path: Path) -> None:
    twice = [Mishap("trainer", 6, "wait"), Mishap("trainer", 6, "update")]
    found = _job(tmp_path / "job", *twice, max_task_restarts=0)
    assert not found.finished
    assert "second fault in step 6" in found.outcome
    assert "the newest checkpoint is that after step 4" in found.outcome
    assert found.state()["step"] == 4
    assert len(found.trace().steps) == 4


@pytest.mark.job
@pytest.mark.kill
def test_the_verdict_has_the_exception_that_ended_the_job(one_ray: None, tmp_path: Path) -> None:
    found = _job(tmp_path / "job", Mishap("trainer", 1, "update", "raise"), max_task_restarts=0)
    assert "trainer raised in the first step" in found.outcome
    assert "RuntimeError: made to fail in step 1, phase update; there is no checkpoint" in found.outcome


@pytest.mark.job
@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.kill), "interrupt"])
def test_a_job_that_is_stopped_or_whose_cell_is_interrupted_leaves_no_process(
    how: str, one_ray: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heard))
    long = replace(SPEC, settings=replace(SETTINGS, steps=200, tasks=800))
    job, before = Job(long, tmp_path / "job", RolePlan(standby=False)), descendants(os.getpid())
    end = threading.Timer(3.0, job.stop if how == "stop" else lambda: os.kill(os.getpid(), signal.SIGINT))
    end.start()
    if how == "stop":
        assert job.run(LIMIT).outcome == "stopped"
    else:
        with pytest.raises(KeyboardInterrupt):
            job.run(LIMIT)
        (ended,) = [event for event in recovery.read_events(tmp_path / "job") if event.event == "job_end"]
        assert ended.info["outcome"] == "interrupted"
    assert not _alive(tmp_path / "job")
    assert not gone(lambda: descendants(os.getpid()) - before, 20)  # those that were starting, too
    with pytest.raises(RecoveryError, match="not up"):
        job.kill("trainer")


def test_what_cannot_be_made_in_roles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="training faults"):
        Job(replace(SPEC, injection=Injection("kl_sign", 1.0, 2)), tmp_path / "a")
    with pytest.raises(RecoveryError, match="4 prompts cannot be shared out into 3"):
        Job(SPEC, tmp_path / "b", RolePlan(shares=3))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("keep")
    with pytest.raises(RecoveryError, match="not empty"):
        Job(SPEC, tmp_path / "c")
    with pytest.raises(RecoveryError, match="no job in roles"):
        RoleRun.load(tmp_path / "c")
    for unusable in (tmp_path / "c" / "mine.txt", tmp_path / "c" / "mine.txt" / "below"):
        with pytest.raises(RecoveryError, match=r"no folder for a job \((File exists|Not a directory)\)"):
            Job(SPEC, unusable)
        with pytest.raises(RecoveryError, match="no folder for a job"):
            start_job(SPEC, unusable)
    with pytest.raises(RecoveryError, match="no such directory"):
        Job(replace(SPEC, model=tmp_path / "none"), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_without_ray_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "find_spec", lambda _: None)
    with pytest.raises(RecoveryError, match=r"ray is not installed.*pip install 'moeproxy\[recovery\]'"), ray_running():
        pass
