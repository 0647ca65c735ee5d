"""Databases of mlflow and trackio, each written by its own rules."""

from __future__ import annotations

import math
import sqlite3
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import read


def _base(path: Path, *statements: str, rows: list[tuple] = [], into: str = "") -> Path:  # noqa: B006 - only read
    with closing(sqlite3.connect(path)) as base:
        for statement in statements:
            base.execute(statement)
        if rows:
            base.executemany(f"INSERT INTO {into} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        base.commit()
    return path


MLFLOW = "CREATE TABLE metrics (key TEXT, value FLOAT, timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN)"
TRACKIO = "CREATE TABLE metrics (id INTEGER, run_name TEXT, step INTEGER, metrics TEXT)"


def test_mlflow(tmp_path: Path) -> None:
    largest = sys.float_info.max
    rows = [
        ("actor/grad_norm", 0.5, 1, "a" * 32, 1, 0),
        ("actor/lr", 1e-6, 1, "a" * 32, 1, 0),
        ("actor/grad_norm", 0.0, 2, "a" * 32, 2, 1),
        ("actor/grad_norm", largest, 3, "a" * 32, 3, 0),
        ("actor/grad_norm", -largest, 4, "a" * 32, 4, 0),
        ("actor/lr", 2e-6, 1, "b" * 32, 1, 0),
    ]
    names = "CREATE TABLE runs AS SELECT 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' AS run_uuid, 'first' AS name"
    first, second = read(_base(tmp_path / "mlflow.db", MLFLOW, names, rows=rows, into="metrics"))
    assert (first.info.name, second.info.name) == ("first (aaaaaaaa)", "bbbbbbbb")
    assert first.info.framework == "verl"
    assert first.status["grad_norm"].tolist() == ["measured", "nan", "pos inf", "neg inf"]
    expected = [0.5, math.nan, math.inf, -math.inf]
    assert np.array_equal(first.trace.values("grad_norm"), expected, equal_nan=True)
    assert first.status["learning_rate"].tolist() == ["measured", "missing", "missing", "missing"]
    assert second.trace.values("learning_rate").tolist() == [2e-6]


def test_trackio(tmp_path: Path) -> None:
    rows = [
        (1, "one", 1, b'{"actor/grad_norm": 0.5, "nested": {"a": 1}}'),
        (2, "one", 2, b'{"actor/grad_norm": "NaN"}'),
        (3, "two", 1, b'{"actor/grad_norm": "Infinity"}'),
        (4, "two", 2, b"{broken"),
        (5, "two", 3, None),
        (6, "two", 4, 0.5),
    ]
    one, two = read(_base(tmp_path / "x.db", TRACKIO, rows=rows, into="metrics"))
    assert one.status["grad_norm"].tolist() == ["measured", "nan text"]
    assert one.original["nested/a"].tolist()[0] == 1
    assert two.trace.values("grad_norm").tolist() == [math.inf]
    assert [str(skipped) for skipped in two.info.skipped] == ["3 lines (4, 5, 6): no JSON object"]


TRACKIO_IDS = "CREATE TABLE metrics (run_id, run_name TEXT, step INTEGER, metrics TEXT)"


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["A", "B"], ["same (A)", "same (B)"]),
        (["12345678-a", "12345678-b"], ["same (12345678-a)", "same (12345678-b)"]),
        (["0123456789", None], ["same (01234567)", "same"]),
        (["A", "A"], ["same"]),
        ([None, None], ["same"]),
        ([1, 2], ["same (1)", "same (2)"]),
    ],
)
def test_trackio_runs_of_one_name_are_told_apart_by_their_ids(tmp_path: Path, ids: list, names: list[str]) -> None:
    rows = [(run, "same", n, f'{{"actor/lr": {n + 10 * place}}}') for n in (1, 2) for place, run in enumerate(ids)]
    rows.append(("C", "other", 1, '{"actor/lr": 0.5}'))
    *logs, other = read(_base(tmp_path / "x.db", TRACKIO_IDS, rows=rows, into="metrics"))
    assert [log.info.name for log in logs] == names
    assert other.info.name == "other"  # a name that only one run has stays as it is
    if len(names) == 2:
        assert [log.trace.values("learning_rate").tolist() for log in logs] == [[1, 2], [11, 12]]


def test_trackio_with_more_runs_than_are_read_mixes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("databases", "sink"):
        monkeypatch.setattr(f"moeproxy.traces.logs.{module}.MAX_RUNS", 2)
    rows = [(run, "same", 1, '{"actor/lr": 0.5}') for run in "ABC"]
    logs = read(_base(tmp_path / "x.db", TRACKIO_IDS, rows=rows, into="metrics"))
    assert [log.info.name for log in logs] == ["same (A)", "same (B)"]
    assert "more than 2 runs" in logs[0].info.skipped[0].reason


def test_other_databases_are_refused(tmp_path: Path) -> None:
    file = _base(tmp_path / "x.db", "CREATE TABLE people (name TEXT)")
    with pytest.raises(TraceError, match="a database with the tables people"):
        read(file)
    view = _base(tmp_path / "v.db", "CREATE VIEW metrics AS SELECT 1 AS run_name, 1 AS step, '{}' AS metrics")
    with pytest.raises(TraceError, match="with the tables none"):
        read(view)
    data = file.read_bytes()
    (tmp_path / "cut.db").write_bytes(data[:60])
    with pytest.raises(TraceError, match="broken database"):
        read(tmp_path / "cut.db")


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_databases_in_archives(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(1, "a", 1, '{"actor/lr": 0.5}'), (2, "a", 2, '{"actor/lr": 0.25}')]
    file = _base(tmp_path / "x.db", f"PRAGMA journal_mode = {mode}", TRACKIO, rows=rows, into="metrics")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(file, "in/x.db")
        archive.writestr("in/broken.db", file.read_bytes()[:2000])
    whole, broken = read(tmp_path / "x.zip")
    assert whole.trace.values("learning_rate").tolist() == [0.5, 0.25]
    assert "broken database" in broken.contents
    with zipfile.ZipFile(tmp_path / "y.zip", "w") as archive:
        archive.write(file, "in/x.db")
    (log,) = read(tmp_path / "y.zip")
    assert log.trace.values("learning_rate").tolist() == [0.5, 0.25]
    assert log.info.files[0].endswith("y.zip!in/x.db")
    monkeypatch.setattr("moeproxy.traces.logs.databases.MAX_HELD", 1000)
    with pytest.raises(TraceError, match="a database of more than 0 MiB in an archive"):
        read(tmp_path / "y.zip")


def test_reading_leaves_no_trace_beside_it(tmp_path: Path) -> None:
    file = _base(tmp_path / "x.db", TRACKIO, rows=[(1, "a", 1, '{"actor/lr": 1}')], into="metrics")
    before = file.read_bytes()
    (tmp_path / "x.db-wal").write_bytes(b"")
    (log,) = read(file)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.db", "x.db-wal"]
    assert any("x.db-wal" in note for note in log.info.notes)
