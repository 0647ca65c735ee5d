"""Printed dicts."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.traces.logs.literals import dicts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'loss': '2.58', 'epoch': '0.06'}", [{"loss": "2.58", "epoch": "0.06"}]),
        ("x {'a': 1}\ty{'b': 2.5}", [{"a": 1}, {"b": 2.5}]),
        ("{'a': np.float64(0.25), 'b': tensor(1.5, device='cuda:0')}", []),
        ("{'a': np.float64(0.25), 'b': tensor(1.5)}", [{"a": 0.25, "b": 1.5}]),
        ("{'a': nan, 'b': -inf, 'c': None, 'd': True}", [{"a": math.nan, "b": -math.inf, "c": None, "d": True}]),
        ('{"a": NaN, "b": null, "c": "\\u00e9\\n"}', [{"a": math.nan, "b": None, "c": "é\n"}]),
        ("{'a': {'b': [1, (2, 3)]}, }", [{"a": {"b": [1, [2, 3]]}}]),
        ("{'it\\'s': 1}", [{"it's": 1}]),
        ("{1: 2}", []),
        ("no dict", []),
        ("{'a': np.float64(x)}", [{"a": "np.float64(x)"}]),
    ],
)
def test_dicts(text: str, found: list[dict]) -> None:
    values = [value for _, value in dicts(text)[0]]
    assert repr(values) == repr(found)


@pytest.mark.parametrize("text", ["{'a': 1", "{'a' 1}", "{'a': <object at 0x1>}", "{'a': [1 2]}", "{'a': }"])
def test_unfinished_or_strange(text: str) -> None:
    assert dicts(text) == ([], True)
    assert dicts("{'b': 2} " + text)[0] == [(0, {"b": 2})]


def test_depth_and_length_are_bounded() -> None:
    assert dicts("{'a': " * 100_000 + "1" + "}" * 100_000) == ([], True)
    assert dicts("{'a': " + "[" * 100_000)[1]
    assert dicts("{'a': [" + "1, " * 30_000 + "]}") == ([], True)


_KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1)
_VALUES = st.one_of(st.integers(-(2**60), 2**60), st.floats(), st.none(), st.booleans())


@given(st.dictionaries(_KEYS, _VALUES, min_size=1))
def test_reads_back_what_python_prints(row: dict) -> None:
    ((_, found),), unfinished = dicts(repr(row))
    assert not unfinished
    assert set(map(repr, found.values())) == set(map(repr, row.values()))


@given(st.dictionaries(_KEYS, _VALUES, min_size=1))
def test_reads_back_what_json_prints(row: dict) -> None:
    ((_, found),), _ = dicts(json.dumps(row, ensure_ascii=False))
    assert list(map(repr, found.values())) == list(map(repr, row.values()))


@given(st.text("{}[]()'\":, \\a1.-np"))
def test_never_fails(text: str) -> None:
    dicts(text)
