"""Which rank of the world is the fullest, and by how many rows. Needs no torch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from moeproxy.errors import ScaleError
from moeproxy.scale import checks
from moeproxy.scale.layout import Layout
from moeproxy.scale.routing import Routing

AGAIN = 0.25
"""What a row weighs besides, while its layer computes at the peak, over what it keeps for the backward pass. Measured
with one layer's load raised by 0.4: 0 where logits or the head make the peak (Qwen3-30B-A3B, 3 layers), 0.23 (the
tests' tiny model), 0.40 (DeepSeek-V3, 3 layers)."""
BESIDE = 1.0
"""Bytes that a layer keeps beside routed rows, over those of the mean rows (Qwen3-30B-A3B's, by `proxy.terms`)."""


def hottest_rank(
    routing: Routing,
    layout: Layout,
    *,
    n_layers: int,
    checkpointing: bool = False,
) -> int:
    """Return the rank of the whole world that holds most at its peak, by a sum over layers.

    Without checkpointing a rank holds the rows of all layers when the backward pass begins, and while it is in a layer
    the rows of that layer again and those of the layers before it; with checkpointing the busiest single layer counts.
    The rank is in the first expert-parallel group: FSDP2's first shards are the largest ones, and among more ranks than
    experts the later ones hold no expert at all.

    It is a sum, not the emulation: with a heavier last layer (0.75) it once named a rank whose peak was 3.7 % below the
    fullest one's, in 12 drawn routings of 4 layers x 8 experts on 4 ranks. Where that matters, emulate the candidates.

    Args:
        routing: shares by layer.
        layout: world and expert parallelism.
        n_layers: MoE layers of the model.
        checkpointing: whether activations are recomputed.

    Raises:
        ScaleError: the routing is exact counts of one rank.
    """
    load_R = rank_loads(routing, layout.ep, n_layers, checkpointing)
    return int(np.argmax(np.round(load_R, 12)))  # rounded: equal loads must not be told apart by the last bit


def rank_loads(routing: Routing, ep: int, n_layers: int, checkpointing: bool = False) -> Float[np.ndarray, " R"]:
    """Return the rows that decide each expert-parallel rank's peak, over the mean.

    A rank that gets this many in every layer has the peak of one that gets what `routing` says in each. Where all
    layers are alike it is a layer's load.

    Args:
        routing, n_layers, checkpointing: as in `hottest_rank`.
        ep: ranks over which experts are spread.
    """
    checks.kind(Routing, "pass Routing.skewed, .from_profile or .from_trace", routing=routing)
    checks.whole(1, n_layers=n_layers)
    if routing.exact:
        raise ScaleError(
            "exact counts belong to one rank, which cannot be compared with others",
            remedy="take the routing from a profile or a trace",
        )
    share_LR = routing.rank_shares(ep)
    rows_LR = share_LR[np.arange(n_layers) % len(share_LR)] * ep
    if checkpointing:
        return rows_LR.max(axis=0)
    # In the backward pass of a layer the ones after it are gone, with what they kept beside their rows.
    gone_L1 = BESIDE * np.arange(n_layers)[::-1, None]
    held_LR = np.cumsum(rows_LR, axis=0) + AGAIN * rows_LR - gone_L1
    return held_LR.max(axis=0) / (n_layers + AGAIN)
