"""A job of a notebook ends with it, and nothing of its session is left."""

from __future__ import annotations

import os
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

SPEC = RunSpec(
    data_dir() / "models" / "qwen3-moe-tiny", settings=GRPOSettings(steps=200, prompts=4, samples=4, tasks=800)
)


def _in_session(session: int) -> set[int]:
    found = set()
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(place.parent.name))
    return found


def test_what_is_left_of_a_session_is_swept() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True)
    deadline = time.monotonic() + 10
    while len(_in_session(child.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(sweep(child.pid)) == 3
    child.wait(10)
    deadline = time.monotonic() + 10
    while _in_session(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _in_session(child.pid)
    assert os.getpid() not in sweep(os.getsid(0) if os.getsid(0) == os.getpid() else child.pid)


def test_what_cannot_be_started_is_refused_before_a_process_is(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    wrong = RunSpec(SPEC.model, settings=SPEC.settings, injection=Injection("kl_sign", 1.0, 2))
    with pytest.raises(RecoveryError, match="training faults"):
        start_job(wrong, tmp_path / "job")
    assert not list(tmp_path.iterdir())


@pytest.mark.kill
def test_a_program_that_is_killed_takes_its_job_with_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    code = (
        "import sys, time; from pathlib import Path; from tests.recovery.test_child import SPEC, start_job\n"
        f"job = start_job(SPEC, {str(tmp_path / 'job')!r}); print(job._process.pid, flush=True); time.sleep(600)"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert program.stdout is not None
    with program.stdout as output:
        session = int(output.readline())
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not _stepped(tmp_path / "job"):
        time.sleep(0.2)
    assert len(_in_session(session)) > 5
    program.kill()
    program.wait(10)
    deadline = time.monotonic() + 40
    while (left := _in_session(session)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _stepped(folder: Path) -> bool:
    try:
        return any(event.event == "step_commit" for event in read_events(folder))
    except RecoveryError:
        return False
