"""JSON lines: what is absent, null, NaN, infinite or "nan" in quotes stays so, and errors name the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces.readers.jsonl import (
    ABSENT,
    BOOL,
    INFINITE,
    NAN,
    NULL,
    NUMBER,
    OTHER,
    TEXT,
    TEXT_NUMBER,
    Row,
    read_rows,
    table,
)

ODD: dict[str, tuple[Any, str]] = {
    "1.5": (1.5, NUMBER),
    "7": (7, NUMBER),
    "null": (None, NULL),
    "NaN": (math.nan, NAN),
    "Infinity": (math.inf, INFINITE),
    "-Infinity": (-math.inf, INFINITE),
    "1" + "0" * 400: (10**400, INFINITE),
    '"nan"': ("nan", TEXT_NUMBER),
    '"-inf"': ("-inf", TEXT_NUMBER),
    '"0.5"': ("0.5", TEXT_NUMBER),
    '"1_0"': ("1_0", TEXT),
    '"arith"': ("arith", TEXT),
    '""': ("", TEXT),
    "true": (True, BOOL),
    "[1]": ([1], OTHER),
    "{}": ({}, OTHER),
}


@pytest.mark.parametrize("text", ODD)
def test_every_odd_value_has_its_own_kind(text: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(f'{{"a": {text}, "b": 1}}\n\n{{"b": 2}}\n', encoding="utf-8")
    rows, notes = read_rows(file)
    assert [row.line for row in rows] == [1, 3]
    assert notes == ()
    value, kind = ODD[text]
    assert repr(rows[0].cells["a"]) == repr(value)
    found = table(rows)
    assert found.kinds["a"].tolist() == [kind, ABSENT]
    assert found.kinds["b"].tolist() == [NUMBER, NUMBER]
    assert found.values["b"].tolist() == [1, 2]
    assert found.numeric("a") == (kind in (NUMBER, NAN, INFINITE, TEXT_NUMBER, BOOL))


def test_a_column_for_a_trace_keeps_missing_and_nan_apart() -> None:
    cells = [{"x": 1.0}, {"x": None}, {}, {"x": math.nan}, {"x": "nan"}, {"x": -math.inf}, {"x": 10**400}, {"x": True}]
    found = table([Row(line, row) for line, row in enumerate(cells, start=1)])
    column = found.column("x").tolist()
    assert [value is pd.NA for value in column] == [False, True, True, False, False, False, False, False]
    assert column[0] == 1.0
    assert math.isnan(column[3])
    assert math.isnan(column[4])
    assert column[5:] == [-math.inf, math.inf, 1.0]
    assert found.count("x") == {
        NUMBER: 1, NULL: 1, ABSENT: 1, NAN: 1, TEXT_NUMBER: 1, INFINITE: 2, BOOL: 1
    }  # fmt: skip


def test_nested_parts_are_flattened_and_large_ids_stay_exact(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"metadata": {"id": 9007199254740993, "fault": {"type": "x"}}}\n', encoding="utf-8")
    found = table(read_rows(file)[0])
    assert found.values.columns.tolist() == ["metadata/id", "metadata/fault/type"]
    assert found.values["metadata/id"].tolist() == [9007199254740993]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "no JSON"),
        ("[1, 2]", "a JSON list"),
        ("3", "a JSON int"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ('{"b": {"a": 1, "a": 2}}', "the key 'a' stands twice"),
        ("{'a': 1}", "no JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=words) as caught:
        read_rows(file)
    assert caught.value.where.endswith("log.jsonl, line 2")


def test_a_line_that_was_being_written_is_left_out_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes('{"a": 1}\n{"a": "é'.encode()[:-1])
    rows, notes = read_rows(file)
    assert [row.cells for row in rows] == [{"a": 1}]
    assert notes == ("log.jsonl, line 2: cut short, left out",)
    file.write_bytes(b'{"a": 1}\n{"a": \n')
    with pytest.raises(TraceError, match="line 2"):
        read_rows(file)


def test_no_file_no_text_and_a_byte_order_mark(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_rows(tmp_path / "absent.jsonl")
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert [row.cells["a"] for row in read_rows(file)[0]] == [1, 2]
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1"):
        read_rows(file)
    file.write_bytes(b"")
    assert read_rows(file) == ([], ())


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("ae1.-", max_size=5),
    st.sampled_from(["nan", "inf", "1e3"]),
)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), _VALUES), min_size=1, max_size=6))
def test_whatever_was_written_is_found_again(written: list[dict[str, Any]]) -> None:
    rows = [Row(line, json.loads(json.dumps(cells))) for line, cells in enumerate(written, start=1)]
    found = table(rows)
    assert found.values.shape == found.kinds.shape
    for name in found.kinds:
        for place, cells in enumerate(written):
            kind, there = found.kinds[name].iloc[place], name in cells
            assert (kind == ABSENT) == (not there)
            assert (kind == NULL) == (there and cells[name] is None)
            if kind == TEXT:
                assert found.values[name].iloc[place] == cells[name]
            if kind in (NUMBER, NAN, INFINITE) and found.numeric(name):
                value = cells[name]
                exact = float(value) if abs(value) < 1e300 or value != value else value
                assert repr(float(found.column(name).iloc[place])) == repr(float(exact))
