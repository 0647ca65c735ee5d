"""wandb's binary files (`run-*.wandb`), truncated ones too, without wandb.

The container is that of `blocks`. Its records are protobuf messages `Record`, of which are read: 2 history (1 item: 1
key, 2 nested key, 16 value as JSON; 2 step: 1 number), 4 and 13 console output (1 stream, 3 text), 17 run (8 display
name) and 18 exit (1 code).
"""

from __future__ import annotations

import json
from typing import Any

from moeproxy.traces.logs.blocks import HEADER, records
from moeproxy.traces.logs.cells import MAX_DIGITS
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.stored import StoredConsole
from moeproxy.traces.logs.text import TooDeep, flat
from moeproxy.traces.logs.tfevents import Malformed, fields

_OUTPUT = (4, 13)


def read_wandb(source: Source, sink: Sink) -> None:
    """Read a binary file of wandb into a sink. Lines are records."""
    sink.container = "wandb binary file"
    source.stream.read(HEADER)
    console = StoredConsole()
    for number, data in records(source.stream, sink):
        sink.lines = number
        try:
            _record(data, number, sink, console)
        except (Malformed, IndexError, UnicodeDecodeError, ValueError, RecursionError, TooDeep):
            sink.skip(number, "a record that is none of wandb's")
    console.finish(sink)
    if not sink.runs:
        sink.note("a file of wandb without history: the run logged nothing, or died before")


def _record(data: bytes, number: int, sink: Sink, console: StoredConsole) -> None:
    for field, wire, value in fields(data):
        if wire != 2:
            continue
        if field == 2:
            _history(value, number, sink)
        elif field in _OUTPUT:
            _output(value, number, console)
        elif field == 17:
            for part, kind, inner in fields(value):
                if part == 8 and kind == 2:
                    sink.facts["run"] = inner.decode("utf-8")
        elif field == 18:
            codes = [inner for part, kind, inner in fields(value) if part == 1 and kind == 0]
            sink.facts["exit code"] = codes[0] if codes else 0


def _output(data: bytes, number: int, console: StoredConsole) -> None:
    stream, text = 0, b""
    for field, wire, value in fields(data):
        if field == 1 and wire == 0:
            stream = value
        elif field == 3 and wire == 2:
            text = value
    # Clients of 2023 and 2024 stored the end of a line as a piece without text.
    console.piece(text or b"\n", number, stream)


def _history(data: bytes, number: int, sink: Sink) -> None:
    row: dict[str, Any] = {}
    for field, wire, value in fields(data):
        if field == 1 and wire == 2:
            key, cell = _item(value)
            row |= flat({key: cell}) if isinstance(cell, dict) else {key: cell}
        elif field == 2 and wire == 2:
            steps = [inner for part, kind, inner in fields(value) if part == 1 and kind == 0]
            row.setdefault("_step", steps[0] if steps else 0)
    if row:
        sink.row(row, number)


def _item(data: bytes) -> tuple[str, Any]:
    key, nested, text = "", [], ""
    for field, wire, value in fields(data):
        if wire != 2:
            continue
        if field == 1:
            key = value.decode("utf-8")
        elif field == 2:
            nested.append(value.decode("utf-8"))
        elif field == 16:
            text = value.decode("utf-8")
    cell = json.loads(text) if len(text) <= MAX_DIGITS or not text.lstrip("-")[:1].isdigit() else text
    return key or ".".join(nested), str(cell)[:1000] if isinstance(cell, list) else cell
