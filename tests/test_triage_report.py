"""`python -m moeproxy triage LOG --report DIR`: the verdict as without it, and a report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.__main__ import main
from tests.view import postmortems

LOG = str(postmortems.shipped("trainer_state.json"))


def test_the_report_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("The pager rang.\n")
    (tmp_path / "actions.csv").write_text("step,kind,text\n15,stopped,ended it\n")
    remedy = postmortems.remedy().save(tmp_path / "remedy.json")
    assert main(["triage", LOG]) == 1
    plain = capsys.readouterr().out
    command = ["triage", LOG, "--report", str(tmp_path / "r"), "--no-images", "--title", "NaN", "--authors", "A"]
    files = ["--notes", str(tmp_path / "notes.txt"), "--actions", str(tmp_path / "actions.csv"), "--with", str(remedy)]
    assert main([*command, *files]) == 1
    assert capsys.readouterr().out == f"{plain}report: {tmp_path / 'r' / 'index.html'}\n"
    data = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (data["title"], data["authors"], data["notes"]) == ("NaN", "A", ["The pager rang.\n"])
    assert data["incidents"][0]["attempts"][0]["diagnosis"]["causes"][0]["fault"] == "nan_poison"
    assert data["actions"][0]["step"] == 15
    assert data["remedies"][0]["cause"] == "gradient_overflow"
    assert "No images" not in data["images"]


def test_json_stays_json_and_an_edited_report_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["triage", LOG, "--report", str(tmp_path), "--no-images", "--json"]
    assert main(command) == 1
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "alarm"
    (tmp_path / "report.md").write_text("edited")
    assert main(command) == 1  # the verdict does not go with the report
    said = capsys.readouterr()
    assert "the report was not written" in said.err
    assert "would be lost" in said.err
    assert json.loads(said.out)[0]["verdict"] == "alarm"
    assert (tmp_path / "report.md").read_text() == "edited"


def test_words_without_a_report_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triage", LOG, "--title", "x", "--with", "y"]) == 2
    assert "--title, --with without --report" in capsys.readouterr().err
