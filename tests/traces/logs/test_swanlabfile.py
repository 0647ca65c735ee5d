"""SwanLab's binary files, written here by the layouts of versions 1 (JSON) and 2 (protobuf)."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, read
from tests.traces.logs.make import blocks, field, varint


def scalar(key: str, step: int, value: float) -> bytes:
    number = field(1, 1, struct.pack("<d", value)) if value or math.isnan(value) else b""  # proto3 leaves out 0
    said = field(2, 0, varint(step)) if step else b""
    body = field(1, 2, key.encode()) + said + field(3, 0, varint(1)) + field(5, 2, number)
    return field(1, 0, varint(7)) + field(13, 2, body)


def start(name: str) -> bytes:
    return field(1, 0, varint((1 << 64) - 1)) + field(10, 2, field(1, 2, b"project") + field(4, 2, name.encode()))


def line(text: str) -> bytes:
    return field(16, 2, field(1, 2, text.encode()))


def finish(state: int, error: str = "") -> bytes:
    return field(11, 2, field(1, 0, varint(state)) + (field(2, 2, error.encode()) if error else b""))


def swanlab(*records: bytes, version: int = 2) -> bytes:
    return blocks(struct.pack("<4sHB", b":SWL", 0xE1D6, version), *records)


def point(key: str, step: int, value: object) -> bytes:
    data = {"metric": {"index": step, "data": value}, "key": key, "step": step, "epoch": 1}
    return (json.dumps({"model_type": "Scalar", "data": data}) + "\n").encode()


def _read(folder: Path, data: bytes) -> LogTrace:
    (folder / "run-a.swanlab").write_bytes(data)
    (log,) = read(folder / "run-a.swanlab")
    return log


def test_scalars(tmp_path: Path) -> None:
    values = [0.5, math.nan, math.inf, -math.inf, 0.0]
    points = [(scalar("actor/grad_norm", n, x), scalar("actor/lr", n, 1e-6 * n)) for n, x in enumerate(values)]
    media = field(14, 2, field(1, 2, b"picture"))
    records = [
        start("sunny"),
        *(one for pair in points for one in pair),
        media,
        finish(2, "x\nKeyError"),
    ]
    log = _read(tmp_path, swanlab(*records))
    assert (log.info.framework, log.info.container) == ("verl", "SwanLab binary file")
    assert log.trace.steps.index.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(log.trace.values("grad_norm"), values, equal_nan=True)
    assert log.status["grad_norm"].tolist() == ["measured", "nan", "pos inf", "neg inf", "measured"]
    assert log.trace.values("learning_rate").tolist() == [1e-6 * n for n in range(5)]
    assert log.info.facts == {"run": "sunny", "state": "crashed"}
    assert [finding.text for finding in log.info.findings] == ["KeyError"]


def test_json_of_older_versions(tmp_path: Path) -> None:
    other = [{"model_type": "Experiment", "data": {"name": "sunny"}}, {"model_type": "Column", "data": {"key": "x"}}]
    records = [
        *(json.dumps(one).encode() + b"\n" for one in other),
        point("actor/grad_norm", 1, 0.5),
        point("actor/lr", 1, 1e-6),
        point("actor/grad_norm", 2, "NaN"),
        point("actor/grad_norm", 3, "INF"),
        point("__swanlab__.cpu.pct", 0, 50.0),
        b'{"model_type": "Footer", "data": {"success": true}}\n',
        b"nothing of it\n",
    ]
    log = _read(tmp_path, swanlab(*records, version=1))
    assert log.trace.steps.index.tolist() == [1, 2, 3]
    # "INF" is written for both infinities, so all that is known is that the value was not finite.
    assert log.status["grad_norm"].tolist() == ["measured", "nan text", "nonfinite"]
    assert log.original["actor/grad_norm"].tolist()[2] == "INF"
    assert np.array_equal(log.trace.values("grad_norm"), [0.5, math.nan, math.nan], equal_nan=True)
    assert log.info.facts == {"run": "sunny", "state": "finished"}
    assert "__swanlab__.cpu.pct" not in log.original
    assert [str(skipped) for skipped in log.info.skipped] == ["1 line (9): a record that is none of SwanLab's"]


def test_console_output(tmp_path: Path) -> None:
    log = _read(tmp_path, swanlab(start("a"), line("step:1 - actor/grad_norm:0.5 - actor/lr:1e-6"), line("Killed")))
    assert log.trace.values("grad_norm").tolist() == [0.5]
    assert [finding.kind for finding in log.info.findings] == ["killed"]


def test_truncated_empty_and_unknown(tmp_path: Path) -> None:
    whole = swanlab(scalar("actor/lr", 1, 0.5), scalar("actor/lr", 2, 0.25))
    log = _read(tmp_path, whole[:-3])
    assert log.trace.values("learning_rate").tolist() == [0.5]
    assert [skipped.reason for skipped in log.info.skipped] == ["cut short"]
    assert not _read(tmp_path, swanlab()).has_metrics
    with pytest.raises(TraceError, match="version 9 of its layout"):
        _read(tmp_path, swanlab(version=9))


def test_copies_of_points_in_its_folder_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "logs" / "1").mkdir(parents=True)
    (tmp_path / "logs" / "1" / "1000.log").write_text('{"index": 1, "data": 9.0}\n')
    (tmp_path / "run-a.swanlab").write_bytes(swanlab(scalar("actor/lr", 1, 0.5)))
    (log,) = read(tmp_path)
    assert log.trace.values("learning_rate").tolist() == [0.5]


_WHOLE = swanlab(scalar("actor/lr", 1, 0.5), scalar("actor/lr", 2, 0.25))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(7, len(_WHOLE) - 1), st.integers(0, 255)), max_size=3), st.integers(0, 90))
def test_damage_makes_no_numbers(tmp_path_factory, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(_WHOLE)
    for place, byte in changes:
        data[place] = byte
    log = _read(tmp_path_factory.getbasetemp(), bytes(data[: max(7, len(data) - cut)]))
    assert set(log.original.get("actor/lr", [])) <= {0.5, 0.25}
