"""What original and proxy cost in parameters and bytes, from metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.plan import check_count

_KINDS = {"router": "router", "stacked": "experts", "each": "experts", "ids": "fixed", "unknown": "fixed"}


@dataclass(frozen=True)
class Cost:
    """Size of a model with `n_experts` experts a layer.

    Attributes:
        n_experts: experts a layer.
        params: number of weights.
        params_active: weights a token uses (all but the experts it does not choose).
        params_experts: weights of routed experts.
        nbytes: bytes of weights as stored.
    """

    n_experts: int
    params: int
    params_active: int
    params_experts: int
    nbytes: int


def cost(checkpoint: Checkpoint, n_keep: int | None = None) -> Cost:
    """Return the cost of the checkpoint, or of a proxy of it with `n_keep` experts a layer.

    Raises:
        ProxyError: no proxy can have `n_keep` experts.
    """
    count = checkpoint.n_experts if n_keep is None else n_keep
    if n_keep is not None:
        check_count(checkpoint, n_keep)
    fixed, router, experts = _parts(checkpoint)
    scaled = [(part * count) // checkpoint.n_experts for part in (*router, *experts)]
    params = fixed[0] + scaled[0] + scaled[2]
    active = fixed[0] + scaled[0] + experts[0] * checkpoint.top_k // checkpoint.n_experts
    return Cost(count, params, active, scaled[2], fixed[1] + scaled[1] + scaled[3])


def _parts(checkpoint: Checkpoint) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(weights, bytes) of what stays, of router rows and of routed experts; a tensor's tail rows stay."""
    sums = {"fixed": [0, 0], "router": [0, 0], "experts": [0, 0]}
    for name, info in checkpoint.tensors.items():
        place = checkpoint.places.get(name)
        kind = _KINDS[place.kind] if place and (place.expert or 0) < checkpoint.n_experts else "fixed"
        tail, rows = 0, 1
        if place and place.rule:
            tail, rows = checkpoint.tail(place.rule), info.shape[place.rule.axis]
        for column, size in enumerate((info.n_params, info.nbytes)):
            sums[kind][column] += size // rows * (rows - tail)
            sums["fixed"][column] += size // rows * tail
    fixed, router, experts = ((params, nbytes) for params, nbytes in sums.values())
    return fixed, router, experts


def cost_table(checkpoint: Checkpoint, counts: Sequence[int]) -> pd.DataFrame:
    """One row for the original and one for each count: experts, parameters, active parameters, bytes, share.

    Raises:
        ProxyError: no proxy can have one of the counts.
    """
    costs = [cost(checkpoint), *(cost(checkpoint, n) for n in counts)]
    frame = pd.DataFrame([vars(item) for item in costs])
    frame.insert(0, "model", ["original", *(f"proxy-{n}" for n in counts)])
    frame["share"] = frame["params"] / frame["params"].iloc[0]
    return frame
