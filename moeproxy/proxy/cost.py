"""What original and proxy cost in parameters and bytes, from metadata alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.plan import Mtp, check_count

if TYPE_CHECKING:
    import pandas as pd

_KINDS = {"router": "router", "stacked": "experts", "each": "experts", "ids": "fixed", "unknown": "fixed"}


@dataclass(frozen=True)
class Cost:
    """Size of a model with `n_experts` experts a layer.

    Attributes:
        n_experts: experts a layer.
        params: number of weights.
        params_active: weights a token uses (all but the experts it does not choose); with multi-token-prediction
            layers, where they are counted, as if they ran too.
        params_experts: weights of routed experts.
        nbytes: bytes of weights as stored.
    """

    n_experts: int
    params: int
    params_active: int
    params_experts: int
    nbytes: int


def cost(checkpoint: Checkpoint, n_keep: int | None = None, *, mtp: Mtp = "prune") -> Cost:
    """Return the cost of the checkpoint, or of a proxy of it with `n_keep` experts a layer.

    Args:
        checkpoint: the original.
        n_keep: experts the proxy keeps per layer; None for the original.
        mtp: what becomes of multi-token-prediction layers in the proxy, as in `build`: "prune" keeps `n_keep` experts
            in them too, "drop" leaves them out. The original has them whole.

    Raises:
        ProxyError: no proxy can have `n_keep` experts.
    """
    count = checkpoint.n_experts if n_keep is None else n_keep
    if n_keep is not None:
        check_count(checkpoint, n_keep)
    dropped = mtp == "drop" and n_keep is not None
    fixed, router, experts = _parts(_Asked(checkpoint.fingerprint, dropped, checkpoint))
    scaled = [(part * count) // checkpoint.n_experts for part in (*router, *experts)]
    params = fixed[0] + scaled[0] + scaled[2]
    active = fixed[0] + scaled[0] + experts[0] * checkpoint.top_k // checkpoint.n_experts
    return Cost(count, params, active, scaled[2], fixed[1] + scaled[1] + scaled[3])


def devices(cost: Cost, *, device_gib: float = 80.0, bytes_per_param: float = 18.0, usable: float = 0.8) -> int:
    """Return how many devices hold the model while it is trained, its state spread evenly over them.

    18 bytes a parameter: bfloat16 weights 2, gradients 4, float32 master weights 4, Adam's two moments 8.
    Activations, the reference model and the rollout engine's own copy of the weights are not counted; `usable` leaves
    room for some of it.

    Args:
        cost: of the original or a proxy.
        device_gib: memory of one device in GiB.
        bytes_per_param: bytes of state a parameter.
        usable: share of a device's memory for that state, above 0 and at most 1.

    Raises:
        ProxyError: a size or share that is not positive, or a share above 1.

    Example:
        >>> devices(cost(checkpoint, 64), device_gib=141)
        5
    """
    if not (device_gib > 0 and bytes_per_param > 0 and 0 < usable <= 1):
        raise ProxyError(
            f"device_gib is {device_gib}, bytes_per_param {bytes_per_param}, usable {usable}",
            expected="positive sizes, and a share of at most 1",
            remedy="use 80, 18 and 0.8",
        )
    return max(1, math.ceil(cost.params * bytes_per_param / (device_gib * 2**30 * usable)))


@dataclass(frozen=True)
class _Asked:
    """A checkpoint as a key of the cache: its headers decide, and a slider asks often."""

    fingerprint: str
    drop_mtp: bool
    checkpoint: Checkpoint = field(compare=False)


_Sums = tuple[int, int]


@lru_cache(maxsize=8)
def _parts(asked: _Asked) -> tuple[_Sums, _Sums, _Sums]:
    """(weights, bytes) of what stays, of router rows and of routed experts; a tensor's tail rows stay."""
    checkpoint = asked.checkpoint
    sums = {"fixed": [0, 0], "router": [0, 0], "experts": [0, 0]}
    look = asked.drop_mtp and bool(checkpoint.extra_layers)
    for name, info in checkpoint.tensors.items():
        if look and checkpoint.is_extra(name):
            continue
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


def cost_table(checkpoint: Checkpoint, counts: Sequence[int], *, mtp: Mtp = "prune") -> pd.DataFrame:
    """One row for the original and one for each count: experts, parameters, active parameters, bytes, share.

    `mtp` as in `cost`.

    Raises:
        ProxyError: no proxy can have one of the counts.
    """
    import pandas as pd  # a third of a second, which `inspect` need not wait for

    costs = [cost(checkpoint), *(cost(checkpoint, n, mtp=mtp) for n in counts)]
    frame = pd.DataFrame([vars(item) for item in costs])
    frame.insert(0, "model", ["original", *(f"proxy-{n}" for n in counts)])
    frame["share"] = frame["params"] / frame["params"].iloc[0]
    return frame
