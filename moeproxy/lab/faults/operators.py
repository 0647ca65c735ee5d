"""OI: faults of operator implementations, in the rollout engine's kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.faults.numeric import mantissa_bits, rounded_tensor
from moeproxy.lab.seams import Routing

_TAIL_FROM = 4


def _not_normalised(healthy: Seam, strength: float) -> Seam:
    def routing(before: Routing, *, step: int) -> Routing:
        passed = healthy(before, step=step)
        scores_TE = passed.logits_TE.sigmoid() if passed.sigmoid else passed.logits_TE.softmax(dim=-1)
        # Renormalised weights sum to the routed scaling factor.
        factor_T1 = passed.weights_TK.sum(dim=-1, keepdim=True)
        raw_TK = scores_TE.gather(-1, passed.index_TK) * factor_T1
        return replace(passed, weights_TK=torch.lerp(passed.weights_TK, raw_TK.to(passed.weights_TK), strength))

    return routing


def _neighbour(healthy: Seam, strength: float) -> Seam:
    def routing(before: Routing, *, step: int) -> Routing:
        passed = healthy(before, step=step)
        n_experts = passed.logits_TE.shape[-1]
        wrong_TK = passed.index_TK < round(strength * n_experts)
        index_TK = torch.where(wrong_TK, (passed.index_TK + 1) % n_experts, passed.index_TK)
        return replace(passed, index_TK=index_TK)

    return routing


def _tail_loses_precision(healthy: Seam, strength: float) -> Seam:
    bits = mantissa_bits(strength)

    def attention_input(hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BTD = healthy(hidden_BTD, positions_BT, step=step)
        late_BT1 = (positions_BT >= _TAIL_FROM).expand(passed_BTD.shape[:2]).unsqueeze(-1)
        return torch.where(late_BT1, rounded_tensor(passed_BTD, bits), passed_BTD)

    return attention_input


FAULTS = (
    Fault(
        id="topk_norm_missing",
        family="OI",
        title="Top-k weights not renormalised",
        seam="routing",
        what="The rollout engine's gate weights are (1 - s) times the renormalised ones plus s times the router's raw "
        "scores of the chosen experts.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("prob_pearson", -1)),
        twin="Qwen3-MoE's norm_topk_prob read wrongly (default differs between versions); prime-rl#1145",
        check="Sum the gate weights of a token: not 1 (or not the routed scaling factor).",
        remedy="Read the flag from the checkpoint's own config.",
        act=_not_normalised,
        needs_experts=True,
    ),
    Fault(
        id="expert_offset",
        family="OI",
        title="Grouped product reads the neighbour's weights",
        seam="routing",
        what="In the rollout engine tokens of the first round(s E) experts of every layer are multiplied with the "
        "weights of the next expert.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("prob_pearson", -1)),
        twin="SkyRL#1680 (kernel layout skipped after a reload)",
        check="Feed one expert at a time: outputs belong to another expert.",
        remedy="Rebuild the kernel's layout after every weight sync; compare with the loop over experts.",
        act=_neighbour,
        needs_experts=True,
    ),
    Fault(
        id="attention_tail",
        family="OI",
        title="Attention loses precision on long inputs",
        seam="attention_input",
        what=f"From position {_TAIL_FROM} on, the rollout engine's attention sees hidden states with fewer mantissa "
        "bits (10, 7, 3, none at strengths 0.25, 0.5, 0.75, 1); earlier positions are exact.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("logprob_diff_max", +1)),
        twin="verl#3595 with vllm#22103 (cascade attention)",
        check="Plot the log-prob difference over token positions: it starts at one position.",
        remedy="Switch the kernel off, or raise its accumulation precision.",
        act=_tail_loses_precision,
    ),
)
