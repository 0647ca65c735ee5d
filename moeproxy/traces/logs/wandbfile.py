"""wandb's binary files (`run-*.wandb`), truncated ones too, without wandb.

After 7 bytes of header come blocks of 32 KiB of LevelDB's log format: pieces with a checksum (4 bytes), a length (2)
and a kind (1: whole, 2: first, 3: middle, 4: last). Together they are protobuf messages `Record`, of which are read:
2 history (1 item: 1 key, 2 nested key, 16 value as JSON; 2 step: 1 number), 17 run (8 display name) and 18 exit
(1 code).
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from moeproxy.traces.logs.cells import MAX_DIGITS
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.text import TooDeep, flat
from moeproxy.traces.logs.tfevents import Malformed, fields

HEADER, BLOCK, HEAD = 7, 32_768, 7
MAX_RECORD = 64 << 20
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_wandb(source: Source, sink: Sink) -> None:
    """Read a binary file of wandb into a sink. Lines are records."""
    sink.container = "wandb binary file"
    for number, data in _records(source.stream, sink):
        sink.lines = number
        try:
            _record(data, number, sink)
        except (Malformed, IndexError, UnicodeDecodeError, ValueError, RecursionError, TooDeep):
            sink.skip(number, "a record that is none of wandb's")
    if not sink.runs:
        sink.note("a file of wandb without history: the run logged nothing, or died before")


def _records(stream: io.BufferedIOBase, sink: Sink) -> Iterator[tuple[int, bytes]]:
    """Yield (number, message); where a piece is damaged or missing, its message is left out."""
    stream.read(HEADER)
    number, room, parts = 0, BLOCK - HEADER, []
    while True:
        if room < HEAD:
            stream.read(room)
            room = BLOCK
        head = stream.read(HEAD)
        if len(head) < HEAD:
            if head or parts:
                sink.skip(number + 1, "cut short")
            return
        check, length, kind = struct.unpack("<IHB", head)
        data = stream.read(min(length, room - HEAD))
        room -= HEAD + len(data)
        if kind == 0 and length == 0:
            continue
        if len(data) < length:
            sink.skip(number + 1, "cut short")
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != check:
            sink.skip(number + 1, "a piece whose checksum is wrong; the rest of its block is left out")
            stream.read(room)
            room, parts = BLOCK, []
            continue
        parts = [data] if kind in (_WHOLE, _FIRST) else [*parts, data]
        if kind in (_WHOLE, _LAST):
            number += 1
            yield number, b"".join(parts)
            parts = []
        elif sum(map(len, parts)) > MAX_RECORD:
            sink.skip(number + 1, "longer than 64 MiB")
            parts = []


def _record(data: bytes, number: int, sink: Sink) -> None:
    for field, wire, value in fields(data):
        if wire != 2:
            continue
        if field == 2:
            _history(value, number, sink)
        elif field == 17:
            for part, kind, inner in fields(value):
                if part == 8 and kind == 2:
                    sink.facts["run"] = inner.decode("utf-8")
        elif field == 18:
            codes = [inner for part, kind, inner in fields(value) if part == 1 and kind == 0]
            sink.facts["exit code"] = codes[0] if codes else 0


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
