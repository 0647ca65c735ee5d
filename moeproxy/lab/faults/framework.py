"""FA: faults of the framework's adaptation: what lies between a correct algorithm and a correct program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from moeproxy.lab.faults.chance import chosen, due
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.seams import Coefficients, Named, Update

_MAX_SHIFT = 8
_EP_SIZE = 8


def _stale(healthy: Seam, strength: float) -> Seam:
    def sync(send: Callable[[], None], *, step: int) -> None:
        if not due(step, strength):
            healthy(send, step=step)

    return sync


def _swapped(healthy: Seam, strength: float) -> Seam:
    def rollout_weights(model: nn.Module, *, step: int) -> None:
        healthy(model, step=step)
        fused = [p for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")]
        weight_EID = fused[len(fused) // 2]
        n = round(strength * len(weight_EID))
        gate, up = weight_EID[:n].chunk(2, dim=1)
        weight_EID[:n] = torch.cat([up, gate], dim=1)

    return rollout_weights


def _shifted(healthy: Seam, strength: float) -> Seam:
    shift = max(1, round(_MAX_SHIFT * strength))

    def position_ids(positions_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BT = healthy(positions_BT, step=step)
        # One token at a time is a response being written. Rotary positions are relative: a common shift is none.
        return passed_BT + shift if passed_BT.shape[1] == 1 else passed_BT

    return position_ids


def _mask_off_by_one(healthy: Seam, strength: float) -> Seam:
    def loss_mask(mask_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BT = healthy(mask_BT, step=step)
        rows = chosen(len(passed_BT), strength, step, salt=11).to(passed_BT.device)
        shifted_BT = torch.zeros_like(passed_BT)
        shifted_BT[:, 1:] = passed_BT[:, :-1]
        return torch.where(rows.unsqueeze(1), shifted_BT, passed_BT)

    return loss_mask


def _expert_gradients_scaled(healthy: Seam, strength: float) -> Seam:
    factor = 1 + (_EP_SIZE - 1) * strength

    def gradients(named: Named, *, step: int) -> None:
        healthy(named, step=step)
        for name, parameter in named:
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return gradients


def _renormalised(healthy: Seam, strength: float) -> Seam:
    top_p = 1 - 0.5 * strength

    def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BV = healthy(logits_BV, drawn_BT, step=step)
        sorted_BV, order_BV = passed_BV.softmax(dim=-1).sort(dim=-1, descending=True)
        # A token is out when those before it hold the share already; the first is always in.
        out_BV = sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p
        return passed_BV.masked_fill(out_BV.gather(-1, order_BV.argsort(dim=-1)), -1e9)

    return sampling_logits


def _state_lost(healthy: Seam, strength: float) -> Seam:
    def optimizer_step(update: Update, *, step: int) -> None:
        if due(step, strength):
            update.optimizer.state.clear()
        healthy(update, step=step)

    return optimizer_step


def _wrong_sign(healthy: Seam, strength: float) -> Seam:
    def coefficients(before: Coefficients, *, step: int) -> Coefficients:
        passed = healthy(before, step=step)
        return replace(passed, beta=passed.beta * (1 - 2 * strength))

    return coefficients


FAULTS = (
    Fault(
        id="stale_rollout",
        family="FA",
        title="Stale rollout weights",
        seam="sync",
        what="The share s of the weight syncs, evenly spread, is left out; at strength 1 the rollout engine keeps the "
        "weights that it had at the onset.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("logprob_diff_k3", +1)),
        twin="trl#5312",
        check="Hash the weights of both engines after the sync: they differ.",
        remedy="Sync after every update, also after the engine slept; count the syncs.",
        act=_stale,
    ),
    Fault(
        id="weight_conversion_wrong",
        family="FA",
        title="Wrong weight conversion",
        seam="rollout_weights",
        what="In the middle MoE layer of the rollout copy, gate and up projections of the share s of the experts are "
        "swapped on their way from the trainer.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("prob_pearson", -1)),
        twin="SkyRL#1680, slime#2073",
        check="Compare hidden states of both engines layer by layer: one layer is wrong from the first sync on.",
        remedy="Convert by name and check a checksum of every tensor after the sync.",
        act=_swapped,
        needs_experts=True,
    ),
    Fault(
        id="position_shift",
        family="FA",
        title="Position shift",
        seam="position_ids",
        what="The rollout engine counts the positions of response tokens round(8 s) too high, prompts rightly.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("prob_pearson", -1)),
        twin="Megatron-Bridge#1776, trl#256",
        check="Score a response whose prompt is not padded with both engines, then one that is padded or packed.",
        remedy="Take positions from the attention mask on both sides.",
        act=_shifted,
    ),
    Fault(
        id="loss_mask_wrong",
        family="FA",
        title="Loss mask off by one",
        seam="loss_mask",
        what="In the share s of the responses the loss mask lies one token too late: the first token, on which most "
        "depends, is not trained, and the padding after the end counts as a token.",
        tell_tales=(TellTale("grad_norm", -1),),
        twin="Search-R1#21, RAGEN#71, unsloth#5673",
        check="Print tokens beside their mask for one response that ends before the longest.",
        remedy="Build the mask where the tokens are made, and test it on a response of known length.",
        act=_mask_off_by_one,
    ),
    Fault(
        id="grad_scale_constant",
        family="FA",
        title="Expert gradients too large by a constant",
        seam="gradients",
        what="Gradients of experts are 1 + 7 s times what they should be, as when they are divided by the wrong "
        "group size of 8 ranks.",
        tell_tales=(TellTale("grad_norm_experts", +1), TellTale("grad_norm", +1)),
        twin="DeepSpeed#5618, DeepSpeed#6545",
        check="Compare gradient norms of experts with those of a run without expert parallelism: a constant factor.",
        remedy="Divide by the size of the group that the gradients were summed over.",
        act=_expert_gradients_scaled,
        needs_experts=True,
    ),
    Fault(
        id="sampling_semantics",
        family="FA",
        title="Log-probs of another distribution",
        seam="sampling_logits",
        what="The rollout engine samples from the top 1 - 0.5 s of the probability and reports log-probs renormalised "
        "over it; the trainer uses the whole vocabulary.",
        tell_tales=(TellTale("logprob_diff_mean", +1),),
        twin="trl#6789",
        check="Sum the engine's probabilities over the whole vocabulary: sampled tokens alone give 1.",
        remedy="Sample with top-p 1, or apply the same truncation in the trainer, or report raw log-probs.",
        act=_renormalised,
    ),
    Fault(
        id="optimizer_state_lost",
        family="FA",
        title="Optimizer state lost",
        seam="optimizer_step",
        what="Before the share s of the steps, evenly spread, Adam's moments and step counts are lost; the first step "
        "after it moves every weight by the learning rate.",
        tell_tales=(TellTale("update_norm", +1),),
        twin="Megatron-LM#1842, prime-rl#3561",
        check="Read the optimizer's step counters after a resume.",
        remedy="Save and restore the optimizer's state and its groups; warm up where it is gone.",
        act=_state_lost,
    ),
    Fault(
        id="kl_sign",
        family="FA",
        title="KL term with the wrong sign",
        seam="coefficients",
        what="The weight of the KL term is 1 - 2 s times what it should be: at strength 1 the policy is rewarded for "
        "leaving the reference; at strength 1/2 there is no KL term at all.",
        tell_tales=(TellTale("kl", +1),),
        twin="Logic-RL#58",
        check="Train with zero reward: with the right sign KL falls to zero.",
        remedy="Correct the sign; log the KL term as it enters the loss.",
        act=_wrong_sign,
    ),
)
