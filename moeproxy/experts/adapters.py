"""Observers of the families whose experts module is not called with hidden states, choices and gate weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeproxy.experts.observe import NO_EXPERT, Observer, PairsObserver


class ZeroExpertsObserver(PairsObserver):
    """LongCat-Flash: some experts after the routed ones return their input. They are no choice of an expert.

    Its module cannot be called with one expert a token, so every pair gets a second slot of weight 0, a zero expert
    where there is one.
    """

    def slots(self, module: Any, index_S1: Tensor, weight_S1: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights (S, 2) of the pairs."""
        second_S1 = torch.full_like(index_S1, module.total_experts - 1) if module.zero_expert_num else index_S1
        return torch.cat([index_S1, second_S1], dim=1), torch.cat([weight_S1, torch.zeros_like(weight_S1)], dim=1)

    def chosen(self, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Chosen experts (T, K), NO_EXPERT where a slot went to a zero expert."""
        return index_TK.masked_fill(index_TK >= len(self.totals.load_E), NO_EXPERT)


class SkipObserver(PairsObserver):
    """ZAYA: the router may skip the experts; it then hands over expert 0 with gate weight exactly 0.

    Such a slot is recorded as no expert. (A softmax is 0 for a chosen expert only where it underflows.)
    """

    def chosen(self, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Chosen experts (T, K), NO_EXPERT where the token skipped them."""
        return index_TK.masked_fill(weight_TK == 0, NO_EXPERT)


class GatedInputObserver(Observer):
    """Llama 4: the gate weight multiplies the expert's *input*, and all experts run on all tokens.

    The recorded output is therefore what the expert adds to the layer, f(g x), with the gate in it: its norm and
    peak are of that, and the saliency is its norm, not multiplied by the gate a second time. `gate_LE` sums the
    sigmoids of the chosen experts' logits; the context is the gate-weighted mean of x, as everywhere. The module's
    outputs are only read, so the forward pass is bit for bit the model's own.
    """

    def attach(self, block: nn.Module, experts: str) -> list[RemovableHandle]:
        """Hook the router and the experts module."""
        router = block.get_submodule("router")
        return [
            router.register_forward_hook(self.after_router),
            block.get_submodule(experts).register_forward_hook(self.after_experts),
        ]

    def after_router(self, module: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the tokens, the chosen experts and their gate weights."""
        score_TE, logit_TE = output
        index_TK = torch.topk(logit_TE, module.top_k, dim=1).indices
        self._routed = (args[0], index_TK, score_TE.gather(1, index_TK))

    def after_experts(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Record the outputs of the chosen experts."""
        hidden_TD, index_TK, weight_TK = self.taken()
        output_ETD = output.view(-1, *hidden_TD.shape)
        token_T1 = torch.arange(len(hidden_TD), device=index_TK.device).unsqueeze(1)
        self.record(hidden_TD, index_TK, weight_TK, output_ETD[index_TK, token_T1], gated=True)


class SortedObserver(Observer):
    """JetMoe: the router sorts the pairs of token and expert by expert; two linear layers follow it.

    Recorded are the MLP's experts. The attention has experts too (its query and output projections, with a router
    of their own); they share the number of experts and are kept or dropped with the MLP expert of the same number,
    but what they do does not enter the profile.
    """

    def attach(self, block: nn.Module, experts: str) -> list[RemovableHandle]:
        """Hook the router and the last of the experts' linear layers."""
        return [
            block.get_submodule("router").register_forward_hook(self.after_router),
            block.get_submodule("output_linear").register_forward_hook(self.after_experts),
        ]

    def after_router(self, module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Undo the sorting of the choices and keep its order."""
        order_S, _, gate_S, expert_size, _ = output
        expert_S = torch.repeat_interleave(torch.tensor(expert_size, device=order_S.device))
        index_S, weight_S = torch.empty_like(order_S), torch.empty_like(gate_S)
        index_S[order_S], weight_S[order_S] = expert_S, gate_S
        shape_TK = (-1, module.top_k)
        self._routed = (args[0], index_S.view(shape_TK), weight_S.view(shape_TK), order_S)

    def after_experts(self, module: nn.Module, args: Any, output_SD: Tensor) -> None:
        """Record the experts' outputs before gating."""
        hidden_TD, index_TK, weight_TK, order_S = self.taken()
        plain_SD = torch.empty_like(output_SD)
        plain_SD[order_S] = output_SD
        self.record(hidden_TD, index_TK, weight_TK, plain_SD.view(*index_TK.shape, -1))


OBSERVERS: Mapping[str, type[Observer]] = {
    "pairs": PairsObserver,
    "zero_experts": ZeroExpertsObserver,
    "skip": SkipObserver,
    "gated_input": GatedInputObserver,
    "sorted": SortedObserver,
}
