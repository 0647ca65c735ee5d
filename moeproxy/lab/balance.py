"""Load balancing: by the router's correction bias (arXiv 2408.15664), and by an auxiliary loss (arXiv 2101.03961)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moeproxy.lab.rollout_hooks import is_sigmoid, routers_of
from moeproxy.lab.seams import Routing


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


@contextmanager
def routers_watched(model: nn.Module | None) -> Iterator[list[Routing]]:
    """Collect what every router decides in the forward passes of the block; None watches nothing."""
    seen: list[Routing] = []
    routers = routers_of(model) if model is not None else {}
    handles = [router.register_forward_hook(_watcher(layer, seen)) for layer, router in routers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watcher(layer: int, seen: list[Routing]) -> Any:
    def watch(router: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
        seen.append(Routing.of(layer, output, is_sigmoid(router)))

    return watch


def load_balancing_loss(routed: Sequence[Routing], mask_BT: torch.Tensor) -> torch.Tensor:
    """Return E times the sum over experts of load share times mean score, a mean over layers (1 when balanced).

    Args:
        routed: each layer's routing of B*T tokens; sigmoid scores are normalised to sum to one.
        mask_BT: tokens that count.
    """
    valid_T = mask_BT.reshape(-1).bool()
    losses = []
    for routing in routed:
        scores_TE = routing.logits_TE.sigmoid() if routing.sigmoid else routing.logits_TE.softmax(dim=-1)
        score_TE = (scores_TE / scores_TE.sum(dim=-1, keepdim=True))[valid_T]
        n_experts = score_TE.shape[1]
        load_E = torch.bincount(routing.index_TK[valid_T].flatten(), minlength=n_experts).float()
        losses.append(n_experts * (load_E / load_E.sum() * score_TE.mean(dim=0)).sum())
    return torch.stack(losses).mean()
