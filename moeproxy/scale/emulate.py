"""emulate: what one rank of a cluster sees in a step of training, in one process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from moeproxy.errors import ScaleError
from moeproxy.files import atomic_dir, provenance
from moeproxy.scale import checks
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.layout import Layout
from moeproxy.scale.processes import call
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.recording import Recording, checksum, rank_file, write_index
from moeproxy.scale.routing import Routing

MOST_REAL = 64
"""Most processes of a real run: each is a whole Python with torch."""
Level = Literal["fake", "exec", "replay"]
LIMIT_S = 3600.0
"""Seconds after which an emulation is given up, unless the caller says otherwise."""


def emulate(
    program: GRPOProgram,
    world: int,
    ep: int = 1,
    rank: int = 0,
    routing: Routing | None = None,
    level: Level = "fake",
    *,
    recording: Recording | str | Path | None = None,
    repeats: int = 5,
    cancel: threading.Event | None = None,
    timeout: float | None = LIMIT_S,
) -> Emulation:
    """Run a training step as rank `rank` of a world whose other ranks are virtual, in a process of its own.

    - "fake": tensors have no memory; bytes only, for models and worlds of any size.
    - "exec": the rank really computes; the others' answers have the right shapes and arbitrary values. Bytes as
      "fake", and times.
    - "replay": the rank of a recorded run again, alone, with the recorded answers: losses and weights bit for bit.
      A changed file is refused; other results than recorded (another machine, another torch) stand in `differs`.

    Args:
        program: the update step.
        world: ranks of FSDP2 in all.
        ep: ranks over which a layer's experts are spread; 1 for pure FSDP2 (there routing moves no bytes).
        rank: the one to look at; `find_hottest` finds the fullest.
        routing: how many rows go where; balanced by default. Not for "replay".
        level: see above.
        recording: for "replay", what `record` made.
        repeats: for "exec", steps whose memory and time are measured.
        cancel: set it from another thread to stop.
        timeout: seconds allowed; None for no limit.

    Raises:
        ScaleError: the world cannot be divided so, routing and model do not fit together, or the process failed.

    Example:
        >>> program = GRPOProgram(QWEN3_30B_A3B, prompt=1024, completion=3072).sliced(4)
        >>> emulate(program, world=1024, ep=64)
        Emulation(rank 0 of 1024, ep 64, fake, balanced; peak 6.45 GiB in forward)
    """
    check_kinds(program, routing, timeout)
    layout = Layout(world, ep, rank)
    layout.check_experts(program.n_experts)
    if level not in get_args(Level):
        raise ScaleError(f"level is {level!r}", expected=f"one of {', '.join(get_args(Level))}")
    if (level == "replay") != (recording is not None) or (level == "replay" and routing is not None):
        raise ScaleError(
            f"level {level!r} with {'a' if recording is not None else 'no'} recording and "
            f"{'a' if routing is not None else 'no'} routing",
            expected="a recording, and no routing, for 'replay'; no recording for the others",
            remedy="leave out the routing for 'replay' (it is in the recording), and the recording for the others",
        )
    if recording is not None:
        return _replayed(program, layout, recording, cancel, timeout)
    checks.whole(1, repeats=repeats)
    source = routing or Routing.balanced(program.n_experts)
    check_routing(source, program, layout)
    if source.exact and ep > 1:
        _check_exact(source, program, layout)
    request = {"program": program.to_dict(), "layout": layout, "routing": source.to_dict(), "level": level}
    request |= {"repeats": repeats}
    return call("emulate", [request], cancel=cancel, timeout=timeout)[0]


def check_kinds(program: GRPOProgram, routing: Routing | None, timeout: float | None) -> None:
    """Raise ScaleError unless all are of the right type."""
    checks.kind(GRPOProgram, "pass GRPOProgram(json.loads(config_text), prompt=..., completion=...)", program=program)
    if routing is not None:
        checks.kind(Routing, "pass Routing.balanced(n_experts), .skewed, .from_profile or .from_trace", routing=routing)
    if timeout is not None:
        checks.real(0, timeout=timeout)


def check_routing(routing: Routing, program: GRPOProgram, layout: Layout) -> None:
    """Raise ScaleError unless the routing is for as many experts, and possible with the program's top-k."""
    if routing.n_experts != program.n_experts:
        raise ScaleError(
            f"routing of {routing.n_experts} experts for a model of {program.n_experts}",
            remedy="take the routing of this very model; for a proxy, profile the proxy",
        )
    routing.rank_shares(layout.ep, program.top_k)


def _check_exact(routing: Routing, program: GRPOProgram, layout: Layout) -> None:
    layers, pairs = program.n_layers - program.n_dense, program.sequences * program.tokens * program.top_k
    if len(routing.exact) < layers or not all(routing.exact):
        raise ScaleError(
            f"exact counts of {len(routing.exact)} layers",
            expected=f"calls of each of {layers} layers with experts",
            remedy="take the routing that `run_real` returned for this program",
        )
    for number, calls in enumerate(routing.exact):
        for sent, received in calls:
            if len(sent) != layout.ep or len(received) != layout.ep or min(*sent, *received) < 0 or sum(sent) != pairs:
                raise ScaleError(
                    f"exact counts of layer {number}: {sum(sent):,} rows sent to {len(sent)} ranks, received from "
                    f"{len(received)}",
                    expected=f"{pairs:,} rows sent to {layout.ep} ranks, none negative",
                    remedy="take the routing that `run_real` returned for this program, world and ep",
                )


def _replayed(program: GRPOProgram, layout: Layout, given: Any, cancel: Any, timeout: float | None) -> Emulation:
    recording = given if isinstance(given, Recording) else Recording.open(given)
    recording.check(program, layout)
    recording.check_rank(layout.rank)
    request = {
        "program": program.to_dict(),
        "layout": layout,
        "folder": str(recording.path),
        "steps": recording.steps,
    }
    found: Emulation = call("replay", [request], cancel=cancel, timeout=timeout)[0]
    told = {name: getattr(found, name) for name in ("losses", "logprobs", "weights")}
    return replace(found, differs=recording.differences(layout.rank, **told))


def run_real(
    program: GRPOProgram,
    world: int,
    ep: int = 1,
    *,
    steps: int = 2,
    repeats: int = 5,
    cancel: threading.Event | None = None,
    timeout: float | None = LIMIT_S,
) -> list[tuple[Emulation, Routing]]:
    """Run all ranks for real over gloo on this machine; return each one's measurements and its exact routing.

    With that routing, `emulate` predicts what the rank measured.

    Args:
        program, world, ep: as in `emulate`.
        steps: steps before weights are frozen and memory is measured.
        repeats: steps whose allocator peaks and times are measured; the smallest peak is the one without accidents
            of other threads.
        cancel, timeout: as in `emulate`.
    """
    check_kinds(program, None, timeout)
    checks.whole(1, steps=steps, repeats=repeats)
    found = _ranks(program, Layout(world, ep), steps, repeats, None, cancel, timeout)
    return [(result, _routing(program, notes, result.rank)) for result, notes in found]


def record(
    program: GRPOProgram,
    world: int,
    ep: int,
    path: str | Path,
    *,
    steps: int = 6,
    cancel: threading.Event | None = None,
    timeout: float | None = LIMIT_S,
) -> Recording:
    """Run all ranks for real over gloo and keep what each got from the others, for `emulate(level="replay")`.

    Args:
        program, world, ep: as in `emulate`.
        path: directory to write, complete or not at all; must not exist.
        steps: training steps; disk space grows with them. Ranges of seconds need 5.
        cancel, timeout: as in `emulate`.

    Raises:
        ScaleError: `path` exists, or a rank failed.
    """
    check_kinds(program, None, timeout)
    checks.whole(1, steps=steps)
    if Path(path).exists():
        raise ScaleError("exists already", where=path, remedy="remove it or choose another path")
    with atomic_dir(path) as folder:
        found = [result for result, _ in _ranks(program, Layout(world, ep), steps, 0, str(folder), cancel, timeout)]
        write_index(
            folder,
            program=program.to_dict(),
            world=world,
            ep=ep,
            steps=steps,
            losses=[result.losses for result in found],
            logprobs=[result.logprobs for result in found],
            weights=[result.weights for result in found],
            seconds=[result.seconds for result in found],
            checksums=[checksum(rank_file(folder, rank)) for rank in range(world)],
            provenance={**provenance(), "machine": found[0].provenance["machine"]},
        )
    return Recording.open(path)


def _ranks(
    program: GRPOProgram, layout: Layout, steps: int, repeats: int, folder: str | None, cancel: Any, timeout: Any
) -> Sequence[tuple[Emulation, dict[int, list[Any]]]]:
    layout.check_experts(program.n_experts)
    if layout.world > MOST_REAL:
        raise ScaleError(
            f"a real run of {layout.world:,} processes on this machine",
            expected=f"at most {MOST_REAL}",
            remedy="run fewer ranks for real; `emulate` takes one rank of any world",
        )
    with tempfile.TemporaryDirectory() as meeting:
        shared = {
            "program": program.to_dict(),
            "meeting": str(Path(meeting) / "store"),
            "steps": steps,
            "repeats": repeats,
            "folder": folder,
        }
        requests = [{**shared, "layout": replace(layout, rank=rank)} for rank in range(layout.world)]
        return call("real", requests, cancel=cancel, timeout=timeout)


def _routing(program: GRPOProgram, notes: dict[int, list[Any]], rank: int) -> Routing:
    counts = [notes[layer] for layer in sorted(notes)]
    return Routing.recorded(program.n_experts, counts, f"recorded on rank {rank}")
