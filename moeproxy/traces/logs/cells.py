"""What a cell of a log holds: a number, nothing, NaN, an infinity, text; none of them is ever taken for another."""

from __future__ import annotations

import math
import re
from enum import IntEnum
from typing import Any

import numpy as np

EXACT = 2**53
"""Integers from here on do not fit into float64; their digits are kept as text beside the number."""

MAX_DIGITS = 400
"""Characters of a number in quotes; longer text is text."""


class Status(IntEnum):
    """What stood in a cell of a log, or what is known of it."""

    MEASURED = 0
    MISSING = 1  # the row has no such key
    NULL = 2  # null or None
    NAN = 3
    POS_INF = 4
    NEG_INF = 5
    NAN_TEXT = 6  # the word nan in quotes
    POS_INF_TEXT = 7
    NEG_INF_TEXT = 8
    NUMBER_TEXT = 9  # a number in quotes: it went through a formatter and may be rounded
    TEXT = 10
    OTHER = 11  # a list or another value that is no number
    BOOL = 12
    EMPTY = 13  # an empty cell of a CSV file
    FILTERED = 14  # the logger put another value in the place of a non-finite one
    NONFINITE = 15  # null or a sentinel by which this logger writes NaN or Inf
    SUPERSEDED = 16  # written by a run that was resumed from an earlier step


WORDS = {status: status.name.lower().replace("_", " ") for status in Status}
"""Names of the states for tables and messages."""

NUMERIC = frozenset(
    {
        Status.MEASURED,
        Status.NAN,
        Status.POS_INF,
        Status.NEG_INF,
        Status.NAN_TEXT,
        Status.POS_INF_TEXT,
        Status.NEG_INF_TEXT,
        Status.NUMBER_TEXT,
        Status.BOOL,
        Status.NONFINITE,
    }
)
"""States in which a cell has a value as a number (NaN and infinities included)."""

KEEPS_TEXT = frozenset({Status.TEXT, Status.OTHER})

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z", re.ASCII)
_SPECIAL = {
    "nan": Status.NAN_TEXT,
    "inf": Status.POS_INF_TEXT,
    "infinity": Status.POS_INF_TEXT,
    "-inf": Status.NEG_INF_TEXT,
    "-infinity": Status.NEG_INF_TEXT,
}
_SPECIAL |= {f"+{word}": status for word, status in _SPECIAL.items() if word[0] != "-"} | {"-nan": Status.NAN_TEXT}
_VALUE = {
    Status.NAN_TEXT: math.nan,
    Status.POS_INF_TEXT: math.inf,
    Status.NEG_INF_TEXT: -math.inf,
    Status.NAN: math.nan,
    Status.POS_INF: math.inf,
    Status.NEG_INF: -math.inf,
}
_BARE = {
    Status.NAN_TEXT: Status.NAN,
    Status.POS_INF_TEXT: Status.POS_INF,
    Status.NEG_INF_TEXT: Status.NEG_INF,
    Status.NUMBER_TEXT: Status.MEASURED,
}


def classify(value: Any) -> tuple[float, Status, str | None]:
    """Return a cell's number (NaN when it has none), its state, and its text where the number does not say all."""
    if isinstance(value, bool):
        return float(value), Status.BOOL, None
    if isinstance(value, int | float):
        return _number(value)
    if value is None:
        return math.nan, Status.NULL, None
    if isinstance(value, str):
        return _text(value)
    return math.nan, Status.OTHER, str(value)


def bare(text: str) -> float | str:
    """Return the number that unquoted text of a log stands for, or the text itself.

    Example:
        >>> bare("1.5e-3"), bare("-inf"), bare("12 ms")
        (0.0015, -inf, '12 ms')
    """
    _, status, _ = _text(text)
    if status == Status.NUMBER_TEXT:
        return int(text) if len(text) < 16 and text.lstrip("+-").isdigit() else _exact(text)
    return _VALUE.get(status, text)


def bare_cell(text: str) -> tuple[float, Status, str | None]:
    """Return what an unquoted cell of a CSV file holds; like `classify`, but numbers need no quotes there."""
    if not text.strip():
        return math.nan, Status.EMPTY, None
    number, status, kept = _text(text)
    if status == Status.NUMBER_TEXT and math.isinf(number):  # 1e999: beyond what float64 holds
        return number, Status.POS_INF if number > 0 else Status.NEG_INF, kept
    return number, _BARE.get(status, status), kept


def states(values: np.ndarray) -> np.ndarray:
    """Return the states of float64 numbers that were logged as numbers."""
    found = np.zeros(values.shape, np.uint8)
    finite = np.isfinite(values)
    if not finite.all():
        found[np.isnan(values)] = Status.NAN
        found[np.isposinf(values)] = Status.POS_INF
        found[np.isneginf(values)] = Status.NEG_INF
    return found


def _number(value: int | float) -> tuple[float, Status, str | None]:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        return number, Status.NAN, None
    large = isinstance(value, int) and abs(value) > EXACT
    text = _digits(value) if large else None
    if math.isinf(number):
        return number, Status.POS_INF if number > 0 else Status.NEG_INF, text
    return number, Status.MEASURED, text


def _digits(value: int | float) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to write more than 4,300 digits
        return "an integer of more than 4300 digits"


def _text(text: str) -> tuple[float, Status, str | None]:
    short = text.strip()
    if len(short) <= MAX_DIGITS:
        if _NUMBER.match(short):
            number = float(short)
            exact = number == number and abs(number) < EXACT
            return number, Status.NUMBER_TEXT, None if exact else short
        status = _SPECIAL.get(short.lower())
        if status is not None:
            return _VALUE[status], status, None
    return math.nan, Status.TEXT, text


def _exact(text: str) -> float | int:
    return int(text) if text.strip().lstrip("+-").isdigit() else float(text)
