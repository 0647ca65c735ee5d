"""Loss-free load balancing by the router's correction bias, as DeepSeek-V3 does it (arXiv 2408.15664)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class BiasBalancer:
    """Nudge each expert's correction bias against its load: up when it gets too few tokens, down when too many.

    Args:
        model: a model whose MoE blocks have `gate.e_score_correction_bias` (E,) and an `experts` module.
        rate: step of the bias for each call of `step`, in score units.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate = rate
        self._blocks: list[Any] = [
            m for m in model.modules() if hasattr(getattr(m, "gate", None), "e_score_correction_bias")
        ]
        self._load_LE = [torch.zeros_like(block.gate.e_score_correction_bias) for block in self._blocks]
        self._hooks = [
            block.experts.register_forward_pre_hook(self._counter(layer)) for layer, block in enumerate(self._blocks)
        ]

    def _counter(self, layer: int):
        def count(_module: torch.nn.Module, arguments: tuple) -> None:
            self._load_LE[layer] += torch.bincount(arguments[1].flatten(), minlength=len(self._load_LE[layer]))

        return count

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by one step and forget the counts."""
        for block, load_E in zip(self._blocks, self._load_LE, strict=True):
            block.gate.e_score_correction_bias += self._rate * torch.sign(load_E.mean() - load_E)
            load_E.zero_()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
