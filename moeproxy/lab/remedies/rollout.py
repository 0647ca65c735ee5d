"""Remedies in the rollout engine: its weights, its arithmetic, its sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from moeproxy.lab.remedies.treatment import Act, Seam, Treatment, always, passed_through
from moeproxy.lab.settings import GRPOSettings
from moeproxy.lab.tokens import EOS_ID

_MIN_TOKENS = 2
_CAP = 2
_NEVER = -1e9


def _resynced(seam: Seam) -> Seam:
    def sync(send: Callable[..., None], *, step: int) -> None:
        seam(send, step=step)
        send("float32")

    return sync


def _converted_again(settings: GRPOSettings) -> Mapping[str, Act]:
    last: list[Callable[..., None]] = []

    def remember(seam: Seam) -> Seam:
        def sync(send: Callable[..., None], *, step: int) -> None:
            last[:] = [send]
            seam(send, step=step)

        return sync

    def convert(seam: Seam) -> Seam:
        def rollout_weights(model: nn.Module, *, step: int) -> None:
            seam(model, step=step)
            for send in last:
                send()

        return rollout_weights

    return {"sync": remember, "rollout_weights": convert}


def _some_tokens(seam: Seam) -> Seam:
    def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BV = seam(logits_BV, drawn_BT, step=step)
        if drawn_BT.shape[1] >= _MIN_TOKENS:
            return passed_BV
        forbidden_BV = passed_BV.clone()
        forbidden_BV[:, EOS_ID] = _NEVER
        return forbidden_BV

    return sampling_logits


def _no_repeat(seam: Seam) -> Seam:
    def sampling_logits(logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        passed_BV = seam(logits_BV, drawn_BT, step=step)
        if not drawn_BT.shape[1]:
            return passed_BV
        return passed_BV.scatter(-1, drawn_BT[:, -1:], _NEVER)

    return sampling_logits


def _longer(seam: Seam) -> Seam:
    return lambda limit, *, step: _CAP * seam(limit, step=step)


REMEDIES = (
    Treatment(
        id="resync",
        kind="mitigation",
        title="Sync the rollout weights at every step",
        what="Before every generation the trainer's weights are sent once more, in float32, whatever the schedule of "
        "syncs has done.",
        source="trl#5312 (resync on wake)",
        seams=("sync",),
        plan=always(_resynced, "sync"),
    ),
    Treatment(
        id="reconvert",
        kind="repair",
        title="Convert the weights by name",
        what="After the engine has loaded its weights, every tensor is copied again by name from the trainer's.",
        source="SkyRL#1680 (layerwise reload)",
        seams=("sync", "rollout_weights"),
        plan=_converted_again,
    ),
    Treatment(
        id="reference_attention",
        kind="repair",
        title="Another attention kernel",
        what="The rollout engine's attention runs in the model's own precision, with its own scale.",
        source="verl#3595 with vllm#22103 (cascade attention switched off)",
        seams=("attention_scale", "attention_input"),
        plan=passed_through("attention_scale", "attention_input"),
    ),
    Treatment(
        id="reference_positions",
        kind="repair",
        title="Positions from the attention mask",
        what="The rollout engine counts positions from the attention mask, as the trainer does.",
        source="Megatron-Bridge#1776, trl#262",
        seams=("position_ids",),
        plan=passed_through("position_ids"),
    ),
    Treatment(
        id="fp32_router",
        kind="repair",
        title="Routers in float32",
        what="The rollout engine's routers see hidden states in full precision.",
        source="Megatron-LM#4168, arXiv 2510.11370",
        seams=("router_input",),
        plan=passed_through("router_input"),
        needs_experts=True,
    ),
    Treatment(
        id="reference_experts",
        kind="repair",
        title="Another expert kernel",
        what="The rollout engine sends tokens to the experts, with the weights, that its router computes by the "
        "checkpoint's own config.",
        source="SkyRL#1680; prime-rl#1145 (flags of the config)",
        seams=("routing",),
        plan=passed_through("routing"),
        needs_experts=True,
    ),
    Treatment(
        id="fp32_head",
        kind="repair",
        title="Output head in float32",
        what="The rollout engine computes logits in float32, as the trainer does.",
        source="trl#4303 (cast_lm_head_to_fp32), arXiv 2506.13585",
        seams=("head_logits",),
        plan=passed_through("head_logits"),
    ),
    Treatment(
        id="plain_sampling",
        kind="repair",
        title="Plain sampling",
        what="Top-p, penalties, logit biases and extra stop tokens are off: the rollout engine samples from the model.",
        source="trl#6789 (top-p 1)",
        seams=("sampling_logits",),
        plan=passed_through("sampling_logits"),
    ),
    Treatment(
        id="min_tokens",
        kind="mitigation",
        title="A least length",
        what=f"The end token is forbidden until a response has {_MIN_TOKENS} tokens.",
        source="vLLM's SamplingParams.min_tokens",
        seams=("sampling_logits",),
        plan=always(_some_tokens, "sampling_logits"),
    ),
    Treatment(
        id="no_repeat",
        kind="mitigation",
        title="No token twice in a row",
        what="The token that was written last may not be written again at once.",
        source="transformers' no_repeat_ngram_size, for the shortest repetition there is",
        seams=("sampling_logits",),
        plan=always(_no_repeat, "sampling_logits"),
    ),
    Treatment(
        id="raise_cap",
        kind="mitigation",
        title="A higher length limit",
        what=f"A response may have {_CAP} times as many tokens.",
        source="trl#5697",
        seams=("response_limit",),
        plan=always(_longer, "response_limit"),
    ),
)
