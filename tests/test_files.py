"""Files and directories appear complete or not at all, and carry their provenance."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moeproxy.files import atomic_dir, atomic_file, provenance, sha256_file

# Stops the interpreter in the middle of a write, as a kill or a power cut does: no clean-up code runs.
CRASH = """
import os, sys
from moeproxy.files import atomic_dir, atomic_file
kind, target = sys.argv[1:]
with (atomic_file if kind == "file" else atomic_dir)(target) as path:
    (path if kind == "file" else path / "half").write_text("half")
    os._exit(9)
"""


class _Interrupted(Exception):
    pass


def _crash(kind: str, target: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, kind, str(target)], check=False, timeout=60)
    assert done.returncode == 9


def test_file_appears_complete_with_its_suffix(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.npz"
    with atomic_file(target) as path:
        assert path.suffix == ".npz"
        assert path.parent == target.parent
        path.write_bytes(b"all")
        assert not target.exists()
    assert target.read_bytes() == b"all"
    assert [p.name for p in target.parent.iterdir()] == ["a.npz"]


def test_exception_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(_Interrupted), atomic_file(target) as path:  # noqa: PT012 - the write is the test
        path.write_text("half")
        raise _Interrupted
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_crash_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    _crash("file", target)
    assert target.read_text() == "old"
    # A later write still works, whatever the crash left behind.
    with atomic_file(target) as path:
        path.write_text("new")
    assert target.read_text() == "new"


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    old = os.umask(0o027)
    try:
        with atomic_file(target) as path:
            path.write_text("x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_dir_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    with atomic_dir(target) as path:
        (path / "sub").mkdir()
        (path / "sub" / "weights").write_bytes(b"all")
        assert not target.exists()
    assert (target / "sub" / "weights").read_bytes() == b"all"
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_dir_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(_Interrupted), atomic_dir(tmp_path / "model") as path:  # noqa: PT012
        (path / "half").write_text("half")
        raise _Interrupted
    assert list(tmp_path.iterdir()) == []


def test_dir_crash_never_looks_finished(tmp_path: Path) -> None:
    target = tmp_path / "model"
    _crash("dir", target)
    assert not target.exists()
    with atomic_dir(target) as path:
        (path / "whole").write_text("whole")
    assert (target / "whole").read_text() == "whole"


def test_dir_refuses_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    with pytest.raises(FileExistsError), atomic_dir(tmp_path / "model"):
        pass
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_dir_made_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="model"), atomic_dir(target) as path:  # noqa: PT012
        (path / "ours").write_text("ours")
        target.mkdir()
        (target / "theirs").write_text("theirs")
    assert [p.name for p in target.iterdir()] == ["theirs"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x00" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"\x00" * 100_000).hexdigest()


def test_provenance_names_versions_and_extras_and_is_json() -> None:
    found = provenance(seed=3, fingerprint="ab")
    assert json.loads(json.dumps(found)) == found
    assert (found["seed"], found["fingerprint"]) == (3, "ab")
    assert {"moeproxy", "torch", "numpy"} <= set(found["versions"])  # type: ignore[arg-type]
    assert str(found["created"]).endswith("Z")


def test_what_a_killed_process_left_is_removed_by_the_next_attempt(tmp_path: Path) -> None:
    code = (
        "import os, sys; from moeproxy.files import atomic_dir\n"
        "with atomic_dir(sys.argv[1]) as path:\n (path / 'half').write_text('x'); os.kill(os.getpid(), 9)"
    )
    target = tmp_path / "proxy [1]"
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert len(list(tmp_path.iterdir())) == 1, "killed: its temporary directory is left"
    with atomic_dir(target) as path, atomic_dir(tmp_path / "proxy [1]x"):
        (path / "whole").write_text("x")
        left = [item.name for item in tmp_path.iterdir()]
        assert len(left) == 2, "the one under way stays, so does another target's"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["proxy [1]", "proxy [1]x"]
