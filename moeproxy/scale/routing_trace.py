"""From two logged numbers a layer to loads that have them: the largest load and the entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq

from moeproxy.errors import ScaleError
from moeproxy.traces.trace import Trace

_LARGEST, _ENTROPY = "router_max_violation/", "router_load_entropy/"


def loads_of(trace: Trace, step: int | None) -> tuple[Float[np.ndarray, "L E"], int]:
    """Return sorted loads by layer at a step of the trace, and that step (see `Routing.from_trace`)."""
    layers = sorted(int(name.removeprefix(_LARGEST)) for name in trace.signals if name.startswith(_LARGEST))
    layers = [layer for layer in layers if f"{_ENTROPY}{layer}" in trace.signals]
    n_experts = trace.provenance.n_experts
    if not layers or n_experts < 2:
        raise ScaleError(
            f"{trace!r} says nothing about its routers",
            expected=f"signals {_LARGEST}<layer> and {_ENTROPY}<layer>, and the number of experts",
            remedy="take a trace of the lab, or a profile",
        )
    largest_SL = np.stack([trace.values(f"{_LARGEST}{layer}") for layer in layers], axis=1)
    place = _place(trace, step, largest_SL)
    rows = [
        loads(n_experts, float(largest), float(trace.values(f"{_ENTROPY}{layer}")[place]))
        for layer, largest in zip(layers, largest_SL[place], strict=True)
    ]
    return np.stack(rows), int(trace.steps.index[place])


def _place(trace: Trace, step: int | None, largest_SL: np.ndarray) -> int:
    finite_S = np.asarray(np.isfinite(largest_SL).all(axis=1))
    if not finite_S.any():
        raise ScaleError(f"no step of {trace!r} has finite router loads")
    if step is None:
        return int(np.argmax(np.where(finite_S, largest_SL.max(axis=1), -np.inf)))
    numbers = np.asarray(trace.steps.index)
    if step not in numbers or not finite_S[np.flatnonzero(numbers == step)].all():
        known = numbers[finite_S]
        raise ScaleError(f"step {step} has no router loads", expected=f"a step of {known[0]} to {known[-1]}")
    return int(np.flatnonzero(numbers == step)[0])


def loads(n_experts: int, violation: float, entropy: float) -> Float[np.ndarray, " E"]:
    """Return falling shares whose largest is (1 + violation) / E and whose entropy is `entropy` * log E.

    The shares after the first fall off geometrically, none above the first. Logged numbers are rounded and may not fit
    together: then the nearest entropy that the largest share allows is taken.

    Args:
        n_experts: E.
        violation: largest load over the mean, minus 1.
        entropy: share of log E, in [0, 1].
    """
    first = min(max((1 + violation) / n_experts, 1 / n_experts), 1.0)
    wanted = entropy * np.log(n_experts)

    def shares(steepness: float) -> np.ndarray:
        return np.concatenate([[first], _capped(np.exp(-steepness * np.arange(n_experts - 1)), 1 - first, first)])

    def excess(steepness: float) -> float:
        share_E = shares(steepness)
        used = share_E[share_E > 0]
        return float(-(used * np.log(used)).sum() - wanted)

    if excess(0.0) <= 0:
        return shares(0.0)
    steepest = 50.0
    if excess(steepest) >= 0:
        return shares(steepest)
    root: Any = brentq(excess, 0.0, steepest)
    return shares(float(root))


def _capped(weights: np.ndarray, total: float, cap: float) -> np.ndarray:
    """Scale falling weights to sum to `total`, none above `cap`; what is cut off goes to the ones after."""
    out, left = np.zeros_like(weights), total
    for place in range(len(weights)):
        tail = weights[place:].sum()
        if tail > 0 and weights[place] / tail * left <= cap:
            out[place:] = weights[place:] / tail * left
            return out
        out[place] = min(cap, left)
        left -= out[place]
    return out
