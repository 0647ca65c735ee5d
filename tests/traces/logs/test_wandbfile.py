"""wandb's binary files, built piece by piece."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, read
from moeproxy.traces.logs.wandbfile import BLOCK
from tests.traces.logs.make import field, varint


def history(step: int, cells: dict[str, str], *, nested: bool = False) -> bytes:
    body = b""
    for key, text in cells.items():
        name = b"".join(field(2, 2, part.encode()) for part in key.split(".")) if nested else field(1, 2, key.encode())
        body += field(1, 2, name + field(16, 2, text.encode()))
    return field(1, 0, varint(7)) + field(2, 2, body + field(2, 2, field(1, 0, varint(step))))


def wandb(*records: bytes) -> bytes:
    out = bytearray(b":W&B\xe1\xbe\0")
    for data in records:
        first = True
        while True:
            room = BLOCK - len(out) % BLOCK
            if room < 7:
                out += b"\0" * room
                room = BLOCK
            piece, data = data[: room - 7], data[room - 7 :]
            kind = (1 if not data else 2) if first else (4 if not data else 3)
            check = zlib.crc32(piece, zlib.crc32(bytes([kind])))
            out += struct.pack("<IHB", check, len(piece), kind) + piece
            first = False
            if not data:
                break
    return bytes(out)


def _read(folder: Path, data: bytes) -> LogTrace:
    (folder / "run-1.wandb").write_bytes(data)
    (log,) = read(folder / "run-1.wandb")
    return log


RUN = field(17, 2, field(8, 2, b"sunny-1"))
EXIT = field(18, 2, field(1, 0, varint(255)))


@pytest.mark.parametrize("nested", [False, True])
def test_history(tmp_path: Path, nested: bool) -> None:
    records = [
        RUN,
        history(0, {"actor/grad_norm": "0.5", "actor/lr": "1e-6"}, nested=nested),
        history(1, {"actor/grad_norm": "NaN", "h": '{"_type": "histogram"}'}, nested=nested),
        history(2, {"actor/grad_norm": "Infinity"}, nested=nested),
        EXIT,
    ]
    log = _read(tmp_path, wandb(*records))
    assert log.info.framework == "verl"
    assert log.trace.steps.index.tolist() == [0, 1, 2]
    assert log.status["grad_norm"].tolist() == ["measured", "nan", "pos inf"]
    assert log.trace.values("learning_rate")[0] == 1e-6
    assert log.original["h/_type"].tolist()[1] == "histogram"
    assert log.info.facts == {"run": "sunny-1", "exit code": 255}
    assert math.isnan(log.trace.values("grad_norm")[1])


def test_records_over_several_blocks(tmp_path: Path) -> None:
    long = history(1, {"actor/lr": "0.25", "table": '"' + "x" * 100_000 + '"'})
    log = _read(tmp_path, wandb(history(0, {"actor/lr": "0.5"}), long, history(2, {"actor/lr": "0.125"})))
    assert log.trace.values("learning_rate").tolist() == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("length", range(32_735, 32_762, 3))
def test_ends_of_blocks(tmp_path: Path, length: int) -> None:
    first = history(0, {"actor/lr": "0.5", "x": '"' + "y" * (length - 60) + '"'})
    log = _read(tmp_path, wandb(first, history(1, {"actor/lr": "0.25"})))
    assert log.trace.values("learning_rate").tolist() == [0.5, 0.25]


def test_truncated_damaged_and_empty(tmp_path: Path) -> None:
    whole = wandb(history(0, {"actor/lr": "0.5"}), history(1, {"actor/lr": "0.25"}))
    log = _read(tmp_path, whole[:-4])
    assert log.trace.values("learning_rate").tolist() == [0.5]
    assert [skipped.reason for skipped in log.info.skipped] == ["cut short"]
    damaged = bytearray(whole)
    damaged[-3] ^= 1
    assert "checksum is wrong" in _read(tmp_path, bytes(damaged)).info.skipped[0].reason
    log = _read(tmp_path, wandb(RUN))
    with pytest.raises(TraceError, match="no metric"):
        log.trace  # noqa: B018 - reading it raises
    assert any("without history" in note for note in log.info.notes)


_WHOLE = wandb(history(0, {"actor/lr": "0.5"}), history(1, {"actor/lr": "0.25"}))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(7, len(_WHOLE) - 1), st.integers(0, 255)), max_size=3), st.integers(0, 90))
def test_damage_makes_no_numbers(tmp_path_factory, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(_WHOLE)
    for place, byte in changes:
        data[place] = byte
    log = _read(tmp_path_factory.getbasetemp(), bytes(data[: max(7, len(data) - cut)]))
    assert set(log.original.get("actor/lr", [])) <= {0.5, 0.25}
