"""NP: faults of numeric precision."""

from __future__ import annotations

import itertools
import math

from moeproxy.lab.faults.fault import Fault, Seam, TellTale

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


def _low_precision_scale(healthy: Seam, strength: float) -> Seam:
    bits = mantissa_bits(strength)

    def attention_scale(scale: float, *, step: int) -> float:
        return rounded(healthy(scale, step=step), bits)

    return attention_scale


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
)
