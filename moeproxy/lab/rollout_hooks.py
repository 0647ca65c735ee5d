"""Hooks by which the seams inside the rollout engine's forward pass are reached."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor

from moeproxy.lab.seams import Routing, Seams


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the router of every MoE layer: modules that score experts and return (logits, weights, indices)."""
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("gate", "router") and hasattr(module, "top_k")
    }
    return {next(int(part) for part in name.split(".") if part.isdigit()): module for name, module in found.items()}


def is_sigmoid(router: nn.Module) -> bool:
    """Whether a router of the testbed's layouts scores by sigmoid (those that select by a correction bias do)."""
    return hasattr(router, "e_score_correction_bias")


class RolloutHooks:
    """Calls the seams from within one model's forward pass.

    Args:
        model: the rollout engine's own model.
        seams: where faults act.
    """

    def __init__(self, model: nn.Module, seams: Seams) -> None:
        self.step = 0
        self.chosen: dict[int, list[torch.Tensor]] = {}
        self._seams = seams
        self._positions_BT = torch.empty(0, dtype=torch.int64)
        base: Any = model.get_submodule(str(getattr(model, "base_model_prefix", "model")))
        base.register_forward_pre_hook(self._positions, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith(".self_attn"):
                module.register_forward_pre_hook(self._attention, with_kwargs=True)
        for layer, router in routers_of(model).items():
            router.register_forward_pre_hook(self._router)
            router.register_forward_hook(self._routing(layer, is_sigmoid(router)))

    def take_choices(self, n_rows: int) -> torch.Tensor:
        """Return the experts chosen since the last call for `n_rows` sequences, and forget them.

        Returns:
            int16 (B, T, L, K): T are the padded prompt tokens and all sampled tokens but the last; L is 0 without MoE.
        """
        if not self.chosen:
            return torch.empty(n_rows, 0, 0, 0, dtype=torch.int16)
        layers = [
            torch.cat([index_TK.reshape(n_rows, -1, index_TK.shape[-1]) for index_TK in parts], dim=1)
            for _, parts in sorted(self.chosen.items())
        ]
        self.chosen.clear()
        return torch.stack(layers, dim=2).to(torch.int16)

    def _positions(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (positions_BT := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = self._seams.position_ids(positions_BT, step=self.step)
            self._positions_BT = positions_BT
        return args, kwargs

    def _attention(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            hidden_BTD = self._seams.attention_input(kwargs["hidden_states"], self._positions_BT, step=self.step)
            return args, kwargs | {"hidden_states": hidden_BTD}
        return (self._seams.attention_input(args[0], self._positions_BT, step=self.step), *args[1:]), kwargs

    def _router(self, _module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (self._seams.router_input(args[0], step=self.step), *args[1:])

    def _routing(self, layer: int, sigmoid: bool) -> Any:
        def route(_module: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            routing = self._seams.routing(Routing.of(layer, output, sigmoid), step=self.step)
            self.chosen.setdefault(layer, []).append(routing.index_TK)
            return routing.logits_TE, routing.weights_TK, routing.index_TK

        return route


class SamplingSeam(LogitsProcessor):
    """Passes every step's logits through the seam and keeps what comes out, for the log-probs to be reported.

    Args:
        seams: where faults act.
        step: the training step.
        start: length of the padded prompts.
    """

    def __init__(self, seams: Seams, step: int, start: int) -> None:
        self._seams, self._step, self._start = seams, step, start
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, V) to sample from; those of a model gone NaN give token 0, as vLLM writes "!!!"."""
        head = self._seams.head_logits(scores, step=self._step)
        out = self._seams.sampling_logits(head, input_ids[:, self._start :], step=self._step)
        self.logits.append(out)
        if bool(out.isnan().any()):
            first = torch.zeros_like(out)
            first[:, 0] = 1e4
            return torch.where(out.isnan(), first, out)
        return out
