"""States of cells: nothing is taken for something else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from moeproxy.traces.logs.cells import WORDS, Status, bare, bare_cell, classify, states


@pytest.mark.parametrize(
    ("value", "number", "status"),
    [
        (0.5, 0.5, Status.MEASURED),
        (-0.0, -0.0, Status.MEASURED),
        (3, 3.0, Status.MEASURED),
        (True, 1.0, Status.BOOL),
        (None, math.nan, Status.NULL),
        (math.nan, math.nan, Status.NAN),
        (math.inf, math.inf, Status.POS_INF),
        (-math.inf, -math.inf, Status.NEG_INF),
        ("nan", math.nan, Status.NAN_TEXT),
        ("NaN", math.nan, Status.NAN_TEXT),
        ("Infinity", math.inf, Status.POS_INF_TEXT),
        ("-inf", -math.inf, Status.NEG_INF_TEXT),
        ("2.58", 2.58, Status.NUMBER_TEXT),
        ("5e-05", 5e-05, Status.NUMBER_TEXT),
        ("1_0", math.nan, Status.TEXT),
        ("0x10", math.nan, Status.TEXT),
        ("٣", math.nan, Status.TEXT),
        ("", math.nan, Status.TEXT),
        ("5/3766", math.nan, Status.TEXT),
        ([1], math.nan, Status.OTHER),
        ("9" * 401, math.nan, Status.TEXT),
    ],
)
def test_classify(value: Any, number: float, status: Status) -> None:
    found, state, text = classify(value)
    assert state == status
    assert np.array_equal(found, number, equal_nan=True)
    assert (text is not None) == (status in (Status.TEXT, Status.OTHER))


def test_large_integers_keep_their_digits() -> None:
    assert classify(2**53 + 1) == (float(2**53), Status.MEASURED, str(2**53 + 1))
    assert classify(str(2**53 + 1)) == (float(2**53), Status.NUMBER_TEXT, str(2**53 + 1))
    number, status, text = classify(10**400)
    assert (number, status, len(text or "")) == (math.inf, Status.POS_INF, 401)
    assert classify(10**5000)[2] == "an integer of more than 4300 digits"


def test_unquoted() -> None:
    assert [bare("7"), bare("1e3"), bare("a b"), bare("inf")] == [7, 1000.0, "a b", math.inf]
    assert isinstance(bare("7"), int)
    assert bare(str(10**30)) == 10**30
    assert bare_cell(" ")[1] == Status.EMPTY
    assert bare_cell("0.25") == (0.25, Status.MEASURED, None)
    assert bare_cell("nan")[1] == Status.NAN
    assert bare_cell("running") == (pytest.approx(math.nan, nan_ok=True), Status.TEXT, "running")


def test_states_of_arrays_are_those_of_cells() -> None:
    values = np.array([0.0, np.nan, np.inf, -np.inf])
    assert [Status(state) for state in states(values)] == [classify(float(v))[1] for v in values]
    assert len(set(WORDS.values())) == len(Status)
