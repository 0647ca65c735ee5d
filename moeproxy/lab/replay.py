"""Routing replay: the trainer's routers send tokens to the experts that the rollout engine chose (arXiv 2510.11370).

Gate weights come from the trainer's own scores of those experts, so that gradients reach each of them, also those that
the trainer would not have chosen (gathering them after the top-k gives drifted experts none: ISEEKYAN/Megatron-LM#79).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moeproxy.lab.rollout_hooks import is_sigmoid, routers_of
from moeproxy.lab.seams import Routing


@contextmanager
def replayed(model: nn.Module, choices_BTLK: torch.Tensor | None) -> Iterator[None]:
    """Let the routers of `model` use these experts in the forward passes of the block; None lets them choose.

    Args:
        model: the trainer's.
        choices_BTLK: experts of every token and MoE layer; -1 where the router shall choose.
    """
    handles = []
    if choices_BTLK is not None:
        for place, (_, router) in enumerate(sorted(routers_of(model).items())):
            handles.append(router.register_forward_hook(_hook(choices_BTLK[:, :, place].flatten(0, 1))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(choices_NK: torch.Tensor) -> Any:
    def route(router: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        routing = sent_to(Routing.of(0, output, is_sigmoid(router)), choices_NK, _normalises(router))
        return routing.logits_TE, routing.weights_TK, routing.index_TK

    return route


def sent_to(routing: Routing, choices_TK: torch.Tensor, normalised: bool) -> Routing:
    """Return a routing whose tokens go to `choices_TK`; a token with a -1 keeps its own experts.

    Args:
        routing: of the trainer's router.
        choices_TK: the experts.
        normalised: whether the gate weights of a token sum to a constant, as `norm_topk_prob` says.
    """
    scores_TE = routing.logits_TE.sigmoid() if routing.sigmoid else routing.logits_TE.float().softmax(dim=-1)
    wanted_TK = choices_TK.to(routing.index_TK)
    given_T1 = wanted_TK.ge(0).all(dim=-1, keepdim=True)
    index_TK = torch.where(given_T1, wanted_TK, routing.index_TK)
    own_TK, new_TK = scores_TE.gather(-1, routing.index_TK), scores_TE.gather(-1, index_TK)
    if normalised:
        # The weights' sum, 1 or the routed scaling factor, does not depend on the experts.
        weights_TK = new_TK / new_TK.sum(-1, keepdim=True) * routing.weights_TK.sum(-1, keepdim=True).detach()
    else:
        weights_TK = new_TK * (routing.weights_TK / own_TK).mean(-1, keepdim=True).detach()
    weights_TK = torch.where(given_T1, weights_TK.to(routing.weights_TK), routing.weights_TK)
    return Routing(routing.layer, routing.logits_TE, weights_TK, index_TK, routing.sigmoid)


def _normalises(router: nn.Module) -> bool:
    return bool(getattr(router, "norm_topk_prob", True))
