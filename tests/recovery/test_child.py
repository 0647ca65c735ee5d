"""A job of a notebook ends with it, and nothing of its session is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.places import data_dir
from moeproxy.recovery import read_events
from moeproxy.recovery.child import start_job, sweep
from tests.recovery.processes import gone, in_session

SPEC = RunSpec(
    data_dir() / "models" / "qwen3-moe-tiny", settings=GRPOSettings(steps=200, prompts=4, samples=4, tasks=800)
)


def test_what_is_left_of_a_session_is_swept() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True)
    deadline = time.monotonic() + 10
    while len(in_session(child.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(sweep(child.pid)) == 3
    child.wait(10)
    assert not gone(lambda: in_session(child.pid), 10)
    assert os.getpid() not in sweep(os.getsid(0) if os.getsid(0) == os.getpid() else child.pid)


def test_what_cannot_be_started_is_refused_before_a_process_is(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    wrong = RunSpec(SPEC.model, settings=SPEC.settings, injection=Injection("kl_sign", 1.0, 2))
    with pytest.raises(RecoveryError, match="training faults"):
        start_job(wrong, tmp_path / "job")
    assert not list(tmp_path.iterdir())


OWNER = """
import sys, time
from tests.recovery.test_child import Path, SPEC, start_job
job = start_job(SPEC, Path(sys.argv[1]))
print(job._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.job
@pytest.mark.kill
@pytest.mark.parametrize("victim", ["the program", "the job's own process"])
def test_a_kill_takes_all_processes_of_a_job_with_it(victim: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    command, root = [sys.executable, "-c", OWNER, str(tmp_path / "job")], Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as program:
        assert program.stdout is not None
        session = int(program.stdout.readline())
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not _stepped(tmp_path / "job"):
            time.sleep(0.1)
        assert len(in_session(session)) > 8  # trainer, standby, two rollouts, manager, and Ray's own
        (temporary,) = _temporary(in_session(session))
        assert temporary.is_dir()
        if victim == "the program":
            program.kill()
        else:
            os.kill(session, signal.SIGKILL)
        left = gone(lambda: in_session(session), 20)
        program.kill()
    assert not left
    assert not temporary.exists()


def _temporary(pids: set[int]) -> set[Path]:
    """Return where processes were told to put temporary files, of those that the job itself made."""
    given: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            given |= set(Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0"))
    return {Path(line[7:]) for line in given if line.startswith("TMPDIR=") and "moeproxy-" in line}


def _stepped(folder: Path) -> bool:
    try:
        return any(event.event == "step_commit" for event in read_events(folder))
    except RecoveryError:
        return False
