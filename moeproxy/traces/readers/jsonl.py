"""JSON lines as tables in which absent, null, NaN, infinite and the text "nan" stay different things.

A table of numbers cannot hold these differences, and they matter: loggers that know no NaN write null, a key that is
absent was never logged, and "nan" in quotes went through a formatter first. So every table has a twin of equal shape
that says of every cell what was found there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import TraceError

NUMBER, ABSENT, NULL, NAN, INFINITE = "number", "absent", "null", "NaN", "infinite"
TEXT, TEXT_NUMBER, BOOL, OTHER = "text", "number in quotes", "bool", "other"
KINDS = (NUMBER, ABSENT, NULL, NAN, INFINITE, TEXT, TEXT_NUMBER, BOOL, OTHER)
"""What a cell can hold. "number in quotes" is text that Python reads as a number: "0.5", "nan", "-inf"."""

NUMERIC = (NUMBER, NAN, INFINITE, TEXT_NUMBER, BOOL)
"""Kinds that have a value as a number."""

_SHOWN = 60  # characters of a faulty line that an error repeats


@dataclass(frozen=True)
class Row:
    """One line of a file: nested objects are flattened, their keys joined by "/"."""

    line: int
    cells: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows as columns, and what every cell held.

    Args:
        values: numbers as float64, NaN also where nothing was (int64 if all are integers); columns with text keep
            the objects as they were read.
        kinds: of equal shape, each cell one of `KINDS`.
        lines: line number of every row.
    """

    values: pd.DataFrame
    kinds: pd.DataFrame
    lines: tuple[int, ...] = ()

    def numeric(self, name: str) -> bool:
        """Whether a column holds nothing but numbers and gaps, and at least one number."""
        kinds = set(self.kinds[name].unique())
        return bool(kinds & set(NUMERIC)) and kinds <= {*NUMERIC, ABSENT, NULL}

    def column(self, name: str) -> pd.Series:
        """Return a numeric column as a trace stores it: `pd.NA` where absent or null, NaN where NaN was written."""
        gone = self.kinds[name].isin([ABSENT, NULL]).to_numpy()
        numbers = [pd.NA if lost else number(value) for lost, value in zip(gone, self.values[name], strict=True)]
        return pd.Series(numbers, index=self.values.index, dtype=object)

    def count(self, name: str) -> dict[str, int]:
        """Return how often each kind occurs in a column."""
        return {str(kind): int(n) for kind, n in self.kinds[name].value_counts().items() if n}


@dataclass
class _Lines:
    """What a file's lines gave."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_rows(path: Path) -> tuple[list[Row], tuple[str, ...]]:
    """Return the rows of a file of JSON objects, one a line, and notes on what was left out.

    Blank lines are passed over. A last line without an end that is no JSON was being written when the run ended: it
    is left out with a note. Any other line that cannot be read is an error.

    Raises:
        TraceError: the file is absent or no text, or a line is no JSON object or repeats a key.
    """
    found = _Lines()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror or error})", where=path, expected="a JSONL file") from error
    whole = data.endswith((b"\n", b"\r"))
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    last = max((number for number, line in enumerate(lines, start=1) if line.strip()), default=0)
    for number_, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.rows.append(Row(number_, _flat(_object(line, path, number_))))
        except TraceError:
            if number_ != last or whole:
                raise
            found.notes.append(f"{path.name}, line {number_}: cut short, left out")
    return found.rows, tuple(found.notes)


def table(rows: Sequence[Row], index: Sequence[int] | None = None) -> Table:
    """Return rows as a table; columns stand in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    places = pd.RangeIndex(len(rows)) if index is None else pd.Index(np.asarray(index, np.int64))
    kinds = {name: [_kind(row.cells, name) for row in rows] for name in names}
    values = {name: _values(rows, name, kinds[name]) for name in names}
    typed = {name: pd.Categorical(kinds[name], categories=KINDS) for name in names}
    return Table(pd.DataFrame(values, places), pd.DataFrame(typed, places), tuple(row.line for row in rows))


def number(value: Any) -> float:
    """Return a cell as float64; an integer too large for it becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _object(line: bytes, path: Path, number_: int) -> dict[str, Any]:
    where = f"{path}, line {number_}"
    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except _RepeatedKey as error:
        raise TraceError(
            f"the key {error} stands twice in one object", where=where, expected="each key once"
        ) from error
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN].decode("utf-8", "replace") + ("..." if len(line) > _SHOWN else "")
        raise TraceError(
            f"no JSON: {shown!r}",
            where=where,
            expected="one JSON object",
            remedy="copy the file again, or remove the line if the program was killed while writing it",
        ) from error
    if not isinstance(found, dict):
        raise TraceError(f"a JSON {type(found).__name__}", where=where, expected="a JSON object in braces")
    return found


class _RepeatedKey(Exception):
    """Not a ValueError: which of two values was meant is another question than whether the line is JSON."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(repr(next(name for name in names if names.count(name) > 1)))
    return found


def _flat(found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in found.items():
        key = f"{prefix}{name}"
        cells |= _flat(value, f"{key}/") if isinstance(value, dict) and value else {key: value}
    return cells


def _kind(cells: dict[str, Any], name: str) -> str:
    if name not in cells:
        return ABSENT
    value = cells[name]
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int | float):
        return _kind_of_number(number(value))
    if isinstance(value, str):
        return TEXT_NUMBER if _reads_as_number(value) else TEXT
    return OTHER


def _kind_of_number(value: float) -> str:
    return NAN if math.isnan(value) else INFINITE if math.isinf(value) else NUMBER


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python reads "1_0" as 10; nobody who writes logs means that


def _values(rows: Sequence[Row], name: str, kinds: Sequence[str]) -> list[Any]:
    cells = [row.cells.get(name) for row in rows]
    if set(kinds) == {NUMBER} and all(isinstance(cell, int) and abs(cell) < 2**63 for cell in cells):
        return cells  # float64 would blur large ids
    if set(kinds) <= {*NUMERIC, ABSENT, NULL}:
        gaps = [kind in (ABSENT, NULL) for kind in kinds]
        return [math.nan if gap else number(cell) for gap, cell in zip(gaps, cells, strict=True)]
    return cells
