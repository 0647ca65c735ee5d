"""What was read, as files; and the command that does it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

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
    assert [file.name for file in files] == [
        f"a-run{part}.csv" for part in ("", ".status", ".original", ".original.status")
    ]
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


GAPS = (
    '{"step": 1, "actor/lr": NaN, "mine": NaN, "a": 1}\n'
    '{"step": 2, "actor/lr": 0.5, "mine": null, "a": "x"}\n'
    '{"step": 3, "actor/lr": 0.5, "mine": 0.25}\n'
    '{"step": 4, "actor/lr": 0.5, "mine": "NaN", "a": -Infinity}\n'
    '{"step": 5, "actor/lr": 0.5}\n'
)


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_the_states_of_original_cells_are_written(tmp_path: Path, to: Literal["csv", "parquet"]) -> None:
    (tmp_path / "x.jsonl").write_text(GAPS)
    (log,) = read(tmp_path / "x.jsonl")
    *_, original, states = convert([log], to, tmp_path / "out")
    assert states.name == f"x.original.status.{to}"
    found = pd.read_csv(states, index_col=0, keep_default_na=False) if to == "csv" else pd.read_parquet(states)
    assert found["mine"].tolist() == ["nan", "null", "measured", "nan text", "missing"]
    assert found["a"].tolist() == ["measured", "text", "missing", "neg inf", "missing"]
    assert found["log:line"].tolist() == [1, 2, 3, 4, 5]
    rows = pd.read_csv(original, index_col=0) if to == "csv" else pd.read_parquet(original)
    assert list(rows) == list(found)  # cell for cell
    assert len(rows) == len(found)


@pytest.mark.parametrize("further", ["status", "original", "original.status"])
def test_a_run_never_writes_over_the_files_of_another(tmp_path: Path, further: str) -> None:
    for name in ("x", f"x.{further}"):
        (tmp_path / f"{name}.jsonl").write_text(LOG)
    files = convert(read(tmp_path), "csv", tmp_path / "out")
    assert len({*files}) == len(list((tmp_path / "out").iterdir())) == 8


def test_names_are_told_apart_and_nothing_is_written_without_metrics(tmp_path: Path) -> None:
    logs = read(_log(tmp_path))
    names = [file.name for file in convert([*logs, *logs], "csv", tmp_path / "out")]
    assert names[4] == "a-run-2.csv"
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
