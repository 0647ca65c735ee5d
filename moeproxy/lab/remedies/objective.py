"""Remedies in rewards, advantages, mask and the loss's parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moeproxy.lab.calculator import answer_call
from moeproxy.lab.remedies.treatment import Act, Seam, Treatment, always, passed_through
from moeproxy.lab.seams import Batch, Coefficients
from moeproxy.lab.settings import GRPOSettings

_KL = 5.0
_ENTROPY = 0.5
_RANGE = (0.0, 1.0)  # of every verifier here


def _before(change: Callable[[Coefficients], Coefficients]) -> Act:
    """An act that changes what is configured, before the loop's code (and a fault in it) uses it."""
    return lambda seam: lambda configured, *, step: seam(change(configured), step=step)


def _after(change: Callable[[Coefficients], Coefficients]) -> Act:
    """An act that changes what enters the loss."""
    return lambda seam: lambda configured, *, step: change(seam(configured, step=step))


def _right_signs(used: Coefficients) -> Coefficients:
    return Coefficients(abs(used.beta), abs(used.entropy), abs(used.balance))


def _rewards(change: Callable[[list[float], int], list[float]]) -> Callable[[GRPOSettings], Mapping[str, Act]]:
    """A plan that changes the rewards after they are computed, given the samples a group."""

    def plan(settings: GRPOSettings) -> Mapping[str, Act]:
        return {"reward": lambda seam: lambda *args, step: change(seam(*args, step=step), settings.samples)}

    return plan


def clipped(rewards: list[float], _samples: int) -> list[float]:
    """Return rewards cut to the verifier's range."""
    low, high = _RANGE
    return [min(max(value, low), high) for value in rewards]


def without_outliers(rewards: list[float], samples: int) -> list[float]:
    """Return rewards in which those outside the verifier's range are the mean of the others of their group."""
    low, high = _RANGE
    kept: list[float] = []
    for start in range(0, len(rewards), samples):
        group = rewards[start : start + samples]
        inside = [value for value in group if low <= value <= high]
        mean = sum(inside) / len(inside) if inside else 0.0
        kept += [value if low <= value <= high else mean for value in group]
    return kept


def _advantages(change: Callable[[torch.Tensor, Batch], torch.Tensor]) -> Act:
    def act(seam: Seam) -> Seam:
        return lambda advantages_B, batch, *, step: change(seam(advantages_B, batch, step=step), batch)

    return act


def centred(advantages_B: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return advantages less the mean of their group, which is zero in GRPO."""
    grouped_PG = advantages_B.reshape(-1, batch.samples)
    return (grouped_PG - grouped_PG.mean(dim=1, keepdim=True)).reshape(-1)


def bounded(advantages_B: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return advantages cut to what a group of G samples can give: (G - 1) / sqrt(G) standard deviations."""
    most = (batch.samples - 1) / math.sqrt(batch.samples)
    return advantages_B.clamp(-most, most)


def regrouped(_advantages_B: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return advantages computed anew from the rewards of this step, group by group, as TRL computes them."""
    rewards_PG = torch.tensor(batch.rewards, dtype=_advantages_B.dtype).reshape(-1, batch.samples)
    mean_P1, std_P1 = rewards_PG.mean(dim=1, keepdim=True), rewards_PG.std(dim=1, keepdim=True)
    return ((rewards_PG - mean_P1) / (std_P1 + 1e-4)).reshape(-1).to(_advantages_B.device)


def _masked(bad: Callable[[Batch], Sequence[bool]]) -> Act:
    """An act that takes samples out of the policy loss."""

    def change(advantages_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = bad(batch)
        if not any(out):
            return advantages_B
        return advantages_B * torch.tensor([not gone for gone in out]).to(advantages_B)

    return _advantages(change)


def bad_turns(batch: Batch) -> list[bool]:
    """Return which samples had a tool turn that failed, that was cut, or whose result is not what the call gives."""
    return [
        turn is not None and (turn.failed or turn.done or turn.result != answer_call(turn.call).result)
        for turn in batch.turns
    ]


def _mask_built_anew(_seam: Seam) -> Seam:
    return lambda mask_BT, *, step: mask_BT


def _mitigation(id: str, title: str, what: str, source: str, seam: str, plan: Any, **more: Any) -> Treatment:
    return Treatment(id, "mitigation", title, what, source, (seam,), plan, **more)


def _repair(id: str, title: str, what: str, source: str, seam: str, plan: Any, **more: Any) -> Treatment:
    return Treatment(id, "repair", title, what, source, (seam,), plan, **more)


REMEDIES = (
    _mitigation(
        "stronger_kl",
        "A stronger KL term",
        f"The configured weight of the KL term is {_KL:g} times as large.",
        "trl#2980, Search-R1#88 (remedies for a KL that explodes)",
        "coefficients",
        always(_before(lambda c: replace(c, beta=_KL * c.beta)), "coefficients"),
    ),
    _mitigation(
        "kl_off",
        "No KL term",
        "The configured weight of the KL term is 0.",
        "arXiv 2503.14476 (DAPO trains without it)",
        "coefficients",
        always(_before(lambda c: replace(c, beta=0.0)), "coefficients"),
    ),
    _mitigation(
        "entropy_bonus",
        "An entropy bonus",
        f"An entropy bonus of weight {_ENTROPY:g} enters the loss.",
        "verl#5953 (entropy_coeff, there 0.01 for a model of 35 billion parameters)",
        "coefficients",
        always(_after(lambda c: replace(c, entropy=c.entropy + _ENTROPY)), "coefficients"),
    ),
    _mitigation(
        "entropy_off",
        "No entropy term",
        "The loss has no entropy term, whatever its sign would be.",
        "entropy_coeff=0, verl's default",
        "coefficients",
        always(_after(lambda c: replace(c, entropy=0.0)), "coefficients"),
    ),
    _mitigation(
        "balance_off",
        "No load-balancing loss",
        "The loss has no load-balancing term beside the model's own.",
        "Megatron-LM#5694 (auxiliary loss off by default in RL)",
        "coefficients",
        always(_after(lambda c: replace(c, balance=0.0)), "coefficients"),
        needs_experts=True,
    ),
    _repair(
        "correct_signs",
        "Right signs in the loss",
        "KL term, entropy bonus and load-balancing loss enter with the sign that their names say.",
        "Logic-RL#58",
        "coefficients",
        always(_after(_right_signs), "coefficients"),
    ),
    _mitigation(
        "clip_rewards",
        "Rewards clipped to their range",
        "Rewards are cut to the verifier's range, 0 to 1.",
        "arXiv 2605.04431 (reward spike)",
        "reward",
        _rewards(clipped),
    ),
    _mitigation(
        "drop_outlier_rewards",
        "Impossible rewards dropped",
        "A reward outside the verifier's range, 0 to 1, counts as the mean of the others of its group: its sample "
        "has no advantage.",
        "trl (a sample that no reward function could score has advantage 0)",
        "reward",
        _rewards(without_outliers),
    ),
    _repair(
        "rescore",
        "Score with an independent verifier",
        "Rewards come from the strict verifier, called once more on the same responses.",
        "Visual-RFT#79 (strict answers only)",
        "reward",
        passed_through("reward"),
    ),
    _mitigation(
        "centre_advantages",
        "Advantages centred in their group",
        "The mean of each group's advantages is taken off.",
        "GRPO (arXiv 2402.03300): advantages of a group sum to zero",
        "advantages",
        always(_advantages(centred), "advantages"),
    ),
    _mitigation(
        "clip_advantages",
        "Advantages clipped",
        "Advantages are cut to what a group of G samples can give: (G - 1) / sqrt(G).",
        "arXiv 2605.04431 (advantage instability)",
        "advantages",
        always(_advantages(bounded), "advantages"),
    ),
    _repair(
        "regroup",
        "Advantages by prompt id",
        "Advantages are computed anew from the rewards of this step's own samples, group by group.",
        "Search-R1#88 (group ids)",
        "advantages",
        always(_advantages(regrouped), "advantages"),
    ),
    _mitigation(
        "mask_truncated",
        "Cut responses masked",
        "Responses that the length limit cut have no advantage.",
        "arXiv 2503.14476 (overlong filtering)",
        "advantages",
        always(_masked(lambda batch: batch.truncated), "advantages"),
    ),
    _mitigation(
        "mask_bad_turns",
        "Responses with a bad tool turn masked",
        "Responses whose tool failed, whose tool result is not what the call gives, or which were ended at the call, "
        "have no advantage.",
        "arXiv 2605.04431 (tool faults); Search-R1#21 (what the policy did not do must not count)",
        "advantages",
        always(_masked(bad_turns), "advantages"),
    ),
    _repair(
        "rebuild_mask",
        "Mask built where tokens are made",
        "The loss mask is the one that the rollout engine wrote with the tokens.",
        "Search-R1#21, RAGEN#71, unsloth#5682",
        "loss_mask",
        always(_mask_built_anew, "loss_mask"),
    ),
)
