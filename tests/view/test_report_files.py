"""A report's folder: complete or refused, and nothing of somebody else's is ever lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.view.report_files import LIST, check_folder, write_files

FIRST = {"index.html": b"one", "figures/1.svg": b"<svg/>", "figures/2.svg": b"<svg />"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "r", FIRST)
    return tmp_path / "r"


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_files_and_their_list_are_written(folder: Path) -> None:
    assert _names(folder) == {*FIRST, LIST}
    assert (folder / "index.html").read_bytes() == b"one"
    assert set(json.loads((folder / LIST).read_text())["files"]) == set(FIRST)


def test_an_unchanged_report_is_replaced_and_other_files_stay(folder: Path) -> None:
    (folder / "mine.txt").write_text("mine")
    write_files(folder, {"index.html": b"two", "figures/1.svg": b"<svg/>"})
    assert (folder / "index.html").read_bytes() == b"two"
    assert _names(folder) == {"index.html", "figures/1.svg", "mine.txt", LIST}, "what it no longer has is removed"


def test_an_edited_file_is_never_overwritten(folder: Path) -> None:
    (folder / "figures/1.svg").write_text("edited by hand")
    with pytest.raises(MoeproxyError, match=r"1\.svg: the file is there and was changed after it was written"):
        write_files(folder, {"index.html": b"two", "figures/1.svg": b"new"})
    assert (folder / "figures/1.svg").read_text() == "edited by hand"
    assert (folder / "index.html").read_bytes() == b"one", "all or nothing"
    # Where the new report has no such file, the edited one stays beside it.
    write_files(folder, {"index.html": b"two"})
    assert (folder / "figures/1.svg").read_text() == "edited by hand"
    assert not (folder / "figures/2.svg").exists()


def test_somebody_elses_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("my page")
    with pytest.raises(MoeproxyError, match="is not of a report"):
        check_folder(tmp_path, ("index.html",))
    with pytest.raises(MoeproxyError, match="is not of a report"):
        write_files(tmp_path, FIRST)
    assert _names(tmp_path) == {"index.html"}
    other = tmp_path / "other"
    other.mkdir()
    (other / LIST).write_text('{"files": 3}')
    with pytest.raises(MoeproxyError, match="not the list of a report's files"):
        write_files(other, FIRST)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "index.html").symlink_to(tmp_path / "index.html")
    with pytest.raises(MoeproxyError, match="is not of a report"):
        write_files(linked, FIRST)
    assert (tmp_path / "index.html").read_text() == "my page"


def test_a_report_that_was_cut_short_can_be_written_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moeproxy.view import report_files

    written = report_files._write

    def fail(path: Path, content: bytes) -> None:
        if path.name == "2.svg":
            raise OSError(28, "No space left on device")
        written(path, content)

    new = {"index.html": b"two", "figures/1.svg": b"2", "figures/2.svg": b"2"}
    with monkeypatch.context() as patch:
        patch.setattr(report_files, "_write", fail)
        with pytest.raises(MoeproxyError, match="No space left on device"):
            write_files(folder, new)
    assert (folder / "index.html").read_bytes() == b"two", "the first file is new, the last is old"
    write_files(folder, new)
    assert (folder / "figures/2.svg").read_bytes() == b"2"


def test_a_report_of_before_there_was_a_list_is_known(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"format": "moeproxy.report", "version": 1}')
    (tmp_path / "index.html").write_text("old page")
    write_files(tmp_path, {"index.html": b"new", "report.json": b"{}"})
    assert (tmp_path / "index.html").read_bytes() == b"new"


def test_a_list_that_names_files_elsewhere_removes_nothing(tmp_path: Path) -> None:
    import hashlib

    (tmp_path / "mine").write_bytes(b"x")
    inside = tmp_path / "r"
    write_files(inside, FIRST)
    stored = json.loads((inside / LIST).read_text())
    stored["files"]["../mine"] = [hashlib.sha256(b"x").hexdigest()]
    (inside / LIST).write_text(json.dumps(stored))
    write_files(inside, FIRST)
    assert (tmp_path / "mine").read_bytes() == b"x"
