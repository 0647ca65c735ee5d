"""Verdicts on logs for the terminal: every attempt of a resumed run counts, and text, JSON and exit code agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moeproxy.__main__ import main
from moeproxy.errors import ComparisonError
from moeproxy.places import data_dir
from moeproxy.traces.reading import read
from moeproxy.triage.attempted import judge_attempts, leading
from moeproxy.triage.logs import LEARNED, example_notes, exit_code, judge_log
from moeproxy.view.incident import open_incidents

RESUMED = data_dir() / "logs" / "verl_console.log"
Row = dict[str, float]


def _rows(broken: str | None) -> list[Row]:
    """A run that is broken in its log-probability difference from step 25 on, or not."""
    rows = []
    for step in range(1, 41):
        wave = 0.01 * ((step * 7919) % 13 - 6)
        jump = 8.0 if broken and step >= 25 else 0.0
        rows.append({"step": step, "policy_loss": 0.2 + wave, "grad_norm": 1.0 + wave + jump, "entropy": 1.5 - wave})
    return rows


def _write(path: Path, *attempts: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for rows in attempts for row in rows))
    return path


def test_a_failure_that_a_resume_replaced_is_judged() -> None:
    (verdict,) = judge_log(RESUMED)
    assert [one.diagnosis.detection.verdict for one in verdict.attempts] == ["alarm", "healthy"]
    assert verdict.verdict == "alarm"
    assert exit_code([verdict]) == 1
    assert verdict.diagnosis is verdict.attempts[0].diagnosis
    text = verdict.text()
    assert "verl_console, attempt 1 of 2 (steps 1 to 35): The run departs from step 15 on" in text
    assert "verl_console, attempt 2 of 2 (steps 11 to 60): No alarm" in text
    assert f"log: {LEARNED}" in text


def test_the_failing_attempt_leads_wherever_it_stands(tmp_path: Path) -> None:
    good, bad = _rows(None), _rows("yes")
    for order, first in (((good[:38], bad[9:]), 1), ((bad[:38], good[9:]), 0), ((bad[:38], bad[9:]), 0)):
        (run,) = read(_write(tmp_path / "x.jsonl", *order))
        judged = judge_attempts(run)
        assert [one.label for one in judged] == ["attempt 1 of 2", "attempt 2 of 2"]
        assert leading(judged) is judged[first]
        assert judged[first].diagnosis.detection.onset == pytest.approx(25, abs=2)
    (verdict,) = judge_log(tmp_path / "x.jsonl")
    assert LEARNED not in verdict.notes


def test_a_first_attempt_too_short_to_judge_hides_no_healthy_run(tmp_path: Path) -> None:
    good = _rows(None)
    (verdict,) = judge_log(_write(tmp_path / "x.jsonl", good[:4], good[2:]))
    assert [one.diagnosis.detection.verdict for one in verdict.attempts] == ["could not judge", "healthy"]
    assert exit_code([verdict]) == 0


def test_a_run_of_one_attempt_has_no_label(tmp_path: Path) -> None:
    (verdict,) = judge_log(_write(tmp_path / "x.jsonl", _rows(None)))
    assert [one.label for one in verdict.attempts] == [""]
    assert "attempt" not in verdict.text()


def test_json_holds_every_attempt_and_the_exit_code_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triage", str(RESUMED), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "alarm"
    assert told["diagnosis"] == told["attempts"][0]["diagnosis"]
    assert [one["steps"] for one in told["attempts"]] == [[1, 35], [11, 60]]
    assert told["attempts"][0]["ended_by"].startswith("resumed at step 11 after step 35")
    assert LEARNED in told["notes"]


def test_a_report_and_the_terminal_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = main(["triage", str(RESUMED), "--json"])
    before = capsys.readouterr().out
    with_report = main(["triage", str(RESUMED), "--json", "--report", str(tmp_path / "r"), "--no-images"])
    assert (plain, before) == (with_report, capsys.readouterr().out)


def test_a_log_without_a_metric_says_what_to_do_and_claims_nothing_of_a_run(tmp_path: Path) -> None:
    """Columns of unknown names ask for a mapping; a crash before the first step does not, and has no run's numbers."""
    shutil.copy(data_dir() / "logs" / "own_columns.csv", tmp_path / "own.csv")
    for path in (data_dir() / "logs" / "own_columns.csv", tmp_path / "own.csv"):
        (verdict,) = judge_log(path)
        assert exit_code([verdict]) == 2
        assert "columns update, pg_objective, gnorm" in verdict.text()
        assert "What to do: name the columns with a mapping" in verdict.text()
        assert "--map their_key=signal and --step their_step" in verdict.text()
        assert verdict.to_dict()["remedy"] in verdict.text()
    mapped = {"mapping": {"gnorm": "grad_norm", "pg_objective": "policy_loss"}, "step": "update"}
    (judged,) = judge_log(tmp_path / "own.csv", **mapped)
    assert (judged.remedy, bool(judged.attempts)) == ("", True)
    crashed = data_dir() / "logs" / "crashed_before_step_1.log"
    (verdict,) = judge_log(crashed)
    assert "--map" not in verdict.text()
    assert "look at the end of the log" in verdict.text()
    assert LEARNED not in verdict.notes
    assert example_notes(crashed, read(crashed)[0]) == ()
    assert example_notes(RESUMED, read(RESUMED)[0]) == (LEARNED,)


@pytest.mark.parametrize("name", sorted(path.name for path in (data_dir() / "logs").iterdir() if path.suffix != ".md"))
def test_only_examples_with_numbers_are_said_to_have_those_of_a_recorded_run(name: str) -> None:
    path = data_dir() / "logs" / name
    for one in open_incidents(path):
        assert (LEARNED in one.notes) == bool(one.judgements)


def test_lines_that_were_not_read_are_named(tmp_path: Path) -> None:
    rows = [f'{{"step": {n}, "grad_norm": {1 + n % 7 / 100}, "reward_mean": {n % 5 / 10}}}' for n in range(1, 41)]
    rows[20] = rows[20][:30]
    path = tmp_path / "torn.jsonl"
    path.write_text("\n".join(rows) + "\n")
    (verdict,) = judge_log(path)
    assert "1 line (21)" in verdict.text()
    assert any("1 line (21)" in note for note in verdict.to_dict()["notes"])
    assert any("1 line (21)" in note for one in open_incidents(path) for note in one.notes)


def test_a_healthy_log_that_is_given_six_times_is_one(tmp_path: Path) -> None:
    good = data_dir() / "logs" / "verl_console.log"
    with pytest.raises(ComparisonError, match="1 healthy run that serves; 5 left out: equal"):
        judge_log(data_dir() / "logs" / "trainer_state.json", [good] * 6)
