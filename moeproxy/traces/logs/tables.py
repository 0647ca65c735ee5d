"""CSV files: plain ones, and wandb's exports with several runs and __MIN/__MAX columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import Status, bare_cell
from moeproxy.traces.logs.lines import lines, text
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink

DELIMITERS = ",;\t|"
MAX_COLUMNS = 20_000
MIN, MAX = "__MIN", "__MAX"


def delimiter_of(head: str) -> str | None:
    """Return the delimiter of a CSV file from its first lines, or None when it looks like no table.

    Example:
        >>> delimiter_of("step,loss\\n1,0.5\\n2,0.4\\n")
        ','
    """
    rows = [line for line in head.splitlines() if line.strip()][:20]
    if len(rows) < 2:
        return None
    for sign in DELIMITERS:
        try:
            found = list(csv.reader(rows[: max(2, len(rows) - 1)], delimiter=sign, strict=True))
        except csv.Error:
            continue
        widths = {len(row) for row in found}
        if widths != {1} and len(widths) == 1 and _is_header(found[0]) and any(map(_has_number, found[1:])):
            return sign
    return None


def read_csv(source: Source, sink: Sink, delimiter: str = ",") -> None:
    """Read a CSV file into a sink; the first line that is not empty names the columns."""
    sink.container = "CSV"
    rows = _rows(source, sink, delimiter)
    _, header = next(rows, (0, []))
    if len(header) > MAX_COLUMNS:
        raise TraceError(f"{len(header):,} columns", where=source.name, expected=f"at most {MAX_COLUMNS:,}")
    names = [name.strip() for name in header]
    double = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if double:
        sink.note(f"columns {', '.join(sorted(double))} stand twice; the first of each is taken")
    wandb = wandb_columns(names)
    for number, cells in rows:
        if len(cells) != len(names):
            sink.skip(number, f"{len(cells)} cells in a table of {len(names)} columns")
        elif wandb:
            _wandb_row(cells, names, wandb, number, sink)
        else:
            row: dict[str, Any] = {}
            for name, cell in zip(names, cells, strict=True):
                row.setdefault(name, bare_cell(cell))
            sink.row(row, number)
    if sink.open_end:
        sink.note("the file ends without a line end: the last number of its last line may be cut short")


def wandb_columns(names: list[str]) -> dict[int, tuple[str, str]]:
    """Return run and key of each column of a wandb export; empty when it is none.

    Example:
        >>> wandb_columns(["Step", "a - b - loss", "a - b - loss__MIN", "a - b - loss__MAX"])[2]
        ('a - b', 'loss__MIN')
    """
    if not any(name.endswith(MIN) and " - " in name for name in names):
        return {}
    split = {place: name.rpartition(" - ") for place, name in enumerate(names) if " - " in name}
    return {place: (run, key) for place, (run, _, key) in split.items()}


def _wandb_row(
    cells: list[str], names: list[str], columns: dict[int, tuple[str, str]], number: int, sink: Sink
) -> None:
    sink.container = "wandb CSV export"
    shared = {name: bare_cell(cells[place]) for place, name in enumerate(names) if place not in columns}
    rows: dict[str, dict[str, Any]] = {}
    for place, (run, key) in columns.items():
        rows.setdefault(run, dict(shared))[key] = bare_cell(cells[place])
    for run, row in rows.items():
        # A run that had ended, or logged nothing here, has empty cells only: that is no row of it.
        if any(cell[1] != Status.EMPTY for key, cell in row.items() if key not in shared):
            sink.row(row, number, run=run)


def _rows(source: Source, sink: Sink, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    place = [0]

    def texts() -> Iterator[str]:
        for number, raw in lines(source.stream, sink):
            place[0] = number
            yield text(raw, number, sink) + "\n"

    reader = csv.reader(texts(), delimiter=delimiter)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            sink.skip(place[0], f"no CSV ({error})")
            continue
        if cells and any(cell.strip() for cell in cells):
            yield place[0], cells


def _is_header(row: list[str]) -> bool:
    return all(cell.strip() for cell in row[1:]) and not any(map(_has_number, [[cell] for cell in row]))


def _has_number(row: list[str]) -> bool:
    return any(bare_cell(cell)[1] in (Status.MEASURED, Status.NAN) for cell in row)
