"""Chakra traces: the bytes that the schema's own code writes for the same nodes; order, sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import ScaleError
from moeproxy.scale import GRPOProgram, Recording, write_chakra
from moeproxy.scale.chakra import Call, calls_of, encoded
from moeproxy.scale.recording import write_index, write_log
from tests.scale.conftest import TINY

CALLS = [
    Call("_allgather_base", "0,2#1", (0, 2), 10.0, 0.25, 2000),
    Call("_reduce_scatter_base", "all#1", (0, 1, 2), 10.75, 0.0015, 200),
    Call("allreduce", "all#1", (0, 1, 2), 10.7515, 3e-6, 8),
]
# Written by protobuf 7.36 from classes that protoc made of et_def.proto (mlcommons/chakra 21585d8), deterministic.
GOLDEN = bytes.fromhex(
    "070a05302e302e341b1207636f6d707574651804520e0a0969735f6370755f6f70d801005e0801120f5f616c6c6761746865"
    "725f6261736518072a01003890a10f520e0a0969735f6370755f6f70d80100520d0a09636f6d6d5f747970654802520e0a09"
    "636f6d6d5f73697a6548e80752110a0770675f6e616d65ea0105302c3223312408021207636f6d7075746518042a010138a0"
    "c21e520e0a0969735f6370755f6f70d8010062080312145f7265647563655f736361747465725f6261736518072a010238dc"
    "0b520e0a0969735f6370755f6f70d80100520d0a09636f6d6d5f747970654807520e0a09636f6d6d5f73697a6548d8045211"
    "0a0770675f6e616d65ea0105616c6c23312008041207636f6d7075746518042a0103520e0a0969735f6370755f6f70d80100"
    "5508051209616c6c72656475636518072a01043803520e0a0969735f6370755f6f70d80100520d0a09636f6d6d5f74797065"
    "4800520d0a09636f6d6d5f73697a65480852110a0770675f6e616d65ea0105616c6c2331"
)


def test_the_bytes_are_those_of_the_schemas_own_code() -> None:
    assert encoded(CALLS) == GOLDEN
    assert encoded([]) == GOLDEN[:8], "a trace without nodes still says its version"


def test_what_goes_in_is_what_counts() -> None:
    ranks = (0, 1, 2, 3)

    def call(op: str) -> Call:
        return Call(op, "all#1", ranks, 0.0, 0.0, 400)

    sent = {op: call(op).sent for op in ("allgather_into_tensor_coalesced", "_reduce_scatter_base", "alltoall_base")}
    assert sent == {"allgather_into_tensor_coalesced": 100, "_reduce_scatter_base": 1600, "alltoall_base": 400}
    kinds = ["reduce_scatter_tensor_coalesced", "allreduce_coalesced", "broadcast", "barrier"]
    assert [call(op).kind for op in kinds] == ["reduce_scatter", "allreduce", "broadcast", "barrier"]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    torch = pytest.importorskip("torch")
    from moeproxy.scale.backends import Event

    folder = tmp_path / "run"
    folder.mkdir()
    runs: dict[str, Any] = {name: [[0.0]] * 2 for name in ("losses", "logprobs", "seconds")}
    program = GRPOProgram(TINY, prompt=8, completion=8).to_dict()
    write_index(
        folder, program=program, world=2, ep=1, steps=1, provenance={"machine": "a box"}, weights=["", ""], **runs
    )
    log = {
        "all#1": [Event("allreduce", 0.5, [torch.zeros(2)], 7.0), Event("_allgather_base", 0.5, [torch.zeros(4)], 5.0)],
        "0,1#1": [Event("alltoall_base", 0.5, [torch.zeros(3)], 6.0)],
        "1#1": [Event("allreduce", 0.5, [torch.zeros(9)], 6.5)],  # with nobody: no communication
    }
    for rank in (0, 1):
        write_log(folder / f"rank-{rank}.safetensors", log)
    return Recording.open(folder)


def test_every_rank_in_the_order_of_the_run(recording: Recording, tmp_path: Path) -> None:
    calls = calls_of(recording, 1)
    assert [(call.op, call.ranks, call.nbytes) for call in calls] == [
        ("_allgather_base", (0, 1), 16),
        ("alltoall_base", (0, 1), 12),
        ("allreduce", (0, 1), 8),
    ]
    out = write_chakra(recording, tmp_path / "traces")
    assert sorted(file.name for file in out.iterdir()) == ["comm_group.json", "trace.0.et", "trace.1.et"]
    assert (out / "trace.1.et").read_bytes() == encoded(calls)
    assert json.loads((out / "comm_group.json").read_text()) == {"all#1": [0, 1], "0,1#1": [0, 1]}
    with pytest.raises(ScaleError, match="exists already"):
        write_chakra(recording, out)


def test_a_recording_without_the_order_is_refused(recording: Recording, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = recording.rank_file(1)
    events = {"all#1": [["allreduce", 0.5, 1]]}
    save_file({"all#1|0|0": load_file(file)["all#1|0|0"]}, file, metadata={"events": json.dumps(events)})
    with pytest.raises(ScaleError, match="when its collectives began"):
        write_chakra(recording, tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
