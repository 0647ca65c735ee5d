"""A job's temporary files go with it, also when it is killed, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from moeproxy.recovery import scratch as module
from moeproxy.recovery.scratch import remove_left, remove_owned, remove_ownerless, scratch
from moeproxy.recovery.template import Template
from tests.recovery.processes import gone, running

HOLD = """
import sys
from moeproxy.recovery.scratch import scratch
with scratch() as folder:
    (folder / "below").mkdir()
    (folder / "below" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""
WRITE = """
import contextlib, pathlib
folder = pathlib.Path(input())
print("writes", flush=True)
while True:
    with contextlib.suppress(OSError):
        (folder / "ray").mkdir(exist_ok=True)
        (folder / "ray" / "log").write_text("x")
"""
OWN = """
import sys
from moeproxy.recovery.template import Template
template = Template(["json"])
template.start()
print(template.folder, template.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_above", lambda: tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _holder(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _said(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().decode().split()


def test_a_folder_is_this_users_alone_and_is_gone_afterwards(above: Path) -> None:
    def interrupted() -> None:
        with scratch() as folder:
            assert folder.parent == above
            assert folder.stat().st_mode & 0o077 == 0
            (folder / "ray" / "session").mkdir(parents=True)
            (folder / "ray" / "latest").symlink_to(folder / "ray" / "session")
            (folder / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(above.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_and_what_others_use_stays(above: Path) -> None:
    (above / "moeproxy-mine").mkdir()  # no lock: nobody knows whose
    (above / "moeproxy-file").write_text("mine")
    others = {"moeproxy-mine", "moeproxy-file"}
    with _holder(HOLD) as killed, _holder(HOLD) as living:
        (left,), (used,) = _said(killed), _said(living)
        for folder in (left, used):  # they were made in the usual place
            Path(folder).rename(above / Path(folder).name)
        left, used = (above / Path(folder).name for folder in (left, used))
        killed.kill()
        killed.wait()
        with scratch() as folder:
            assert not left.exists()
            assert (used / "below" / "file").read_text() == "x"
            remove_left()
            assert {place.name for place in above.iterdir()} == others | {folder.name, used.name}
        living.kill()
        living.wait()
    remove_left()
    assert {place.name for place in above.iterdir()} == others


def test_a_process_that_ends_at_once_removes_its_own(above: Path) -> None:
    with scratch() as first, scratch() as second:
        remove_ownerless(first)
        assert first.exists()
        remove_owned()
        assert not first.exists()
        assert not second.exists()
    assert list(above.iterdir()) == []


def test_what_cannot_be_removed_keeps_its_lock_for_the_next(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch() as folder:
        (folder / "busy").mkdir()
        (folder / "busy" / "file").write_text("x")
        with monkeypatch.context() as changed:
            changed.setattr(module.shutil, "rmtree", lambda *_, **__: None)
            remove_owned()
        assert {place.name for place in folder.iterdir()} == {"busy", "in-use"}
    assert list(above.iterdir()) == []


def test_the_template_of_a_killed_program_removes_the_programs_files() -> None:
    with _holder(OWN) as owner:
        folder, pid = _said(owner)
        assert Path(folder, "in-use").exists()
        owner.kill()
        owner.wait()
    assert not gone(lambda: {int(pid)} if running(int(pid)) else set(), 10)
    assert not Path(folder).exists()


def test_a_folder_that_is_still_written_to_or_owned_goes_within_the_patience(above: Path) -> None:
    with _holder(HOLD) as dying, _holder(WRITE) as writing:
        (folder,) = _said(dying)
        Path(folder).rename(above / Path(folder).name)
        place = above / Path(folder).name
        assert writing.stdin is not None
        writing.stdin.write(f"{place}\n".encode())
        writing.stdin.flush()
        _said(writing)
        threading.Timer(0.5, dying.kill).start()
        threading.Timer(1.5, writing.kill).start()
        remove_ownerless(place, 0.1)
        assert place.exists()
        remove_ownerless(place, 10)
        assert not place.exists()
        assert writing.wait() != 0


def test_what_is_started_for_a_job_has_its_temporary_files_there(above: Path) -> None:
    with Template(["json"]) as template:
        template.start()
        asked = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
        told = subprocess.check_output(asked, env={**os.environ, **template.variables}, text=True)
        assert Path(told.strip()) == template.folder
        assert template.folder.parent == above
    assert list(above.iterdir()) == []


@pytest.mark.parametrize(("usual", "expected"), [("/tmp", "/tmp"), ("/var/tmp", "/var/tmp"), ("/" + "a" * 40, "/tmp")])
def test_the_names_of_rays_sockets_are_short_enough(
    usual: str, expected: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", usual)
    above = module._above()
    assert str(above) == expected
    session = "ray/session_2026-12-01_05-12-42_604513_4194304/sockets/plasma_store"
    assert len(str(above / "moeproxy-abcdefgh" / session)) <= 107
