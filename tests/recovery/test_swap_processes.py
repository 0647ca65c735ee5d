"""Processes of a job are found by the mark that they and their children bear."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moeproxy.recovery.swap_processes import Processes, _mark, marked

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
