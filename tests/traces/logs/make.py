"""Small logs, written as the programs write them."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa

from moeproxy.traces.logs.blocks import BLOCK
from moeproxy.traces.logs.dispatch import fill, kind_of
from moeproxy.traces.logs.opening import sources
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.tfevents import masked_crc


def sink_of(path: Path) -> Sink:
    """Read one file into a sink."""
    (sink,) = [
        sink for source in sources(path) if (sink := Sink()) is not None and not fill(source, kind_of(source), sink)
    ]
    return sink


def tarred(members: dict[str, bytes], mode: str = "w") -> bytes:
    """Return a tar of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a zip of these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    """Return data compressed by zstd."""
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def record(data: bytes) -> bytes:
    """Return a TFRecord."""
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def field(number: int, wire: int, data: bytes) -> bytes:
    """Return a field of a protobuf message."""
    return varint(number << 3 | wire) + (varint(len(data)) if wire == 2 else b"") + data


def varint(value: int) -> bytes:
    """Return an integer as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def event(step: int, values: dict[str, float], *, tensor: bool = False) -> bytes:
    """Return an Event with scalars, as simple values or as TensorFlow 2 writes them."""
    body = field(1, 1, struct.pack("<d", 1.5)) + field(2, 0, varint(step))
    for tag, value in values.items():
        number = struct.pack("<f", value)
        scalar = field(8, 2, field(1, 0, varint(1)) + field(4, 2, number)) if tensor else field(2, 5, number)
        body += field(5, 2, field(1, 2, field(1, 2, tag.encode()) + scalar))
    return body


def events(*bodies: bytes) -> bytes:
    """Return an event file with its header."""
    version = field(1, 1, struct.pack("<d", 1.0)) + field(3, 2, b"brain.Event:2")
    return b"".join(map(record, (version, *bodies)))


def blocks(header: bytes, *bodies: bytes) -> bytes:
    """Return a file of LevelDB blocks, as wandb and SwanLab write it."""
    out = bytearray(header)
    for data in bodies:
        first = True
        while True:
            room = BLOCK - len(out) % BLOCK
            if room < 7:
                out += b"\0" * room
                room = BLOCK
            piece, data = data[: room - 7], data[room - 7 :]
            kind = (1 if not data else 2) if first else (4 if not data else 3)
            out += struct.pack("<IHB", zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
            first = False
            if not data:
                break
    return bytes(out)
