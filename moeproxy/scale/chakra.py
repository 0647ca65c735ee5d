"""Chakra execution traces of recorded ranks, for simulators that read them (ASTRA-sim).

MLCommons' schema (github.com/mlcommons/chakra, schema/protobuf/et_def.proto, Apache 2.0) is Protocol Buffers: a file is
a `GlobalMetadata` and then one `Node` after the other, each behind its length. The few fields used here are written
directly, so nothing has to be installed. `SCALE.md` says how it was checked against the schema's own code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeproxy.errors import ScaleError
from moeproxy.files import atomic_dir
from moeproxy.scale import checks
from moeproxy.scale.recording import Recording, read_calls

SCHEMA = "0.0.4"
_COMP, _COLLECTIVE = 4, 7
_TYPES = {"allreduce": 0, "allgather": 2, "broadcast": 5, "alltoall": 6, "reduce_scatter": 7, "barrier": 9}


@dataclass(frozen=True)
class Call:
    """One collective of a recorded rank.

    Args:
        op: as the backend names it.
        group: name of the process group.
        ranks: that take part.
        began, seconds: when it began and how long it took, in the recording process's own clock.
        nbytes: of what it returned.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    began: float
    seconds: float
    nbytes: int

    @property
    def kind(self) -> str:
        """Name without the variants of torch."""
        return next((name for name in _TYPES if self.op.lstrip("_").startswith(name)), "")

    @property
    def sent(self) -> int:
        """Bytes that go in on this rank, which is what simulators ask for (exchanges: as many as come out)."""
        scale = {"allgather": 1 / len(self.ranks), "reduce_scatter": len(self.ranks)}
        return round(self.nbytes * scale.get(self.kind, 1))


def write_chakra(recording: Recording, path: str | Path) -> Path:
    """Write every recorded rank's collectives, and the time between them as computing, as Chakra traces.

    Args:
        recording: what `record` made.
        path: directory to write, complete or not at all: `trace.<rank>.et`, and `comm_group.json` with the ranks of
            each process group; must not exist.

    Raises:
        ScaleError: `path` exists, or the recording is damaged or of a version that kept no order of its collectives.
    """
    checks.kind(Recording, "pass Recording.open(path)", recording=recording)
    if Path(path).exists():
        raise ScaleError("exists already", where=path, remedy="remove it or choose another path")
    groups: dict[str, list[int]] = {}
    with atomic_dir(path) as folder:
        for rank in range(recording.world):
            calls = calls_of(recording, rank)
            groups |= {call.group: list(call.ranks) for call in calls}
            (folder / f"trace.{rank}.et").write_bytes(encoded(calls))
        (folder / "comm_group.json").write_text(json.dumps(groups), encoding="utf-8")
    return Path(path)


def calls_of(recording: Recording, rank: int) -> list[Call]:
    """Return a rank's collectives with others, in the order in which they began."""
    found = [
        Call(op, group, _ranks(group, recording.world), began, seconds, nbytes)
        for group, op, began, seconds, nbytes in read_calls(recording.rank_file(rank))
    ]
    return sorted((call for call in found if len(call.ranks) > 1), key=lambda call: call.began)


def _ranks(group: str, world: int) -> tuple[int, ...]:
    names = group.partition("#")[0]
    return tuple(range(world)) if names == "all" else tuple(map(int, names.split(",")))


def encoded(calls: list[Call]) -> bytes:
    """Return the bytes of one rank's trace: each node waits for the one before it."""
    messages = [_text(1, SCHEMA), *_nodes(calls)]
    return b"".join(_varint(len(message)) + message for message in messages)


def _nodes(calls: list[Call]) -> Iterator[bytes]:
    number, free = 0, calls[0].began if calls else 0.0
    for call in calls:
        computed = max(call.began - free, 0.0)
        yield _node(number, "compute", _COMP, computed, [])
        attributes = [
            _attribute("comm_type", 9, _varint(_TYPES[call.kind])),
            _attribute("comm_size", 9, _varint(call.sent)),
            _text(1, "pg_name") + _text(29, call.group),
        ]
        yield _node(number + 1, call.op, _COLLECTIVE, call.seconds, attributes)
        number, free = number + 2, call.began + call.seconds


def _node(number: int, name: str, kind: int, seconds: float, attributes: list[bytes]) -> bytes:
    waits = _message(5, _varint(number - 1)) if number else b""
    placed = _number(1, number) + _text(2, name) + _number(3, kind) + waits + _number(7, round(seconds * 1e6))
    device = _attribute("is_cpu_op", 27, _varint(0))
    return placed + b"".join(_message(10, attribute) for attribute in [device, *attributes])


def _attribute(name: str, field: int, value: bytes) -> bytes:
    return _text(1, name) + _varint(field << 3) + value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""  # zero is what a missing number means


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the highest bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
