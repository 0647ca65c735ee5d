"""find_hottest: the fullest rank of the whole world, found op by op and not guessed."""

from __future__ import annotations

import threading
import time

import numpy as np
from jaxtyping import Int

from moeproxy.scale.emulate import LIMIT_S, check_kinds, check_routing, emulate
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.hottest import certain, rank_rows
from moeproxy.scale.layout import Layout
from moeproxy.scale.processes import call, too_long
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.routing import Routing


def find_hottest(
    program: GRPOProgram,
    world: int,
    ep: int,
    routing: Routing | None = None,
    *,
    cancel: threading.Event | None = None,
    timeout: float | None = LIMIT_S,
) -> Emulation:
    """Return the emulation (level "fake") of the rank that holds most at its peak, of all ranks of the world.

    The first expert-parallel group has the largest shards, so the rank is in it. Where one rank gets the most rows in
    every layer and its shards are as large as rank 0's, it is that one. Otherwise `rank_peaks` bounds all of them, and
    they are emulated from the highest bound down until no bound left is above the fullest one found: nearly always one
    emulation.

    Args:
        program, world, ep, cancel: as in `emulate`.
        routing: shares by layer; balanced by default.
        timeout: seconds allowed in all.

    Raises:
        ScaleError: as `emulate`, or the routing is exact counts of one rank.

    Example:
        >>> find_hottest(program, 1024, 64, Routing.from_profile(profile)).rank
        17
    """
    began = time.monotonic()

    def left() -> float | None:
        if timeout is None:
            return None
        if (rest := timeout - (time.monotonic() - began)) <= 0:
            raise too_long(timeout)
        return rest

    routing, rows_LR = _rows(program, world, ep, routing, timeout)
    found: Emulation | None = None
    if (most := certain(rows_LR)) is not None:
        found = emulate(program, world, ep, most, routing, cancel=cancel, timeout=timeout)
        if most == 0 or found.full_shards:
            return found
    bound_R = _bounds(program, world, ep, rows_LR, cancel, left())
    for rank in _one_of_each(rows_LR, bound_R):
        if rank == most:
            continue
        if found is not None and found.peak_bytes >= bound_R[rank]:
            break
        made = emulate(program, world, ep, rank, routing, cancel=cancel, timeout=left())
        if found is None or (made.peak_bytes, -made.rank) > (found.peak_bytes, -found.rank):
            found = made
    assert found is not None  # there is at least one rank
    return found


def rank_peaks(
    program: GRPOProgram,
    world: int,
    ep: int,
    routing: Routing | None = None,
    *,
    cancel: threading.Event | None = None,
    timeout: float | None = LIMIT_S,
) -> Int[np.ndarray, " R"]:
    """Return what no rank of the first expert-parallel group exceeds at its peak, in bytes.

    It is the peak that `emulate` finds, but for ranks whose shards of dense weights are smaller than rank 0's (some
    bytes, where a weight cannot be cut evenly). One process tells it for all ranks: a step is metered three times with
    other numbers of rows, which says of each tensor to which layer's rows it belongs and how many bytes a row takes;
    again for each set of layers in which ranks get no row at all, since empty tensors are none.
    Should a family's tensors not grow so, the largest number stands for every rank.

    Args:
        program, world, ep, routing, cancel, timeout: as in `find_hottest`.
    """
    _, rows_LR = _rows(program, world, ep, routing, timeout)
    return _bounds(program, world, ep, rows_LR, cancel, timeout)


def _rows(
    program: GRPOProgram, world: int, ep: int, routing: Routing | None, timeout: float | None
) -> tuple[Routing, Int[np.ndarray, "L R"]]:
    """Check everything, and return the routing and each rank's rows by layer."""
    check_kinds(program, routing, timeout)
    layout = Layout(world, ep)
    layout.check_experts(program.n_experts)
    source = routing or Routing.balanced(program.n_experts)
    check_routing(source, program, layout)
    pairs = program.sequences * program.tokens * program.top_k
    return source, rank_rows(source, ep, program.n_layers - program.n_dense, pairs, program.top_k)


def _bounds(
    program: GRPOProgram,
    world: int,
    ep: int,
    rows_LR: Int[np.ndarray, "L R"],
    cancel: threading.Event | None,
    timeout: float | None,
) -> Int[np.ndarray, " R"]:
    request = {"program": program.to_dict(), "layout": Layout(world, ep), "rows_LR": rows_LR}
    return call("peaks", [request], cancel=cancel, timeout=timeout)[0]


def _one_of_each(rows_LR: Int[np.ndarray, "L R"], bound_R: Int[np.ndarray, " R"]) -> list[int]:
    """Return ranks by falling bound, the first one of those that get the same rows: its shards are not smaller."""
    _, first_U = np.unique(rows_LR, axis=1, return_index=True)
    return sorted((int(rank) for rank in first_U), key=lambda rank: (-bound_R[rank], rank))
