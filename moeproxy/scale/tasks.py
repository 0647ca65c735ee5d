"""The tasks of an emulation's process: a virtual rank, a rank of a real run, a recorded rank alone."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeproxy.files import provenance
from moeproxy.scale import attention, backends, dispatch, virtual
from moeproxy.scale.allocator import allocator_peak, held
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.layout import Layout
from moeproxy.scale.meter import Course, Meter
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.recording import rank_file, read_log, write_log
from moeproxy.scale.routing import Routing
from moeproxy.scale.summary import summarised
from moeproxy.scale.training import Training, distributed_plan

_METERED = 3
"""Steps of a real rank that are metered."""


def emulate(
    program: Mapping[str, Any], layout: Layout, routing: Mapping[str, Any], level: str, repeats: int
) -> Emulation:
    """Emulate one rank: `level` "fake" without memory or values, "exec" with both."""
    began, asked = time.monotonic(), GRPOProgram.from_dict(program)
    source = Routing.from_dict(routing)
    with virtual_rank(asked, layout, source, fake=level == "fake") as training:
        course, _loss = metered(training)
        full = _full_shards(training)
        measured = _repeated(training, repeats) if level == "exec" else {}
    return _result(asked, layout, level, source.source, course, began, full_shards=full, **measured)


@contextmanager
def virtual_rank(program: GRPOProgram, layout: Layout, routing: Routing, *, fake: bool) -> Iterator[Training]:
    """Make this process one rank of a virtual world and yield its training, one step old.

    Args:
        program: what is trained.
        layout: this rank's place.
        routing: how many rows go where.
        fake: tensors have no memory.
    """
    _prepare()
    dispatch.VirtualExchange.routing, dispatch.VirtualExchange.layout = routing, layout
    virtual.join_virtual(layout, "fake" if fake else backends.VIRTUAL)
    plan = distributed_plan(program, layout, "virtual")
    with virtual.tensors(fake=fake):
        training = Training(program, layout, plan)
        training.step()  # the optimizer's state comes into being
        dispatch.VirtualExchange.calls.clear()
        yield training


def real(
    program: Mapping[str, Any], layout: Layout, meeting: str, steps: int, repeats: int, folder: str | None
) -> tuple[Emulation, dict[int, list[Any]]]:
    """Be one rank of a real run over gloo; return its measurements and what each MoE layer sent and received.

    Args:
        program: `GRPOProgram.to_dict()`.
        layout: this rank's place.
        meeting: file through which the ranks find each other.
        steps: training steps; without `folder` they come before the measurements.
        repeats: steps whose memory and time are measured.
        folder: where to record every collective; nothing is measured then but times.
    """
    began, asked = time.monotonic(), GRPOProgram.from_dict(program)
    _prepare()
    _join_real(layout, meeting, backends.RECORD if folder else "gloo")
    training = Training(asked, layout, distributed_plan(asked, layout, "noted"))
    if folder:
        told, seconds = _steps(training, steps)
        write_log(rank_file(Path(folder), layout.rank), backends.LOG)
        measured = {**_told(told), "seconds": seconds, "weights": fingerprint(training)}
    else:
        _steps(training, steps)
        measured = {}
    training.freeze()
    course = _quietest(training)
    notes = {layer: list(calls) for layer, calls in dispatch.NotedExchange.notes.items()}
    if not folder:
        measured = _repeated(training, repeats)
    dist.barrier()
    return _result(asked, layout, "real", "its own routers", course, began, **measured), notes


def replay(program: Mapping[str, Any], layout: Layout, folder: str, steps: int) -> Emulation:
    """Run one recorded rank again, alone; the last step is metered and so not timed."""
    began, asked = time.monotonic(), GRPOProgram.from_dict(program)
    _prepare()
    backends.LOG.update(read_log(rank_file(Path(folder), layout.rank)))
    store = virtual.FakeStore()
    dist.init_process_group(backends.REPLAY, rank=layout.rank, world_size=layout.world, store=store)
    training = Training(asked, layout, distributed_plan(asked, layout, "noted"))
    told, seconds = _steps(training, steps - 1)
    course, last_2 = metered(training)
    found = {**_told([*told, last_2.tolist()]), "seconds": seconds, "weights": fingerprint(training)}
    return _result(asked, layout, "replay", "as recorded", course, began, **found)


def metered(training: Training) -> tuple[Course, torch.Tensor]:
    """Make one step under a `Meter`; return what it saw, and what the step told (2,)."""
    meter = Meter(training.parameters, training.model.buffers(), training.state(), _inputs(training))
    with meter:
        told_2 = training.step(meter.mark)
    return meter.course, told_2


def _quietest(training: Training) -> Course:
    """Meter equal steps and return the one with the smallest peak.

    gloo's threads sometimes hold a tensor for a moment longer than the program does.
    """
    courses = []
    for _ in range(_METERED):
        dispatch.NotedExchange.notes.clear()
        dist.barrier()
        courses.append(metered(training)[0])
    return min(courses, key=lambda course: course.peak)


def _inputs(training: Training) -> list[torch.Tensor]:
    return [tensor for batch in training.batches for tensor in (batch.ids_BT, batch.advantages_B)]


def _full_shards(training: Training) -> bool:
    """Return whether no rank's shard of any weight is larger: FSDP2 cuts n rows into pieces of ceil(n / ranks)."""
    shards: list[Any] = training.parameters
    return all(one.to_local().numel() * one.device_mesh.size() >= one.numel() for one in shards)


def fingerprint(training: Training) -> str:
    """Return the SHA-256 of this rank's shards of all weights."""
    digest = hashlib.sha256()
    for parameter in training.parameters:
        shard: Any = parameter.detach()
        digest.update(shard.to_local().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _repeated(training: Training, repeats: int) -> dict[str, Any]:
    """Measure real steps: peaks by the allocator's events, then wall times."""
    training.freeze()
    before = held([*training.parameters, *training.model.buffers(), *training.state(), *_inputs(training)])
    peaks = []
    for _ in range(repeats):
        dist.barrier()
        peaks.append(before + allocator_peak(training.step))
    _, seconds = _steps(training, repeats)
    return {"allocator_bytes": tuple(sorted(peaks)), "seconds": seconds}


def _steps(training: Training, number: int) -> tuple[list[list[float]], tuple[float, ...]]:
    """Make steps; return what each told, and its wall time."""
    told, seconds = [], []
    for _ in range(number):
        began = time.perf_counter()
        told.append(training.step().tolist())
        seconds.append(time.perf_counter() - began)
    return told, tuple(seconds)


def _told(steps: list[list[float]]) -> dict[str, tuple[float, ...]]:
    return {"losses": tuple(loss for loss, _ in steps), "logprobs": tuple(logprob for _, logprob in steps)}


def _prepare() -> None:
    """Set this process up: one thread, the seams registered, nothing left of an earlier model."""
    torch.set_num_threads(1)
    virtual.unpacked_only()
    attention.register()
    dispatch.register()
    backends.register()


def _join_real(layout: Layout, meeting: str, backend: str) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    store = dist.FileStore(meeting, layout.world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world)


def _result(
    program: GRPOProgram, layout: Layout, level: str, routing: str, course: Course, began: float, **measured: Any
) -> Emulation:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Emulation(
        program=program.to_dict(),
        world=layout.world,
        ep=layout.ep,
        rank=layout.rank,
        level=level,
        routing=routing,
        rss_bytes=used,
        wall_seconds=round(time.monotonic() - began, 2),
        provenance=provenance(machine=machine()),
        **summarised(course),
        **measured,
    )


def machine() -> str:
    """Return the name of what times were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            name = next((line.partition(":")[2].strip() for line in stream if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, one thread of {os.cpu_count()} cores"
