"""The terms of the device planner: bytes on one device at the fullest moments of a step, each by its own line."""

from __future__ import annotations

import math

from moeproxy.proxy.rl_layout import OPTIMIZERS, RLLayout
from moeproxy.proxy.shape import ModelShape

MASTER, GRADIENT, COMPUTE = 4.0, 4.0, 2.0
"""Bytes a weight: float32 weights and gradients, bfloat16 copies for computing (FSDP2 with mixed precision)."""
NORM, ATTENTION, HEAD_NORM, ROW_HIDDEN, ROW_EXPERT, LOGITS = 16.0, 5.5, 6.0, 4.0, 6.0, 6.2
"""Bytes that a layer keeps for the backward pass, measured with `moeproxy.scale.emulate` on Qwen3-30B-A3B and
DeepSeek-V3 (transformers 5.24, `grouped_mm`, a fused attention kernel). Of every token: a value of the residual stream
(two norms in float32), of queries, keys and values, of normed queries and keys; of every routed row: a value of its
input and of the expert's inner width. LOGITS: of every logit of the completions (bfloat16 logits, their scaled copy,
TRL's log-softmax)."""
STATE = ("weights", "optimizer", "reference")
"""What the trainer keeps between steps."""


def training_terms(shape: ModelShape, layout: RLLayout, n_experts: int, devices: int) -> dict[str, dict[str, float]]:
    """Return the bytes on each training device at the three moments of a step that can be the fullest.

    At the end of the forward pass all activations and the logits are alive; when the backward pass begins, all
    activations and the head's gradient; when it ends, all gradients and the embedding's, which is as large.

    Args:
        shape: of the model.
        layout: of the job.
        n_experts: experts a layer.
        devices: that train.
    """
    spread = min(layout.shard or devices, devices)
    held, local = experts_a_device(layout, n_experts, spread)
    mine = shape.fixed / spread + shape.per_expert * held
    head = shape.vocabulary * shape.hidden
    layer = shape.moe_layer(local)
    whole = 1.0 if spread > 1 else 0.0  # a single device gathers and reduces nothing
    state = {
        "weights": mine * MASTER,
        "optimizer": 0.0 if layout.offload_optimizer else mine * OPTIMIZERS[layout.optimizer],
        "reference": mine * COMPUTE if layout.reference else 0.0,
    }
    gradients, kept = mine * GRADIENT, activations(shape, layout)
    summed = {"gradients": gradients if layout.accumulate else 0.0, "activations": kept}
    # FSDP reduces a whole bfloat16 gradient through a float32 copy, and gathers the next layer meanwhile.
    reduced = {"gradients to reduce": whole * max(head, layer) * (GRADIENT + COMPUTE)}
    gathered = {"gathered weights": whole * layer * COMPUTE}
    recomputed = layer_activations(shape, layout)
    return {
        "forward": {
            **state,
            **summed,
            "gathered weights": whole * (head + layer) * COMPUTE,
            "logits": logits(shape, layout),
        },
        "backward begins": {**state, **summed, **gathered, **reduced},
        "backward ends": {**state, "gradients": gradients, "one layer": recomputed, **gathered, **reduced},
    }


def experts_a_device(layout: RLLayout, n_experts: int, spread: int) -> tuple[float, float]:
    """Return the experts a layer that the fullest device keeps, and those that it gathers, padding included.

    FSDP2 cuts expert weights by whole experts (`layout.whole_experts`): among more devices than experts the first ones
    keep one each, the others none, and what is gathered is padded to one for every device.

    Args:
        layout: of the job.
        n_experts: experts a layer.
        spread: devices over which the state is spread.
    """
    ep = min(layout.ep, spread, n_experts)
    local, shards = n_experts / ep, spread / ep
    if not layout.whole_experts:
        return local / shards, local
    held = math.ceil(local / shards)
    return held, held * shards


def layer_activations(shape: ModelShape, layout: RLLayout) -> float:
    """Return the bytes that one MoE layer keeps for its backward pass on the busiest rank."""
    token = NORM * shape.hidden + ATTENTION * shape.attention_width + HEAD_NORM * shape.normed_width
    row = ROW_HIDDEN * shape.hidden + ROW_EXPERT * shape.expert_width
    return _tokens(layout) * (token + shape.top_k * layout.skew * row)


def activations(shape: ModelShape, layout: RLLayout) -> float:
    """Return the bytes of all layers' activations; with checkpointing, of their inputs."""
    if layout.checkpointing:
        return shape.n_layers * _tokens(layout) * shape.hidden * COMPUTE
    return shape.n_layers * layer_activations(shape, layout)


def logits(shape: ModelShape, layout: RLLayout) -> float:
    """Return the bytes of logits and what the loss keeps of them."""
    return layout.sequences * layout.response / layout.tp * shape.vocabulary * LOGITS


def _tokens(layout: RLLayout) -> float:
    return layout.sequences * (layout.prompt + layout.response) / layout.tp


def rollout_terms(shape: ModelShape, layout: RLLayout, n_experts: int, devices: int) -> dict[str, float]:
    """Return the bytes on each device of a rollout instance: weights in bfloat16, key-value cache, sampling.

    Args:
        shape: of the model.
        layout: of the job.
        n_experts: experts a layer.
        devices: that generate.
    """
    spread = min(layout.rollout_devices, devices)
    tokens = layout.concurrent * (layout.prompt + layout.response)
    return {
        "rollout weights": shape.params(n_experts) * COMPUTE / spread,
        "key-value cache": tokens * shape.n_layers * shape.kv_values * COMPUTE,
        "sampling": layout.concurrent * shape.vocabulary * 4.0,
    }
