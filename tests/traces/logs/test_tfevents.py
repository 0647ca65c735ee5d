"""TensorBoard's event files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.traces.logs.opening import sources
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.tfevents import is_events, masked_crc, read_events
from tests.traces.logs.make import event, events, sink_of


def _file(tmp_path: Path, data: bytes) -> Path:
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(data)
    return file


def test_checksum_known_answer() -> None:
    # CRC-32C of "123456789" is E3069283 (RFC 3720); masked as TFRecord does.
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_points_of_one_step_are_one_row(tmp_path: Path) -> None:
    data = events(
        event(1, {"loss": 0.5, "kl": math.nan}),
        event(1, {"reward": 0.25}, tensor=True),
        event(2, {"loss": math.inf}),
        event(2, {"loss": 0.75}),
        event(2**40, {"loss": 1.5}),
    )
    sink = sink_of(_file(tmp_path, data))
    rows = sink.runs[""].store.finish()
    assert rows.columns["step"].values.tolist() == [1, 2, 2, 2**40]
    assert rows.columns["loss"].values.tolist() == [0.5, math.inf, 0.75, 1.5]
    assert rows.columns["reward"].values.tolist() == [0.25]
    assert np.isnan(rows.columns["kl"].values).tolist() == [True]
    assert rows.lines.tolist() == [2, 4, 5, 6]
    assert rows.columns["wall_time"].values.tolist() == [1.5] * 4


def test_all_points_are_read(tmp_path: Path) -> None:
    data = events(*(event(step, {"loss": step / 2}) for step in range(10_001)))
    rows = sink_of(_file(tmp_path, data)).runs[""].store.finish()
    assert np.array_equal(rows.columns["loss"].values, np.arange(10_001) / 2)


def test_header_only_truncated_and_damaged(tmp_path: Path) -> None:
    sink = sink_of(_file(tmp_path, events()))
    assert not sink.runs
    assert "header only" in sink.notes[0]
    whole = events(event(1, {"a": 1.0}), event(2, {"a": 2.0}))
    sink = sink_of(_file(tmp_path, whole[:-3]))
    assert len(sink.runs[""].store) == 1
    assert list(sink.skipped) == ["cut short"]
    damaged = bytearray(whole)
    damaged[-6] ^= 1  # in the number of the last point
    sink = sink_of(_file(tmp_path, bytes(damaged)))
    assert sink.runs[""].store.finish().columns["a"].values.tolist() == [1.0]
    assert list(sink.skipped) == ["a record whose checksum is wrong"]


def test_negative_steps_are_kept_as_such(tmp_path: Path) -> None:
    rows = sink_of(_file(tmp_path, events(event(2**64 - 1, {"a": 1.0})))).runs[""].store.finish()
    assert rows.columns["step"].values.tolist() == [-1]


_WHOLE = events(event(1, {"loss": 0.5}), event(2, {"loss": 0.25}, tensor=True))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(_WHOLE) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 200))
def test_damage_never_fails_nor_makes_numbers(tmp_path_factory, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(_WHOLE)
    for place, byte in changes:
        data[place] = byte
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(bytes(data[: len(data) - cut]))
    sink = Sink()
    for source in sources(file):
        if is_events(source.peek()):
            read_events(source, sink)
    found = sink.runs[""].store.finish().columns["loss"].values.tolist() if sink.runs else []
    assert set(found) <= {0.5, 0.25}
