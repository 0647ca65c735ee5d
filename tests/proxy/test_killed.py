"""kill -9 at any point of a build: the directory is complete or absent, and the next attempt succeeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

# A child is forked for every point, so that torch is imported once. Points are the system's own events (files
# opened, directories made, renames), the first after the imports, and every chunk of bytes written.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build
from tests.proxy.made_up import plan_for

root = Path(sys.argv[1])
checkpoint = Checkpoint.open(root / "source")
plan = plan_for(checkpoint, 4)
build(checkpoint, plan, root / "reference")

def contents(folder):
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}

def attempt(point, folder):
    seen = 0
    def count(*_):
        nonlocal seen
        seen += 1
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(lambda event, _: count() if event.split(".")[0] in ("open", "os", "shutil") else None)
    build(checkpoint, plan, folder / "proxy", progress=count)

def killed(point, folder):
    child = os.fork()
    if not child:
        attempt(point, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

expected, states, point = contents(root / "reference"), [], 1
while True:
    folder = root / str(point)
    folder.mkdir()
    was_killed = killed(point, folder)
    finished = (folder / "proxy").exists()
    if finished:
        assert contents(folder / "proxy") == expected, f"killed at {point}: a half-written proxy looks finished"
    else:
        build(checkpoint, plan, folder / "proxy")
        assert contents(folder / "proxy") == expected
        assert [f.name for f in folder.iterdir()] == ["proxy"], f"killed at {point}: something is left"
    states.append((was_killed, finished))
    if not was_killed:
        break
    point += 1
print(json.dumps(states))
"""


@pytest.mark.slow
def test_killed_at_any_point(tmp_path: Path) -> None:
    tiny.write(tmp_path / "source", max_shard_size="60KB")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    killed = [finished for was_killed, finished in states if was_killed]
    assert len(killed) > 50, "the points must cover the whole build"
    assert killed == sorted(killed), "absent up to the rename, complete after it"
    assert states[-1] == [False, True], "not killed at last"
    assert not all(killed)
