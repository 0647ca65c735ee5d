"""The peaks of all ranks of an expert-parallel group from a few metered steps of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from moeproxy.scale import dispatch
from moeproxy.scale.hottest import peaks_of
from moeproxy.scale.layout import Layout
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.rounding import integers
from moeproxy.scale.routing import Routing
from moeproxy.scale.tasks import metered, virtual_rank
from moeproxy.scale.training import Training


def peaks(program: Mapping[str, Any], layout: Layout, rows_LR: Int[np.ndarray, "L R"]) -> Int[np.ndarray, " R"]:
    """Return the peak (R,) that a rank with rank 0's shards has, for each rank's rows, in bytes.

    A layer without any row makes other tensors than one with few (empty ones are none): ranks are metered apart by
    which of their layers get no row. Where tensors do not grow with the rows of single layers, nothing is known: the
    largest number stands for each.

    Args:
        program: `GRPOProgram.to_dict()`.
        layout: of rank 0.
        rows_LR: rows that each rank gets from each of its peers, by MoE layer.
    """
    asked = GRPOProgram.from_dict(program)
    usual_L = np.full(len(rows_LR), max(asked.sequences * asked.tokens * asked.top_k // layout.ep, 1))
    with virtual_rank(asked, layout, _given(asked, layout, usual_L), fake=True) as training:
        peak_R = np.empty(rows_LR.shape[1], np.int64)
        some_UL, place_R = np.unique((rows_LR > 0).T, axis=0, return_inverse=True)
        for place, some_L in enumerate(some_UL):
            alike_R = place_R.reshape(-1) == place
            peak_R[alike_R] = _alike(asked, layout, training, rows_LR[:, alike_R], usual_L * some_L)
    return peak_R


def _alike(
    program: GRPOProgram,
    layout: Layout,
    training: Training,
    rows_LR: Int[np.ndarray, "L R"],
    usual_L: Int[np.ndarray, " L"],
) -> Int[np.ndarray, " R"]:
    """Return the peaks of ranks that get rows in the layers in which `usual_L` has some, and in no other."""
    some_L, layers, courses = usual_L > 0, np.arange(len(usual_L)), []
    for rows_L in (usual_L, usual_L + some_L, usual_L + some_L * (1 + layers)):
        dispatch.VirtualExchange.routing = _given(program, layout, rows_L)
        courses.append(metered(training)[0])
    if all(one.owner == courses[0].owner for one in courses):
        found_R = peaks_of([np.array(one.delta) for one in courses], rows_LR - usual_L[:, None])
        if found_R is not None:
            return found_R
    return np.full(rows_LR.shape[1], np.iinfo(np.int64).max)


def _given(program: GRPOProgram, layout: Layout, rows_L: Int[np.ndarray, " L"]) -> Routing:
    """Return the routing of a rank to which each peer sends so many rows, by layer; it sends evenly itself."""
    pairs = program.sequences * program.tokens * program.top_k
    sent_R = integers(np.full(layout.ep, pairs / layout.ep), pairs)
    return Routing.recorded(program.n_experts, [[(sent_R, [int(rows)] * layout.ep)] for rows in rows_L])
