"""Experts picked by text: what is understood, what is refused, and that writing is the inverse of reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.errors import MoeproxyError
from moeproxy.view.apps.selection import parse, written

LAYERS = (1, 2, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("3", {(2, 3)}),
        ("3, 17, 40-42", {(2, 3), (2, 17), (2, 40), (2, 41), (2, 42)}),
        ("3 17;5 : 4 – 5", {(2, 3), (2, 17), (5, 4), (5, 5)}),
        ("1:0,1:1", {(1, 0), (1, 1)}),
    ],
)
def test_reads_numbers_ranges_and_layers(text: str, expected: set[tuple[int, int]]) -> None:
    assert parse(text, 2, LAYERS, 64) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [("x", "'x' names no expert"), ("64", "'64'"), ("9-3", "'9-3'"), ("3:1", "layer 3 has no experts"), ("-1", "'-1'")],
)
def test_refuses_what_names_no_expert(text: str, found: str) -> None:
    with pytest.raises(MoeproxyError, match=found):
        parse(text, 2, LAYERS, 64)


@given(st.frozensets(st.tuples(st.sampled_from(LAYERS), st.integers(0, 63)), max_size=40))
def test_what_is_written_reads_the_same(picks: frozenset[tuple[int, int]]) -> None:
    assert parse(written(picks, 5), 5, LAYERS, 64) == picks
