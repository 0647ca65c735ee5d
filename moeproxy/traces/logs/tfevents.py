"""TensorBoard event files: every scalar point, read from the records themselves.

A record is its length (8 bytes), a checksum of these, the data, and a checksum of the data; the data is a protobuf
`Event`: 1 wall time (double), 2 step, 3 file version, 5 summary, of which every 1 is a value with 1 tag, 2 number
(float32), 8 tensor. Libraries that read them keep 10,000 points of a tag; a curve must keep all.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink

MAX_RECORD = 1 << 28
CHECKED = 4096
"""Bytes up to which the checksum of a record's data is verified; scalars are small, images and graphs are not read."""

_FLOAT, _DOUBLE = 1, 2  # tensor types
_MASK = 0xFFFFFFFF


class Malformed(ValueError):
    """Bytes that are no protobuf message of the expected kind."""


def is_events(head: bytes) -> bool:
    """Return whether a file begins like an event file."""
    return len(head) >= 12 and struct.unpack("<I", head[8:12])[0] == masked_crc(head[:8]) and _length(head) < MAX_RECORD


def read_events(source: Source, sink: Sink) -> None:
    """Read an event file into a sink: one row for the points of one step that lie together. Lines are records."""
    sink.container = "TensorBoard events"
    row: dict[str, Any] = {}
    start = 0
    for number, data in records(source.stream, sink):
        sink.lines = number
        try:
            step, wall, points = _event(data)
        except (Malformed, struct.error, UnicodeDecodeError, IndexError):
            sink.skip(number, "a record that is no event")
            continue
        for tag, value in points:
            if row and (row["step"] != step or tag in row):
                sink.row(row, start)
                row = {}
            if not row:
                row, start = {"step": step, "wall_time": wall}, number
            row[tag] = value
    if row:
        sink.row(row, start)
    if not sink.runs:
        sink.note("an event file without a scalar; a run that died early leaves its header only")


def records(stream: io.BufferedIOBase, sink: Sink) -> Iterator[tuple[int, bytes]]:
    """Yield (number, data) of every whole record; what follows a damaged one is left out with a note."""
    number = 0
    while head := stream.read(12):
        number += 1
        if len(head) < 12:
            sink.skip(number, "cut short")
            return
        length = _length(head)
        if struct.unpack("<I", head[8:])[0] != masked_crc(head[:8]) or length > MAX_RECORD:
            sink.skip(number, "a damaged record; what follows it cannot be found")
            return
        data, tail = stream.read(length), stream.read(4)
        if len(data) < length or len(tail) < 4:
            sink.skip(number, "cut short")
            return
        if length <= CHECKED and struct.unpack("<I", tail)[0] != masked_crc(data):
            sink.skip(number, "a record whose checksum is wrong")
            continue
        yield number, data


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files carry."""
    value = _MASK
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= _MASK
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & _MASK


def _length(head: bytes) -> int:
    return struct.unpack("<Q", head[:8])[0]


def fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield (field, wire type, value) of a message: integers for 0, bytes for the others."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
        else:
            size, place = _varint(data, place) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), place)
            if size < 0 or place + size > len(data):
                raise Malformed
            value, place = data[place : place + size], place + size
        yield field, wire, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise Malformed


def _event(data: bytes) -> tuple[int, float, list[tuple[str, float]]]:
    step, wall, points = 0, float("nan"), []
    for field, wire, value in fields(data):
        if field == 1 and wire == 1:
            wall = struct.unpack("<d", value)[0]
        elif field == 2 and wire == 0:
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and wire == 2:
            values = [inner for part, kind, inner in fields(value) if (part, kind) == (1, 2)]
            points += [point for inner in values for point in _point(inner)]
    return step, wall, points


def _point(data: bytes) -> Iterator[tuple[str, float]]:
    tag, number = "", None
    for field, wire, value in fields(data):
        if field == 1 and wire == 2:
            tag = value.decode("utf-8")
        elif field == 2 and wire == 5:
            number = struct.unpack("<f", value)[0]
        elif field == 8 and wire == 2:
            number = _tensor(value)
    if number is not None:
        yield tag, number


def _tensor(data: bytes) -> float | None:
    """Return the number of a tensor of one float or double; None for others (text, images, histograms)."""
    kind, numbers = 0, b""
    for field, wire, value in fields(data):
        if field == 1 and wire == 0:
            kind = value
        elif field in (4, 5, 6) and wire in (1, 2, 5):
            numbers = value
    layout = {(_FLOAT, 4): "<f", (_DOUBLE, 8): "<d"}.get((kind, len(numbers)))
    return struct.unpack(layout, numbers)[0] if layout else None
