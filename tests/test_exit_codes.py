"""Exit codes of `triage` for scripts: an alarm is 1 whatever becomes of the output, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeproxy import commands
from moeproxy.__main__ import main
from moeproxy.errors import MoeproxyError
from moeproxy.triage.logs import judge_log
from moeproxy.view import gather

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
ALARM = LOGS / "trainer_state.json"
CODE = "import sys; from moeproxy.__main__ import main; sys.exit(main(sys.argv[1:]))"


def _healthy(path: Path, **more: float) -> Path:
    rows = [
        {"step": n, "grad_norm": 1 + n * 37 % 11 / 100, "reward_mean": 0.5 + n * 53 % 7 / 100, **more}
        for n in range(1, 41)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(shell: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", shell, "bash", sys.executable, CODE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ('"$1" -c "$2" triage "$3" | true; exit ${PIPESTATUS[0]}', ""),
        ('"$1" -c "$2" triage "$3" > /dev/full', "could not be written"),
        ('"$1" -c "$2" triage "$3" >&-', "could not be written"),
    ],
    ids=["pipe", "full", "closed"],
)
def test_an_alarm_stays_one_whoever_reads_it(shell: str, words: str) -> None:
    ended = _run(shell, ALARM)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_alarm_that_cannot_be_written_is_no_alarm(tmp_path: Path) -> None:
    ended = _run('"$1" -c "$2" triage "$3" > /dev/full', _healthy(tmp_path / "a.jsonl"))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def test_a_name_that_is_no_utf_8_is_shown(tmp_path: Path) -> None:
    _healthy(tmp_path / "a.jsonl")
    shell = 'cd "$3" && mv a.jsonl $\'a\\xff.jsonl\' && "$1" -c "$2" triage $\'a\\xff.jsonl\''
    ended = _run(shell, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "No alarm" in ended.stdout


def test_an_unexpected_error_is_one_line_and_no_alarm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(commands, "triage", fail)
    assert main(["triage", str(ALARM)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moeproxy: ZeroDivisionError: by zero")
    assert said.count("\n") == 1
    monkeypatch.setenv("MOEPROXY_DEBUG", "1")
    assert main(["triage", str(ALARM)]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MoeproxyError("no room"), OSError("no room")], ids=["foreseen", "unforeseen"])
def test_a_report_that_fails_takes_no_verdict_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(gather, "postmortem", fail)
    options = ["--report", str(tmp_path / "r"), "--no-images"]
    for log, code, words in ((ALARM, 1, "departs from step"), (_healthy(tmp_path / "a.jsonl"), 2, "No alarm")):
        assert main(["triage", str(log), *options]) == code
        said = capsys.readouterr()
        assert words in said.out
        assert "report:" not in said.out
        assert "the report was not written" in said.err
        assert "no room" in said.err


def test_an_empty_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["triage", ""], ["triage", str(ALARM), "--healthy", " "], ["read", ""]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "an empty path" in capsys.readouterr().err


def test_a_metric_that_cannot_be_right_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triage", str(_healthy(tmp_path / "a.jsonl"))]) == 0
    capsys.readouterr()
    path = _healthy(tmp_path / "b.jsonl", clip_fraction_high=2.07)
    assert main(["triage", str(path)]) == 2
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("b: The metric itself looks wrong: clip_fraction_high is a share")
    assert "No alarm" in second
    (judged,) = judge_log(path)
    assert judged.to_dict()["verdict"] == "could not judge"
