"""c10d backends, registered through torch's own extension point: one records a real run, one plays it back, one is
virtual for a rank that really computes.

`moeproxy-record` is gloo with a note of what every collective returned and how long it took. `moeproxy-replay` gives
that back: the chosen rank runs the unmodified program, the others are virtual participants (as in PrismLLM, arXiv
2605.15617). FSDP2 of torch 2.13 calls the newer names of the collectives, so both generations are overridden: one left
out would silently be answered by torch's own `fake` backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    ProcessGroupGloo,
    _create_work_from_future,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.futures import Future

from moeproxy.errors import ScaleError

RECORD, REPLAY, VIRTUAL = "moeproxy-record", "moeproxy-replay", "moeproxy-virtual"


@dataclass
class Event:
    """One collective of a recorded rank.

    Args:
        op: name of the collective.
        seconds: how long the real one took.
        outs: what it returned.
        began: when, by the clock of the process.
    """

    op: str
    seconds: float
    outs: list[torch.Tensor] = field(default_factory=list)
    began: float = 0.0


LOG: dict[str, list[Event]] = {}
"""Events by process group, in order; groups are named after their ranks."""


class _Group(dist.ProcessGroup):
    """Every collective comes down to `_do(op, arguments, outputs)`."""

    kind: ClassVar[str] = ""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size, self.log_name = rank, size, name

    def getBackendName(self) -> str:
        return self.kind

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _do(self, op: str, arguments: tuple[Any, ...], outs: Sequence[torch.Tensor]) -> Any:
        raise NotImplementedError

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("allgather", (outs, ins, opts), [tensor for one in outs for tensor in one])

    def _allgather_base(self, out: Any, given: Any, opts: Any = None) -> Any:
        return self._do("_allgather_base", (out, given, opts), [out])

    def allgather_into_tensor_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("allgather_into_tensor_coalesced", (outs, ins, opts), outs)

    def _reduce_scatter_base(self, out: Any, given: Any, opts: Any = None) -> Any:
        return self._do("_reduce_scatter_base", (out, given, opts), [out])

    def reduce_scatter_tensor_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("reduce_scatter_tensor_coalesced", (outs, ins, opts), outs)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("allreduce", (tensors, opts), tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("allreduce_coalesced", (tensors, opts), tensors)

    def alltoall_base(self, out: Any, given: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        return self._do("alltoall_base", (out, given, received, sent, opts), [out])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._do("broadcast", (tensors, opts), tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._do("barrier", (opts,), [])

    # The stubs give the newer names narrower arguments than the older ones.
    all_gather_single: Any = _allgather_base
    all_gather_single_coalesced: Any = allgather_into_tensor_coalesced
    reduce_scatter_single: Any = _reduce_scatter_base
    reduce_scatter_single_coalesced: Any = reduce_scatter_tensor_coalesced
    all_to_all_single: Any = alltoall_base


class RecordGroup(_Group):
    """gloo, with a note of every collective in `LOG`."""

    kind: ClassVar[str] = RECORD

    def __init__(self, rank: int, size: int, name: str, store: Any, timeout: Any) -> None:
        super().__init__(rank, size, name)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def _do(self, op: str, arguments: tuple[Any, ...], outs: Sequence[torch.Tensor]) -> Any:
        while arguments and arguments[-1] is None:  # gloo has defaults for what was not given
            arguments = arguments[:-1]
        began = time.perf_counter()
        getattr(self._gloo, op)(*arguments).wait()
        took = time.perf_counter() - began
        LOG.setdefault(self.log_name, []).append(Event(op, took, [out.detach().clone() for out in outs], began))
        return _finished(list(outs))


class ReplayGroup(_Group):
    """Returns what `LOG` holds, as long as the program asks for the same collectives in the same order."""

    kind: ClassVar[str] = REPLAY

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size, name)
        self._next = 0
        silent = FakeProcessGroup._create_internal(rank, size)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, silent)

    def _do(self, op: str, arguments: tuple[Any, ...], outs: Sequence[torch.Tensor]) -> Any:
        events = LOG.get(self.log_name, [])
        event = events[self._next] if self._next < len(events) else None
        here = f"collective {self._next} of the group of ranks {self.log_name}"
        self._next += 1
        if event is None or event.op != op or [o.shape for o in event.outs] != [o.shape for o in outs]:
            wanted = f"{event.op} {[list(o.shape) for o in event.outs]}" if event else "no further collective"
            raise ScaleError(
                f"the program asks for {op} {[list(out.shape) for out in outs]}",
                expected=f"{wanted}, as recorded",
                remedy="a replay can only follow the recorded schedule: record the changed program again",
                where=here,
            )
        with torch.no_grad():
            for out, stored in zip(outs, event.outs, strict=True):
                out.copy_(stored)
        return _finished(list(outs))


class VirtualGroup(dist.ProcessGroup):
    """torch's `fake` group, but a rank may have no row to send in an exchange: torch's own refuses that.

    Only the exchange is overridden: all else goes its ordinary way, past the meter.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        fake = FakeProcessGroup._create_internal(rank, size)
        self._plain = dist.ProcessGroup(rank, size)  # pyright: ignore[reportCallIssue]
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)

    def getBackendName(self) -> str:
        return VIRTUAL

    def alltoall_base(self, out: Any, given: Any, received: Any, sent: Any, opts: Any = None) -> Any:
        if out.numel() and given.numel():
            return self._plain.alltoall_base(out, given, received, sent, *([] if opts is None else [opts]))
        with torch.no_grad():
            return _finished([out.zero_()])

    all_to_all_single: Any = alltoall_base


def _finished(outs: list[torch.Tensor]) -> Any:
    future: Any = Future()
    future.set_result(outs)
    return _create_work_from_future(future)


def register() -> None:
    """Make the backends known to torch.distributed, with empty logs."""
    LOG.clear()
    met: list[str] = []

    def name_of(options: Any) -> str:
        """Name a group by its ranks, which do not depend on the run, and how many like it came before."""
        ranks = ",".join(map(str, options.global_ranks_in_group)) or "all"
        met.append(ranks)
        return f"{ranks}#{met.count(ranks)}"

    def recording(options: Any, _backend: Any = None) -> Any:
        group = RecordGroup(options.group_rank, options.group_size, name_of(options), options.store, options.timeout)
        group._set_group_name(options.group_id)
        return group

    def replaying(options: Any, _backend: Any = None) -> Any:
        group = ReplayGroup(options.group_rank, options.group_size, name_of(options))
        group._set_group_name(options.group_id)
        return group

    def virtually(options: Any, _backend: Any = None) -> Any:
        group = VirtualGroup(options.group_rank, options.group_size)
        group._set_group_name(options.group_id)
        return group

    dist.Backend.register_backend(RECORD, recording, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(REPLAY, replaying, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(VIRTUAL, virtually, extended_api=True, devices=["cpu"])
