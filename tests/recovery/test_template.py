"""Copies of a process that has imported everything: they are what was asked for, and none outlives its owner."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moeproxy.recovery.fork_client import VARIABLE
from moeproxy.recovery.template import CLIENT, Template
from tests.recovery.processes import descendants, gone, running, stats

TELL = """
import json, os, sys
before = "colorsys" in sys.modules
print(json.dumps({"before": before, "argv": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "main": __name__,
                  "own": os.environ.get("OWN"), "path": sys.path[0], "templates": os.environ.get("OF_TEMPLATE")}))
"""
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
OWNER = """
import os, subprocess, sys
from moeproxy.recovery.template import CLIENT, Template
template = Template(["json"])
template.start({"RAY_RAYLET_PID": sys.argv[2]})
subprocess.run([sys.executable, CLIENT, sys.argv[1]], env=os.environ | template.variables)
print(template.pid, flush=True)
sys.stdin.read()
"""


def _told(template: Template, script: Path, folder: Path) -> dict:
    given = {**os.environ, **template.variables, "OWN": "mine"}
    given.pop("OF_TEMPLATE", None)
    command = [sys.executable, str(CLIENT), str(script), "--first", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=given, timeout=60, check=True)
    return json.loads(done.stdout)


def test_a_copy_has_what_the_program_was_given_and_the_templates_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    monkeypatch.setenv("OF_TEMPLATE", "yes")
    with Template(["colorsys", "no_such_module"]) as template:
        template.start()
        with socket.socket(socket.AF_UNIX) as broken:  # a program that died while it asked
            broken.connect(template.variables[VARIABLE].rpartition(":")[0])
            broken.sendall(b"\0{")
        told, pid = _told(template, script, tmp_path), template.pid
    assert told == {
        "before": True,
        "argv": [str(script), "--first", "a b"],
        "folder": str(tmp_path),
        "parent": pid,
        "main": "__main__",
        "own": "mine",
        "path": str(tmp_path),
        "templates": None,
    }
    told = _told(template, script, tmp_path)  # it is gone: the command is an ordinary Python
    assert (told["before"], told["parent"], told["argv"][1:]) == (False, os.getpid(), ["--first", "a b"])


def test_copies_end_with_the_template(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    with Template(["json"]) as template:
        template.start()
        command = [sys.executable, str(CLIENT), str(tmp_path / "wait.py")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **template.variables}) as asked:
            assert asked.stdout is not None
            copy = int(asked.stdout.readline())
            assert copy in descendants(template.pid)
            template.close()
    assert not gone(lambda: {pid for pid in (copy, template.pid) if running(pid)}, 5)


def test_a_copy_that_would_belong_to_another_ray_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("")  # in place of the real one, for which two seconds are not needed here
    (tmp_path / "tell.py").write_text(TELL)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for given, before in (({}, True), ({"RAY_JOB_ID": "01000000"}, False)):
        with Template(["colorsys", "ray"]) as template:
            template.start({"PYTHONPATH": path, **given})
            assert _told(template, tmp_path / "tell.py", tmp_path)["before"] == before


def test_when_its_owner_is_killed_the_template_ends_and_all_copies_and_rays_agents(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    raylet = subprocess.Popen(["sh", "-c", "sleep 600; exit 7"])  # not the owner's; its child is an agent
    assert not gone(lambda: {raylet.pid} - _parents(), 5)
    command = [sys.executable, "-c", OWNER, str(tmp_path / "wait.py"), str(raylet.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = {int(owner.stdout.readline()), int(owner.stdout.readline())}
        assert pids < descendants(owner.pid)
        owner.kill()
    assert not gone(lambda: {pid for pid in pids if running(pid)}, 5)
    assert raylet.wait(5) == 7


def _parents() -> set[int]:
    return {parent for _, _, parent, _ in stats()}
