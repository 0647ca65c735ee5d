"""Floating-point operations of what a rank computes, counted op by op: torch's own table and what it lacks.

torch's `FlopCounterMode` has no row for grouped matrix products and for the CPU's fused attention, which is most of
what a Mixture-of-Experts model does. A multiply and an add are two operations; attention counts whole, as torch does
it, also where it is causal and kernels leave half of it out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATEN = torch.ops.aten


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operations of one call that the dispatcher sees; 0 for what neither multiplies matrices nor attends.

    Args:
        func: the operator's overload.
        args, kwargs, result: of the call.
    """
    packet = func.overloadpacket
    if packet is _ATEN._grouped_mm:
        return grouped(args[0].shape, args[1].shape, result.shape)
    if packet is _ATEN._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def grouped(left: Any, right: Any, out: Any) -> int:
    """Return the operations of a grouped product from the shapes.

    Rows by expert (R, K) x (E, K, N) -> (R, N), or the weights' gradient (K, R) x (R, N) -> (E, K, N): every row meets
    one expert, so the number of experts does not count.
    """
    if len(left) == 2 and len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    return 2 * math.prod(out) * left[-1]
