"""Measure a step: gradient norms, weight change, router load, rollout-vs-training difference, trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from moeproxy.lab.episode import Rollouts

MODULES = ("router", "experts", "attention", "embeddings")


def module_of(name: str) -> str | None:
    """Return which of `MODULES` a parameter belongs to, or None (norms, dense blocks), by its name."""
    parts = set(name.split("."))
    if parts & {"experts", "shared_experts", "shared_expert"}:
        return "experts"
    if parts & {"gate", "router"}:
        return "router"
    if parts & {"self_attn", "attention"}:
        return "attention"
    return "embeddings" if parts & {"embed_tokens", "lm_head", "wte"} else None


def gradient_norms(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """Return L2 norms of the gradients before clipping: `grad_norm` and `grad_norm_<module>`.

    Non-finite gradients give a non-finite norm: they are not hidden.
    """
    groups: dict[str, list[torch.Tensor]] = {module: [] for module in MODULES}
    rest: list[torch.Tensor] = []
    for name, parameter in named:
        if parameter.grad is not None:
            groups.get(module_of(name) or "", rest).append(parameter.grad)
    norms = {f"grad_norm_{module}": _norm(tensors) for module, tensors in groups.items()}
    total = math.sqrt(sum(value**2 for value in norms.values()) + _norm(rest) ** 2)
    return {"grad_norm": total, **norms}


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return nn.utils.get_total_norm(tensors).item() if tensors else 0.0


class WeightChange:
    """The L2 norm of the change of all weights between two moments."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before = [parameter.detach().clone() for parameter in self._parameters]

    def measure(self) -> float:
        """Return the norm of the change since the last call (or since construction)."""
        now = [parameter.detach() for parameter in self._parameters]
        norm = _norm([after - before for after, before in zip(now, self._before, strict=True)])
        for before, after in zip(self._before, now, strict=True):
            before.copy_(after)
        return norm


class RouterLoad:
    """Counts how many tokens each expert gets in the trainer's forward pass.

    Args:
        model: every module named `experts` that is called with (hidden states, top-k indices, ...) is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mask: torch.Tensor | None = None
        self._load: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        self._handles = [
            module.register_forward_pre_hook(self._counter(_layer(name), int(cast(int, module.num_experts))))
            for name, module in model.named_modules()
            if name.endswith(".experts") and hasattr(module, "num_experts")
        ]

    def watch(self, mask_BT: torch.Tensor | None) -> None:
        """Count the tokens that `mask_BT` keeps in the forward passes to come; None stops counting."""
        self._mask = mask_BT
        if mask_BT is not None:
            self._load.clear()
            self._chosen.clear()

    def _counter(self, layer: int, n_experts: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def count(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self._mask is not None:
                index_TK = arguments[1][self._mask.reshape(-1).bool()]
                self._load[layer] = torch.bincount(index_TK.flatten(), minlength=n_experts)
                self._chosen[layer] = arguments[1]

        return count

    def signals(self) -> dict[str, float]:
        """Return `router_load_entropy/<layer>` (share of log E) and `router_max_violation/<layer>` (max / mean - 1)."""
        found: dict[str, float] = {}
        for layer, load_E in sorted(self._load.items()):
            share_E = load_E / load_E.sum()
            entropy = -(share_E * share_E.clamp(min=1e-12).log()).sum().item()
            found[f"router_load_entropy/{layer}"] = entropy / math.log(len(load_E))
            found[f"router_max_violation/{layer}"] = (load_E.max() / load_E.float().mean()).item() - 1
        return found

    def agreement(self, rollout_BTLK: torch.Tensor) -> dict[str, float]:
        """Return `router_agreement/<layer>`: the share of a token's experts that the rollout engine chose too.

        Args:
            rollout_BTLK: the rollout engine's choices; -1 where it read no token.
        """
        read_BT = rollout_BTLK.flatten(2).ge(0).all(-1) if rollout_BTLK.numel() else torch.zeros(0)
        found: dict[str, float] = {}
        for place, (layer, trained_TK) in enumerate(sorted(self._chosen.items())):
            theirs_TK = rollout_BTLK[:, :, place][read_BT]
            ours_TK = trained_TK.reshape(*read_BT.shape, -1)[read_BT]
            same = (ours_TK.unsqueeze(-1) == theirs_TK.unsqueeze(-2)).any(-1)
            found[f"router_agreement/{layer}"] = same.float().mean().item()
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def mismatch(trained_BT: torch.Tensor, sampled_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Return how far the engines' log-probs (B, T, nats) of the sampled tokens lie apart, over tokens in the mask.

    `logprob_diff_k3` is the k3 estimate of KL(rollout || training): exp(r) - 1 - r with r = training - rollout.
    """
    keep = mask_BT.bool()
    trained, sampled = trained_BT[keep].double(), sampled_BT[keep].double()
    ratio = trained - sampled
    pair = torch.stack([trained.exp(), sampled.exp()])
    return {
        "logprob_diff_mean": ratio.abs().mean().item(),
        "logprob_diff_max": ratio.abs().max().item(),
        "logprob_diff_k3": (ratio.expm1() - ratio).mean().item(),
        "prob_pearson": torch.corrcoef(pair)[0, 1].item(),
    }


def mismatch_details(trained_BT: torch.Tensor, sampled_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    """Return the signed mean difference of the engines' log-probs, and the mean absolute one at the first token.

    The first token comes straight from the prompt: what goes wrong only while a response is written spares it.
    """
    keep = mask_BT.bool()
    ratio_BT = trained_BT.double() - sampled_BT.double()
    return {
        "logprob_diff_k1": -ratio_BT[keep].mean().item(),
        "logprob_diff_first": ratio_BT[:, 0][keep[:, 0]].abs().mean().item(),
    }


def placed_choices(made: Rollouts, prompt_width: int, width: int) -> torch.Tensor:
    """Return the rollout engine's choices (B, T, L, K) in the trainer's padding: prompts end at `prompt_width`.

    Places without a token that the engine read hold -1.
    """
    choices = made.choices or []
    whole = torch.full((len(choices), width, *choices[0].shape[1:]), -1, dtype=torch.int16)
    for row, prompt, read in zip(whole, made.prompt_ids, choices, strict=True):
        start = prompt_width - len(prompt)
        row[start : start + len(read)] = read
    return whole


def repetition_ratio(tokens: Sequence[int]) -> float:
    """Return the share of tokens that repeat an earlier token of the same response (0 for no response)."""
    return 1 - len(set(tokens)) / len(tokens) if tokens else 0.0


def group_signals(rewards: Sequence[float], samples: int) -> dict[str, float]:
    """Return reward mean, mean standard deviation within groups, and the share of groups without any spread."""
    reward_BG = torch.tensor(rewards, dtype=torch.float64).reshape(-1, samples)
    std_B = reward_BG.std(dim=1)
    return {
        "reward_mean": reward_BG.mean().item(),
        "reward_std": std_B.mean().item(),
        "zero_variance_groups": (std_B < 1e-8).double().mean().item(),
    }


def tool_columns(made: Rollouts, limit: int, eos: int) -> dict[str, list[float]]:
    """Return for each response how many tool calls it made, whether one failed, and whether `limit` tokens cut it."""
    turns = made.turns or []
    return {
        "tool_calls": [float(turn is not None) for turn in turns],
        "tool_error": [float(turn is not None and turn.failed) for turn in turns],
        "truncated": [float(cut) for cut in cut_off(made, limit, eos)],
    }


def cut_off(made: Rollouts, limit: int, eos: int) -> list[bool]:
    """Return whether `limit` tokens cut each response off; an episode that the environment ended is not cut."""
    masks = made.env_mask or [[1] * len(ids) for ids in made.completion_ids]
    turns = made.turns or [None] * len(made.completion_ids)
    return [
        _last_turn(mask) == limit and ids[-1] != eos and not (turn and turn.done)
        for ids, mask, turn in zip(made.completion_ids, masks, turns, strict=True)
    ]


def _last_turn(mask: Sequence[int]) -> int:
    """Return the number of tokens that the model wrote in its last turn."""
    return len(mask) - next((i for i in reversed(range(len(mask))) if not mask[i]), -1) - 1


def tool_signals(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the step's shares: responses that call, calls that fail (0 without calls), responses that were cut."""
    n, calls = len(columns["tool_calls"]), sum(columns["tool_calls"])
    return {
        "truncated": sum(columns["truncated"]) / n,
        "tool_call_rate": calls / n,
        "tool_error_rate": sum(columns["tool_error"]) / calls if calls else 0.0,
    }
