"""Processes of a job are found by the mark that they and their children bear."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeproxy.places import data_dir
from moeproxy.recovery import hotswap, read_events
from moeproxy.recovery.hotswap import SwapPlan, hot_swap
from moeproxy.recovery.swap_processes import Processes, _mark, marked
from moeproxy.recovery.swap_watch import Watch

_PARENT = """
import os, subprocess, sys, time
from pathlib import Path
Path("/proc/self/comm").write_text(sys.argv[1])
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print("there", flush=True)
time.sleep(60)
"""

_SERVE = """
import multiprocessing, tempfile, time
def serve(folder, name):
    kept = multiprocessing.get_context("spawn").Semaphore()
    (folder / "said.tmp").write_text(f"{kept._semlock.name} {tempfile.gettempdir()}")
    (folder / "said.tmp").rename(folder / "said")
    time.sleep(60)
"""
_PROGRAM = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import resource_tracker
from pathlib import Path
from moeproxy.recovery.swap_processes import _be
folder = Path(sys.argv[1])
tempfile.gettempdir()  # the server may have asked for it, before it forks
resource_tracker.ensure_running()
ours, theirs = multiprocessing.Pipe()
if (member := os.fork()) == 0:
    ours.close()
    _be("served", folder, "trainer-0", {**os.environ, "TMPDIR": str(folder)}, theirs)
deadline = time.monotonic() + 20
while not (folder / "said").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
semaphore, temporary = (folder / "said").read_text().split()
place = Path("/dev/shm", f"sem.{semaphore.strip('/')}")
before = place.exists()
os.kill(member, signal.SIGKILL)
os.waitpid(member, 0)
while place.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
print(before, place.exists(), temporary)
"""


def test_what_bears_the_mark_is_found_and_ended_with_the_job(tmp_path: Path) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    assert len(_mark(folder)) == 15  # more the system cuts off
    assert _mark(folder) != _mark(other)
    command = [sys.executable, "-c", _PARENT, _mark(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"there\n"
        found = marked(folder)
        assert len(found) == 2  # also the child with a session of its own
        assert parent.pid in found
        assert marked(other) == []
        Processes(other, "none", ()).__exit__()
        assert marked(folder) == found
        Processes(folder, "none", ()).__exit__()
        assert marked(folder) == []
        assert parent.wait() == -9


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux keeps semaphores there")
def test_what_a_killed_member_leaves_in_the_system_goes_at_once_and_the_program_hears_nothing(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(_SERVE)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    path = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=path, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False", str(tmp_path)]
    assert "leaked" not in done.stderr
    assert "1 leaked semaphore" in (tmp_path / "trainer-0.log").read_text()


def test_what_an_interrupted_start_has_started_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        exitcode = None
        ended = 0

        def kill(self) -> None:
            Started.ended += 1

        def join(self) -> None: ...

    def start(self: Processes, name: str) -> None:
        if name == "b":
            raise KeyboardInterrupt
        self._running[name] = Started()

    monkeypatch.setattr(Processes, "start", start)
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path, "none", ("a", "b")):
        pytest.fail("it was not started")
    assert Started.ended == 2  # the lighthouse, and a


def test_who_gives_no_sign_of_life_is_frozen(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    processes = Processes(tmp_path, "none", ())
    for name, code in (("a", None), ("b", -9)):
        processes._running[name], processes._pipes[name] = SimpleNamespace(exitcode=code), ours
        processes._heard[name] = time.monotonic() - 5
    assert processes.frozen(10) == []
    assert processes.frozen(4) == ["a"]  # b has ended
    theirs.send(None)
    assert processes.frozen(4) == []
    theirs.close()
    assert processes.frozen(4) == []


def test_a_swap_that_is_interrupted_says_so_in_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hotswap, "find_spec", lambda _: "installed")
    monkeypatch.setattr(hotswap, "Processes", lambda *_: Processes(tmp_path, "none", ()))
    monkeypatch.setattr(Processes, "start", lambda *_: None)
    monkeypatch.setattr(Watch, "outcome", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hot_swap(SwapPlan(data_dir() / "models" / "qwen3-moe-tiny"), tmp_path / "out")
    last = read_events(tmp_path / "out")[-1]
    assert (last.event, last.info["outcome"]) == ("job_end", "interrupted")
