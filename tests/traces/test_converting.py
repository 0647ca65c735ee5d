"""What was read, as files; and the command that does it."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from moeproxy.__main__ import main
from moeproxy.errors import TraceError
from moeproxy.traces import Trace, read
from moeproxy.traces.converting import convert, with_places

LOG = (
    '{"step": 1, "actor/lr": 0.5, "actor/grad_norm": NaN, "big": 9007199254740993, "name": "a"}\n'
    '{"step": 2, "actor/lr": null, "actor/grad_norm": Infinity, "name": "b"}\n'
)


def _log(tmp_path: Path) -> Path:
    (tmp_path / "a run.jsonl").write_text(LOG)
    return tmp_path / "a run.jsonl"


def test_csv_keeps_nan_and_gap_apart(tmp_path: Path) -> None:
    files = convert(read(_log(tmp_path)), "csv", tmp_path / "out")
    assert [file.name for file in files] == ["a-run.csv", "a-run.status.csv", "a-run.original.csv"]
    assert files[0].read_text() == "step,grad_norm,learning_rate\n1,nan,0.5\n2,inf,\n"
    assert files[1].read_text() == "step,grad_norm,learning_rate\n1,nan,measured\n2,pos inf,null\n"
    original = pd.read_csv(files[2], dtype=str, keep_default_na=False)
    assert original["big"].tolist()[0] == "9007199254740993"
    assert original["log:line"].tolist() == ["1", "2"]


def test_parquet_loads_as_a_trace(tmp_path: Path) -> None:
    logs = read(_log(tmp_path))
    files = convert(logs, "parquet", tmp_path / "out")
    assert Trace.load(files[0]).equals(logs[0].trace)
    assert pd.read_parquet(files[1])["learning_rate"].tolist() == ["measured", "null"]
    original = pd.read_parquet(files[2])
    assert original["name"].tolist() == ["a", "b"]
    assert original["big"].tolist()[0] == "9007199254740993"
    assert math.isinf(original["actor/grad_norm"].tolist()[1])
    assert list(with_places(logs[0]))[:2] == ["log:file", "log:line"]


def test_names_are_told_apart_and_nothing_is_written_without_metrics(tmp_path: Path) -> None:
    logs = read(_log(tmp_path))
    names = [file.name for file in convert([*logs, *logs], "csv", tmp_path / "out")]
    assert names[3] == "a-run-2.csv"
    (tmp_path / "x.log").write_text("Killed\n")
    with pytest.raises(TraceError, match="killed on line 1"):
        convert(read(tmp_path / "x.log"), "csv", tmp_path / "none")
    with pytest.raises(TraceError, match="no run"):
        convert([], "csv", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = _log(tmp_path)
    assert main(["read", str(log)]) == 0
    said = capsys.readouterr().out
    assert "a run: verl, JSON lines" in said
    assert "grad_norm = actor/grad_norm: 1 nan, 1 pos inf" in said
    assert main(["read", str(log), "--to", "parquet", "--out", str(tmp_path / "o")]) == 0
    assert f"written: {tmp_path / 'o' / 'a-run.parquet'}" in capsys.readouterr().out
    assert main(["read", str(log), "--map", "big=response_length", "--step", "step"]) == 0
    assert "response_length = big: 1 measured" in capsys.readouterr().out
    assert main(["read", str(log), "--map", "big=nonsense"]) == 1
    assert "unknown signal 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["read", str(log), "--map", "big"])
