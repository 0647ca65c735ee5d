"""Rows of a log as compact columns: filled in one pass, without the text they came from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import EXACT, NUMERIC, Status, classify, states

BLOCK = 1024
"""Rows of one layout that are turned into columns together."""

MAX_LAYOUTS = 2000
"""Layouts that are kept apart; rows of further ones are taken apart cell by cell."""

MAX_KEYS = 20_000
MAX_CELLS = 400_000_000


@dataclass
class _Layout:
    """Rows that have the same keys in the same order."""

    keys: tuple[str, ...]
    numbers: list[int] = field(default_factory=list)
    values: list[tuple] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """One key: where it was logged and what stood there.

    Args:
        at: row numbers, increasing, int64 (n,).
        values: float64 (n,).
        status: uint8 (n,), of `Status`.
        texts: what a number cannot hold, by row number.
    """

    at: np.ndarray
    values: np.ndarray
    status: np.ndarray
    texts: dict[int, str]

    def dense(self, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return values (NaN in gaps) and states (`Status.MISSING` in gaps) of all rows."""
        values, status = np.full(n_rows, np.nan), np.full(n_rows, Status.MISSING, np.uint8)
        values[self.at], status[self.at] = self.values, self.status
        return values, status

    @property
    def numeric(self) -> bool:
        """Whether it holds a number anywhere."""
        return bool(self.numeric_at.any())

    @property
    def numeric_at(self) -> np.ndarray:
        """Which of its cells hold a number, bool (n,)."""
        return np.isin(self.status, [int(status) for status in NUMERIC])


@dataclass(frozen=True)
class Rows:
    """All rows of one run in the order of the log.

    Args:
        columns: by original key, in order of first appearance.
        lines: line (or entry) number of every row, int64 (n,).
        origins: for every row the number of the process that wrote it, int32 (n,).
        origin_names: names of the processes.
        files: for every row the number of its file, int32 (n,).
    """

    columns: dict[str, Column]
    lines: np.ndarray
    origins: np.ndarray
    origin_names: tuple[str, ...]
    files: np.ndarray

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, keep: np.ndarray) -> Rows:
        """Return the rows where `keep` (bool) is true; keys that none of them has are left out."""
        place = np.cumsum(keep) - 1
        columns = {}
        for name, column in self.columns.items():
            chosen = keep[column.at]
            if chosen.any():
                texts = {int(place[row]): text for row, text in column.texts.items() if keep[row]}
                at = place[column.at[chosen]]
                columns[name] = Column(at, column.values[chosen], column.status[chosen], texts)
        return Rows(columns, self.lines[keep], self.origins[keep], self.origin_names, self.files[keep])

    def reversed(self) -> Rows:
        """Return the rows from the last to the first."""
        last = len(self) - 1
        columns = {
            name: Column(
                last - column.at[::-1],
                column.values[::-1],
                column.status[::-1],
                {last - row: text for row, text in column.texts.items()},
            )
            for name, column in self.columns.items()
        }
        return Rows(columns, self.lines[::-1], self.origins[::-1], self.origin_names, self.files[::-1])


class RowStore:
    """Collects rows; a row is a mapping from keys to numbers, text or None."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._loose: dict[str, tuple[list[int], list[Any]]] = {}
        self._parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        self._texts: dict[str, dict[int, str]] = {}
        self._lines = array("q")
        self._names: dict[str, int] = {}
        # Process and file change rarely: the rows where they do, with the number that holds from there on.
        self._origins: list[tuple[int, int]] = []
        self._files: list[tuple[int, int]] = []
        self._origin: str | None = None
        self._file = -1
        self.file = 0

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, cells: dict[str, Any], line: int, origin: str = "") -> None:
        """Append one row."""
        keys = tuple(cells)
        layout = self._layouts.get(keys)
        if layout is None:
            self._register(keys, line)
            if len(self._layouts) < MAX_LAYOUTS:
                layout = self._layouts[keys] = _Layout(keys)
        row = len(self._lines)
        self._lines.append(line)
        if origin != self._origin or self.file != self._file:
            self._origins.append((row, self._names.setdefault(origin, len(self._names))))
            self._files.append((row, self.file))
            self._origin, self._file = origin, self.file
        if layout is None:
            self._apart(row, cells)
            return
        layout.numbers.append(row)
        layout.values.append(tuple(cells.values()))
        if len(layout.numbers) >= BLOCK:
            self._flush(layout)

    def finish(self) -> Rows:
        """Return everything added so far."""
        for layout in self._layouts.values():
            self._flush(layout)
        for name in self._loose:
            self._flush_loose(name)
        if len(self._parts) * len(self._lines) > MAX_CELLS:
            raise TraceError(
                f"{len(self._lines):,} rows of {len(self._parts):,} keys", expected=f"at most {MAX_CELLS:,} cells"
            )
        columns = {name: self._column(name) for name in self._parts}
        lines = np.asarray(self._lines, np.int64)
        origins, files = (_spread(changes, len(lines)) for changes in (self._origins, self._files))
        return Rows(columns, lines, origins, tuple(self._names) or ("",), files)

    def _apart(self, row: int, cells: dict[str, Any]) -> None:
        for name, cell in cells.items():
            at, values = self._loose.setdefault(name, ([], []))
            at.append(row)
            values.append(cell)
            if len(at) >= BLOCK:
                self._flush_loose(name)

    def _flush_loose(self, name: str) -> None:
        numbers, values = self._loose[name]
        if numbers:
            at = np.asarray(numbers, np.int64)
            self._parts[name].append((at, *_converted(values, at, self._texts[name])))
            self._loose[name] = ([], [])

    def _register(self, keys: Sequence[str], line: int) -> None:
        for name in keys:
            self._parts.setdefault(name, [])
            self._texts.setdefault(name, {})
        if len(self._parts) > MAX_KEYS:
            raise TraceError(f"over {MAX_KEYS:,} different keys", where=f"line {line}", expected="a log of metrics")

    def _flush(self, layout: _Layout) -> None:
        if not layout.numbers:
            return
        at = np.asarray(layout.numbers, np.int64)
        for name, column in zip(layout.keys, zip(*layout.values, strict=True), strict=True):
            self._parts[name].append((at, *_converted(column, at, self._texts[name])))
        layout.numbers, layout.values = [], []

    def _column(self, name: str) -> Column:
        parts = self._parts[name]
        if not parts:  # a row without a value cannot register a key, so this is a key of an empty layout
            return Column(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.uint8), {})
        at, values, status = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
        order = np.argsort(at, kind="stable")
        return Column(at[order], values[order], status[order], self._texts[name])


def _spread(changes: list[tuple[int, int]], n_rows: int) -> np.ndarray:
    """Return for every row the number that holds from the last change on, int32 (n,)."""
    starts = np.array([row for row, _ in changes] + [n_rows], np.int64)
    return np.repeat(np.array([number for _, number in changes], np.int32), np.diff(starts))


def _converted(cells: Sequence[Any], at: np.ndarray, texts: dict[int, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return values and states of one column of a block; the quick path is for plain numbers."""
    kinds = set(map(type, cells))
    if kinds == {float} or (kinds <= {float, int} and max(abs(c) for c in cells if type(c) is int) <= EXACT):
        values = np.array(cells, np.float64)
        return values, states(values)
    values, status = np.empty(len(cells)), np.empty(len(cells), np.uint8)
    for place, cell in enumerate(cells):
        # A reader that knows better than the types says so with a ready cell.
        values[place], status[place], text = cell if type(cell) is tuple else classify(cell)
        if text is not None:
            texts[int(at[place])] = text
    return values, status
