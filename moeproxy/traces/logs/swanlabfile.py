"""SwanLab's binary files (`run-*.swanlab`, before 0.8 `backup.swanlab`), truncated ones too, without swanlab.

The container is that of `blocks`. Version 2 holds protobuf messages `Record` (its `protos/swanlab/record/v1`), of which
are read: 10 start (4 name), 11 finish (1 state, 2 error), 13 scalar (1 key, 2 step, 4 time, 5 value: 1 number) and 16
console line (1 text). Versions 0 and 1 hold JSON such as `{"model_type": "Scalar", "data": {"key": "loss", "step": 1,
"metric": {"data": 0.5}}}`.
Checked against files that SwanLab 0.7.8 and 0.10.3 wrote.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logs.blocks import HEADER, records
from moeproxy.traces.logs.cells import Status
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.stored import StoredConsole
from moeproxy.traces.logs.tfevents import Malformed, fields

MARK = b":SWL"
_STATES = {1: "finished", 2: "crashed", 3: "aborted"}
_SYSTEM = "__swanlab__."
"""Before the keys of the machine's own figures, whose steps count something else."""

_BROKEN = (Malformed, IndexError, UnicodeDecodeError, ValueError, RecursionError, KeyError, TypeError, struct.error)


class _File:
    """What is read so far: the points of one step that lie together are one row."""

    def __init__(self, sink: Sink) -> None:
        self.sink, self.console = sink, StoredConsole()
        self._row: dict[str, Any] = {}
        self._start = 0

    def point(self, key: str, step: int, value: Any, number: int) -> None:
        if key.startswith(_SYSTEM):
            return
        if self._row and (self._row["step"] != step or key in self._row):
            self.end()
        if not self._row:
            self._row, self._start = {"step": step}, number
        self._row[key] = value

    def end(self) -> None:
        if self._row:
            self.sink.row(self._row, self._start)
        self._row = {}


def read_swanlab(source: Source, sink: Sink) -> None:
    """Read a binary file of SwanLab into a sink. Lines are records.

    Raises:
        TraceError: the file is of a version that is not known.
    """
    sink.container = "SwanLab binary file"
    head = source.stream.read(HEADER)
    take = _reader(head[6:], source.name)
    file = _File(sink)
    for number, data in records(source.stream, sink):
        sink.lines = number
        try:
            take(data, number, file)
        except _BROKEN:
            sink.skip(number, "a record that is none of SwanLab's")
    file.end()
    file.console.finish(sink)
    if not sink.runs:
        sink.note("a file of SwanLab without a scalar: the run logged nothing, or died before")


def _reader(version: bytes, where: str) -> Callable[[bytes, int, _File], None]:
    if version in (b"\0", b"\1"):
        return _json
    if version in (b"\2", b""):
        return _message
    raise TraceError(
        f"a file of SwanLab in version {version[0]} of its layout",
        where=where,
        expected="version 0, 1 or 2",
        remedy="export the run's charts as CSV from its page and read that",
    )


def _message(data: bytes, number: int, file: _File) -> None:
    for field, wire, value in fields(data):
        if wire != 2:
            continue
        if field == 13:
            _scalar(value, number, file)
        elif field == 16:
            text = b"".join(inner for part, kind, inner in fields(value) if (part, kind) == (1, 2))
            file.console.piece(text + b"\n", number)
        elif field == 10:
            _start(value, file.sink)
        elif field == 11:
            _finish(value, number, file.sink)


def _scalar(data: bytes, number: int, file: _File) -> None:
    key, step, value = "", 0, 0.0  # proto3 leaves out what is 0
    there = False
    for field, wire, inner in fields(data):
        if field == 1 and wire == 2:
            key = inner.decode("utf-8")
        elif field == 2 and wire == 0:
            step = inner - (1 << 64) if inner >> 63 else inner
        elif field == 5 and wire == 2:
            there = True
            for part, kind, raw in fields(inner):
                if (part, kind) == (1, 1):
                    value = struct.unpack("<d", raw)[0]
    if not key or not there:
        raise Malformed
    file.point(key, step, value, number)


def _start(data: bytes, sink: Sink) -> None:
    for field, wire, value in fields(data):
        if field == 4 and wire == 2:
            sink.facts["run"] = value.decode("utf-8")


def _finish(data: bytes, number: int, sink: Sink) -> None:
    for field, wire, value in fields(data):
        if field == 1 and wire == 0:
            sink.facts["state"] = _STATES.get(value, "running")
        elif field == 2 and wire == 2:
            lines = value.decode("utf-8", "replace").strip().splitlines()
            if lines:
                sink.find("error", number, lines[-1])


def _json(data: bytes, number: int, file: _File) -> None:
    found = json.loads(data)
    kind, content = found["model_type"], found["data"]
    if kind == "Scalar":
        file.point(str(content["key"]), _whole(content["step"]), _cell(content["metric"]["data"]), number)
    elif kind == "Log":
        file.console.piece(str(content["message"]).encode("utf-8", "replace") + b"\n", number)
    elif kind == "Experiment":
        file.sink.facts["run"] = str(content["name"])
    elif kind == "Footer":
        file.sink.facts["state"] = "finished" if content["success"] else "crashed"


def _whole(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError
    return step


def _cell(value: Any) -> Any:
    """Return a value; "INF" stands for both infinities there, so its sign is not known."""
    return (math.nan, Status.NONFINITE, "INF") if value == "INF" else value
