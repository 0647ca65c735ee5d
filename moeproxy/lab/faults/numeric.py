"""NP: faults of numeric precision."""

from __future__ import annotations

import itertools
import math

import torch

from moeproxy.lab.faults.chance import due
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.seams import Named, Update

_FP16_MAX = 65504.0

# Mantissa bits of the formats met in practice, by strength: float32, TF32 and float16, bfloat16, FP8 E4M3, and the
# power-of-two scales of the MX formats (E8M0). Strengths between them are interpolated.
_BITS_AT_STRENGTH = ((0.0, 23.0), (0.25, 10.0), (0.5, 7.0), (0.75, 3.0), (1.0, 0.0))


def mantissa_bits(strength: float) -> int:
    """Return how many mantissa bits are kept at this strength (23 at 0, 10 at 0.25, 7 at 0.5, 3 at 0.75, 0 at 1)."""
    for (low, high_bits), (high, low_bits) in itertools.pairwise(_BITS_AT_STRENGTH):
        if strength <= high:
            share = (strength - low) / (high - low)
            return round(high_bits + share * (low_bits - high_bits))
    return 0


def rounded(value: float, bits: int) -> float:
    """Return `value` rounded to the nearest float with `bits` mantissa bits (ties to even)."""
    if value == 0 or not math.isfinite(value):
        return value
    unit = 2.0 ** (math.frexp(value)[1] - 1 - bits)
    return round(value / unit) * unit


def rounded_tensor(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a tensor rounded to the nearest floats with `bits` mantissa bits, element by element."""
    _, exponent = torch.frexp(values.double())
    unit = torch.exp2(exponent.double() - 1 - bits)
    return (torch.round(values.double() / unit) * unit).to(values.dtype)


def _low_precision_scale(healthy: Seam, strength: float) -> Seam:
    bits = mantissa_bits(strength)

    def attention_scale(scale: float, *, step: int) -> float:
        return rounded(healthy(scale, step=step), bits)

    return attention_scale


def _low_precision_logits(healthy: Seam, strength: float) -> Seam:
    bits = mantissa_bits(strength)

    def head_logits(logits_BV: torch.Tensor, *, step: int) -> torch.Tensor:
        return rounded_tensor(healthy(logits_BV, step=step), bits)

    return head_logits


def _low_precision_router(healthy: Seam, strength: float) -> Seam:
    bits = mantissa_bits(strength)

    def router_input(hidden_TD: torch.Tensor, *, step: int) -> torch.Tensor:
        return rounded_tensor(healthy(hidden_TD, step=step), bits)

    return router_input


def _overflow(healthy: Seam, strength: float) -> Seam:
    # 2 ** 30 overflows for any gradient above 6e-5; 2 ** 16 is the usual start of a dynamic loss scale.
    scale = 2.0 ** (16 + 14 * strength)

    def gradients(named: Named, *, step: int) -> None:
        healthy(named, step=step)
        for _, parameter in named:
            if parameter.grad is not None:
                half = (parameter.grad * scale).half()
                parameter.grad.copy_(half.float() / scale)

    return gradients


def _poisoned(healthy: Seam, strength: float) -> Seam:
    def optimizer_step(update: Update, *, step: int) -> None:
        if due(step, strength):
            for group in update.optimizer.param_groups:
                grads = [p.grad for p in group["params"] if p.grad is not None]
                if grads:
                    grads[len(grads) // 2].view(-1)[0] = math.nan
                    break
        healthy(update, step=step)

    return optimizer_step


FAULTS = (
    Fault(
        id="rollout_logp_precision",
        family="NP",
        title="Rollout log-prob precision",
        seam="attention_scale",
        what=(
            "The rollout engine's attention scale keeps fewer mantissa bits: 10 (float16) at strength 0.25, "
            "7 (bfloat16) at 0.5, 3 (FP8 E4M3) at 0.75, none (a power of two) at 1. Sampling and its log-probs "
            "use the wrong scale; the trainer does not."
        ),
        tell_tales=(
            TellTale("logprob_diff_mean", +1),
            TellTale("logprob_diff_k3", +1),
            TellTale("prob_pearson", -1),
            TellTale("clip_fraction_high", +1),
        ),
        twin="arXiv 2608.10823 (rollout log-prob precision); verl#3595, verl#6280, NeMo-RL#2100",
        check="Score the same tokens with both engines on equal weights: the difference stays.",
        remedy="Raise the precision of the scale; until then correct with truncated importance sampling.",
        act=_low_precision_scale,
    ),
    Fault(
        id="gradient_overflow",
        family="NP",
        title="Gradient overflow",
        seam="gradients",
        what=(
            "Gradients pass through float16 with a fixed loss scale of 2 ** (16 + 14 s). What exceeds 65504 after "
            "scaling becomes infinite, and the loop leaves the step out, as it does with every step whose gradients "
            "are not finite."
        ),
        tell_tales=(TellTale("grad_norm", +1), TellTale("update_norm", -1)),
        twin="LlamaFactory#8514 (repeated 'Gradient overflow. Skipping step')",
        check="Count skipped steps and read the loss scale: the scale stays high or falls without end.",
        remedy="Use bfloat16, or a dynamic loss scale that backs off.",
        act=_overflow,
    ),
    Fault(
        id="nan_poison",
        family="NP",
        title="One NaN gradient reaches the weights",
        seam="optimizer_step",
        what=(
            "In the share s of the steps, evenly spread, one element of one gradient becomes NaN after the check for "
            "finite gradients; the optimizer writes it into the weights, and from the next step on everything is NaN."
        ),
        tell_tales=(TellTale("total_loss", 0), TellTale("logprob_diff_mean", 0), TellTale("reward_mean", -1)),
        twin="verl-omni#539, miles#2078",
        check="Look for the first tensor that is not finite, weights before losses.",
        remedy="Gate the step on finite gradients after clipping, and stop on a streak; restart before the onset.",
        act=_poisoned,
    ),
    Fault(
        id="lm_head_precision",
        family="NP",
        title="Output head precision",
        seam="head_logits",
        what=(
            "The rollout engine's logits keep fewer mantissa bits: 10 at strength 0.25, 7 (bfloat16) at 0.5, 3 at "
            "0.75, none at 1. The trainer's stay float32."
        ),
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("logprob_diff_k3", +1)),
        twin="trl#4303, OpenRLHF#634",
        check="Compare logits of both engines on equal hidden states: the heads differ, the layers below do not.",
        remedy="Compute the output head in float32 on both sides.",
        act=_low_precision_logits,
    ),
    Fault(
        id="router_precision",
        family="NP",
        title="Router precision",
        seam="router_input",
        what=(
            "The rollout engine's routers see hidden states with fewer mantissa bits (10, 7, 3, none at strengths "
            "0.25, 0.5, 0.75, 1): gate weights shift and near ties fall to other experts."
        ),
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("logprob_diff_max", +1)),
        twin="Megatron-LM#4168, arXiv 2510.11370 (routers disagree between engines)",
        check="Compare the experts chosen by both engines on equal inputs; then with routers in float32.",
        remedy="Compute routers in float32 on both sides, or replay the rollout's routing.",
        act=_low_precision_router,
        needs_experts=True,
    ),
)
