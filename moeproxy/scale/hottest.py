"""Which rank of the world may be the fullest, from its rows alone. Needs no torch.

The answer that holds is `finding.find_hottest`'s; here is what can be said at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from moeproxy.errors import ScaleError
from moeproxy.scale import checks
from moeproxy.scale.layout import Layout
from moeproxy.scale.rounding import integers
from moeproxy.scale.routing import Routing

AGAIN = 0.25
"""What a row weighs besides, while its layer computes at the peak, over what it keeps for the backward pass. Measured
with one layer's load raised by 0.4: 0 where logits or the head make the peak (Qwen3-30B-A3B, 3 layers), 0.23 (the
tests' tiny model), 0.40 (DeepSeek-V3, 3 layers)."""
BESIDE = 1.0
"""Bytes that a layer keeps beside routed rows, over those of the mean rows (Qwen3-30B-A3B's, by `proxy.terms`)."""
_REMEDY = "pass Routing.skewed, .from_profile or .from_trace"


def fullest_by_sum(routing: Routing, layout: Layout, *, n_layers: int, checkpointing: bool = False) -> int:
    """Return the rank that is the fullest by a sum over layers: at once, and not always the right one.

    Without checkpointing a rank holds the rows of all layers when the backward pass begins, and while it is in a layer
    the rows of that layer again and those of the layers before it; with checkpointing the busiest single layer counts.
    How much "again" weighs depends on the model (`AGAIN`), so where layers differ the rank named may be some percent
    below the fullest one; `find_hottest` finds that one, and `certain` says where the sum cannot be wrong.

    The rank is in the first expert-parallel group: FSDP2's first shards are the largest ones, and among more ranks than
    experts the later ones hold no expert at all.

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
    """Return the rows that decide each expert-parallel rank's peak by the sum, over the mean.

    By the sum a rank that gets this many in every layer has the peak of one that gets what `routing` says in each.
    Where all layers are alike it is a layer's load.

    Args:
        routing, n_layers, checkpointing: as in `fullest_by_sum`.
        ep: ranks over which experts are spread.
    """
    _check(routing, n_layers)
    share_LR = routing.rank_shares(ep)
    rows_LR = share_LR[np.arange(n_layers) % len(share_LR)] * ep
    if checkpointing:
        return rows_LR.max(axis=0)
    # In the backward pass of a layer the ones after it are gone, with what they kept beside their rows.
    gone_L1 = BESIDE * np.arange(n_layers)[::-1, None]
    held_LR = np.cumsum(rows_LR, axis=0) + AGAIN * rows_LR - gone_L1
    return held_LR.max(axis=0) / (n_layers + AGAIN)


def rank_rows(routing: Routing, ep: int, n_layers: int, pairs: int, top_k: int) -> Int[np.ndarray, "L R"]:
    """Return the rows that each rank of the group gets from each of its peers, by MoE layer.

    Args:
        routing: shares by layer.
        ep: ranks over which experts are spread (R).
        n_layers: MoE layers (L).
        pairs, top_k: as in `Routing.counts`.

    Raises:
        ScaleError: the routing is exact counts of one rank, or impossible.
    """
    _check(routing, n_layers)
    rows = [integers(share_R * pairs, pairs) for share_R in routing.rank_shares(ep, top_k)]
    return np.array(rows)[np.arange(n_layers) % len(rows)]


def certain(rows_LR: Int[np.ndarray, "L R"]) -> int | None:
    """Return the first rank that no other rank beats in any layer, if there is one.

    No tensor of a step becomes smaller with more rows, so no rank can be fuller than this one, unless its own shards of
    weights are smaller than another's: the last ranks' are where a weight cannot be cut evenly.
    """
    most_R = (rows_LR == rows_LR.max(axis=1, keepdims=True)).all(axis=0)
    return int(np.argmax(most_R)) if most_R.any() else None


def peaks_of(
    delta_3N: Sequence[Int[np.ndarray, " N"]], more_LR: Int[np.ndarray, "L R"]
) -> Int[np.ndarray, " R"] | None:
    """Return peaks (R,) from the changes of three equal steps; None if a size does not follow from one layer's rows.

    Args:
        delta_3N: bytes gained or lost, of a step with the usual rows, with one row more in every layer, and with
            1, 2, 3, ... rows more in the layers.
        more_LR: rows of each rank over the usual ones, by layer.
    """
    usual_N, one_N, numbered_N = delta_3N
    slope_N, told_N = one_N - usual_N, numbered_N - usual_N
    layer_N = np.where(slope_N != 0, told_N // np.where(slope_N != 0, slope_N, 1), 1) - 1
    fits = (told_N == slope_N * (layer_N + 1)) & (layer_N >= 0) & (layer_N < len(more_LR))
    if not fits.all():
        return None
    return np.array([np.cumsum(usual_N + slope_N * more_L[layer_N]).max() for more_L in more_LR.T])


def _check(routing: Routing, n_layers: int) -> None:
    checks.kind(Routing, _REMEDY, routing=routing)
    checks.whole(1, n_layers=n_layers)
    if routing.exact:
        raise ScaleError(
            "exact counts belong to one rank, which cannot be compared with others",
            remedy="take the routing from a profile or a trace",
        )
