"""The binary container that wandb and SwanLab share: blocks of LevelDB's log format under a header of 7 bytes.

The header is a name (4 bytes), a magic number (2) and a version (1). Then come blocks of 32 KiB with pieces: a checksum
(4 bytes), a length (2), a kind (1: whole, 2: first, 3: middle, 4: last) and the data; pieces make up records.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

from moeproxy.traces.logs.sink import Sink

HEADER, BLOCK, HEAD = 7, 32_768, 7
MAX_RECORD = 64 << 20
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(stream: io.BufferedIOBase, sink: Sink) -> Iterator[tuple[int, bytes]]:
    """Yield (number, record) after the header was read; where a piece is damaged or missing, its record is left out."""
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
        if kind in (_MIDDLE, _LAST) and not parts:
            sink.skip(number + 1, "the end of a record whose start is missing")
            continue
        parts = [data] if kind in (_WHOLE, _FIRST) else [*parts, data]
        if kind in (_WHOLE, _LAST):
            number += 1
            yield number, b"".join(parts)
            parts = []
        elif sum(map(len, parts)) > MAX_RECORD:
            sink.skip(number + 1, f"longer than {MAX_RECORD >> 20} MiB")
            parts = []
