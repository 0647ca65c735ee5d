"""Results in JSON files: what is read is what was written, and nothing else passes for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.errors import RecoveryError
from moeproxy.recovery.saved import save_json, saved_json


def test_fields_come_back_without_format_and_provenance(tmp_path: Path) -> None:
    path = save_json(tmp_path / "deep" / "a.json", "some.form", {"x": 1, "y": [2.5, None]})
    assert {"format", "x", "y", "provenance"} == set(json.loads(path.read_text("utf-8")))
    with saved_json(path, "some.form", "thing") as fields:
        assert fields == {"x": 1, "y": [2.5, None]}


def test_another_file_is_refused_and_so_is_what_the_reader_stumbles_over(tmp_path: Path) -> None:
    path = save_json(tmp_path / "a.json", "some.form", {"x": 1})
    with (
        pytest.raises(RecoveryError, match=r"a\.json: no saved thing \(another format\)"),
        saved_json(path, "b", "thing"),
    ):
        pass
    with pytest.raises(RecoveryError, match="no saved thing"), saved_json(path, "some.form", "thing") as fields:
        _ = fields["absent"]
    for text in ("", "[]", '{"format": "some.form"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RecoveryError, match="no saved thing"), saved_json(path, "some.form", "thing"):
            pass
    with pytest.raises(RecoveryError, match="no saved thing"), saved_json(tmp_path / "absent", "some.form", "thing"):
        pass


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecoveryError, match=r"a\.json: the file cannot be written.*What to do: choose another place"):
        save_json(tmp_path / "file" / "a.json", "some.form", {"x": 1})
    assert (tmp_path / "file").read_text() == "mine"
