"""The protocol of the fidelity study, declared in code and not turned afterwards; `HISTORY` says what joined late.

Everything that could be turned afterwards until the numbers please stands here: signals, windows, scales, where
thresholds come from, what counts as found. Results carry the hash of it. What was tried on the way (on the original's
own runs only) is told in LOG.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from moeproxy.triage.study_signals import DERIVED, STEP_SIGNALS

_REWARD = ("reward_mean", "reward_std", "reward_largest", "reward_between", "reward_plain", "reward_tool")
_MISMATCH = (
    "logprob_diff_mean",
    "logprob_diff_max",
    "logprob_diff_k3",
    "logprob_diff_k1",
    "logprob_diff_first",
    "prob_pearson",
    "mismatch_peak",
    "mismatch_shape",
)
_LENGTH = ("response_length", "length_spread", "length_longest", "length_shortest", "short_share", "truncated")
_GRADIENT = ("grad_norm", "grad_norm_router", "grad_norm_experts", "grad_norm_attention", "grad_norm_embeddings")
_SHARES = ("router_share", "experts_share", "attention_share", "embeddings_share", "update_per_gradient")
_ADVANTAGE = ("advantage_spread", "advantage_group_mean", "advantage_peak", "advantage_reward", "advantage_before")

BY_DEFINITION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("advantage_instability", _ADVANTAGE),
    ("aux_loss_interference", ("total_loss", "loss_beside_policy")),
    ("delayed_credit", _ADVANTAGE),
    ("empty_response", _LENGTH),
    ("entropy_collapse", ("total_loss", "loss_beside_policy")),
    ("expert_collapse", ("total_loss", "loss_beside_policy")),
    ("expert_offset", _MISMATCH),
    ("grad_scale_constant", (*_GRADIENT, *_SHARES)),
    ("gradient_overflow", (*_GRADIENT, *_SHARES, "update_norm")),
    ("attention_tail", _MISMATCH),
    ("kl_explosion", ("update_norm", "update_per_gradient")),
    ("kl_sign", ("total_loss", "loss_beside_policy")),
    ("lm_head_precision", _MISMATCH),
    ("observation_corruption", ("reward_tool",)),
    ("optimizer_state_lost", ("update_norm", "update_per_gradient")),
    ("position_shift", _MISMATCH),
    ("repetition_collapse", ("repetition",)),
    ("response_too_long", _LENGTH),
    ("response_too_short", _LENGTH),
    ("reward_collapse", _REWARD),
    ("reward_hacking", _REWARD),
    ("reward_spike", _REWARD),
    ("rollout_logp_precision", _MISMATCH),
    ("router_frozen", ("grad_norm_router", "router_share")),
    ("router_precision", (*_MISMATCH, "router_agreement")),
    ("routing_mismatch", (*_MISMATCH, "router_agreement")),
    ("sampling_semantics", _MISMATCH),
    ("stale_rollout", _MISMATCH),
    ("termination_error", _LENGTH),
    ("tool_call_error", ("tool_error_rate", "reward_tool")),
    ("topk_norm_missing", _MISMATCH),
    ("update_freeze", ("update_norm", "update_per_gradient")),
    ("value_mismatch", _ADVANTAGE),
    ("weight_conversion_wrong", _MISMATCH),
)
"""Signals that a fault writes into rather than causes: any model shows them, so a proxy proves little by them."""

HISTORY = (
    "Declared before scoring but for three signals (`router_agreement`, `logprob_diff_k1`, `logprob_diff_first`), "
    "which joined after a first look at 17 runs of cluster-16 (seed 0): for those runs the choice was not blind."
)
"""What of the protocol was not declared before scoring."""

NEED_EXPERTS = (
    "router_precision",
    "weight_conversion_wrong",
    "grad_scale_constant",
    "topk_norm_missing",
    "expert_offset",
    "routing_mismatch",
    "aux_loss_interference",
    "expert_collapse",
    "router_frozen",
)
"""Faults that can change nothing on a model without experts."""

_BY_FAMILY = {
    "NP": "rollout_logp_precision gradient_overflow nan_poison lm_head_precision router_precision",
    "FA": "stale_rollout weight_conversion_wrong position_shift loss_mask_wrong grad_scale_constant sampling_semantics "
    "optimizer_state_lost kl_sign",
    "OI": "topk_norm_missing expert_offset attention_tail",
    "MR": "routing_mismatch aux_loss_interference expert_collapse router_frozen",
    "RF": "reward_spike reward_collapse reward_hacking",
    "PG": "empty_response repetition_collapse response_too_short response_too_long",
    "OD": "kl_explosion update_freeze entropy_collapse",
    "CA": "value_mismatch advantage_instability delayed_credit",
    "TE": "tool_call_error observation_corruption termination_error",
}
FAMILIES: dict[str, str] = {fault: family for family, names in _BY_FAMILY.items() for fault in names.split()}
"""Family of every fault of the catalogue (the room `lab`, which holds it, may not be imported here)."""


@dataclass(frozen=True)
class Protocol:
    """What is compared, in which units, and what counts.

    Args:
        signals: step signals compared, by their canonical names; clock time is none of them.
        derived: signals made from the trajectory table and from ratios of step signals (`study_signals.DERIVED`).
        windows: [start, stop) in steps after the onset of each run; a response is a mean over a window.
        spread_onsets: onsets over which the healthy spread is pooled.
        calibration_from: healthy runs with this seed or a later one set spreads and thresholds; they are never scored.
        alpha: share of healthy-against-healthy responses of a signal that may pass its threshold.
        run_alpha: share of healthy pairs that may be called a response as a whole.
        run_entries: number of strongest signals whose mean decides whether a run responds at all.
        noise: entries below this share of their threshold count as none in retrieval: most entries of a response are
            noise, and together they would outweigh those that moved.
        persist: steps that a departure must last.
        folds: parts of the calibration seeds; each part is judged by the others to measure false responses.
        levels: names of the strengths of a fault, largest strength first, where no registry says them.
        by_definition: (fault, signals) that are left out of direction and rank correlation of that fault; retrieval
            is reported with all signals and without every signal named here.
        need_experts: faults that a model without experts cannot show: they count as not found there.
        original: label of the original.
        method: the way of choosing experts under test; models chosen otherwise are controls.
        resamples: bootstrap resamples, over faults and seeds.
        bootstrap_seed: their seed.
    """

    signals: tuple[str, ...] = STEP_SIGNALS
    derived: tuple[str, ...] = tuple(DERIVED)
    windows: tuple[tuple[int, int], ...] = ((0, 5), (5, 30))
    spread_onsets: tuple[int, ...] = tuple(range(10, 31, 2))
    calibration_from: int = 100
    alpha: float = 0.01
    run_alpha: float = 0.01
    run_entries: int = 3
    noise: float = 0.5
    persist: int = 3
    folds: int = 5
    levels: tuple[str, ...] = ("clear", "subtle")
    by_definition: tuple[tuple[str, tuple[str, ...]], ...] = BY_DEFINITION
    need_experts: tuple[str, ...] = NEED_EXPERTS
    original: str = "original"
    method: str = "cluster"
    resamples: int = 2000
    bootstrap_seed: int = 0

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of everything declared, scales of the signals included."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the protocol as JSON values, with scale, resolution and floor of every derived signal."""
        scales = {name: [DERIVED[name].scale, DERIVED[name].resolution, DERIVED[name].floor] for name in self.derived}
        return json.loads(json.dumps({**asdict(self), "scales": scales}))

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Protocol:
        """Return the protocol that `to_dict` wrote."""
        return Protocol(**{name: _tuples(value) for name, value in data.items() if name != "scales"})

    def defined(self, fault: str) -> frozenset[str]:
        """Return the signals that a fault changes by its definition."""
        return frozenset(dict(self.by_definition).get(fault, ()))

    @property
    def all_defined(self) -> frozenset[str]:
        """Signals that any fault changes by its definition."""
        return frozenset(name for _, names in self.by_definition for name in names)

    def words(self) -> tuple[str, ...]:
        """Return the protocol in plain sentences."""
        spans = ", ".join(f"{start}–{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in self.windows)
        return (
            "Every broken run is paired with the healthy run of the same model, seed and prompt order. The response of "
            "a signal in a window is the difference of the two window means, in units of the healthy seed-to-seed "
            f"spread of that model. Windows, in steps after the onset of each run: {spans}.",
            "Norms, KL, lengths and other positive signals enter as logarithms, correlations near 1 as logits, all "
            "others as they are; nothing depends on the size of a model. A value that became NaN or infinite counts "
            "as the strongest response there is.",
            f"Spreads and thresholds come from healthy runs with seeds from {self.calibration_from} on, at the "
            "settings of the broken runs. They are never scored. A signal's threshold is the "
            f"{1 - self.alpha:.0%} quantile of healthy-against-healthy responses, each pair judged with a spread that "
            "was estimated without its two runs.",
            f"A run responds as a whole when the mean of its {self.run_entries} strongest signals (response over "
            f"threshold) exceeds what {1 - self.run_alpha:.0%} of healthy pairs reach, with a margin for few "
            "calibration runs. Otherwise its nearest fault is “none”.",
            "The library holds, for every fault and level, the original's mean response over the seeds other than the "
            "judged one. Retrieval asks which entry of the same level has the largest cosine with the judged response "
            f"(asinh of response over threshold, so that one huge signal does not drown the others; what stays below "
            f"{self.noise:g} of its threshold counts as none). Top-1 counts the right fault, “none” is a miss; chance "
            "is one over the number of faults.",
            "Direction agreement is the share of the signals that move significantly in all the original's other seeds "
            "and that move the same way in the judged run, each in the window where it is strongest. Rank correlation "
            "is Spearman's, over all signals and windows. Both leave out the signals that the fault changes by its "
            "definition.",
            f"The onset is the first step from which one of the significant signals departs for {self.persist} steps.",
            "The original itself is judged in the same way, by its other seeds: that is the ceiling.",
        )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
