"""The terms of the device planner: bytes on one device at the fullest moments of a step, each by its own line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeproxy.proxy.rl_layout import OPTIMIZERS, RLLayout
from moeproxy.proxy.shape import ModelShape

MASTER, GRADIENT, COMPUTE = 4.0, 4.0, 2.0
"""Bytes a weight: float32 weights and gradients, bfloat16 copies for computing (FSDP2 with mixed precision)."""
NORM, ATTENTION, HEAD_NORM, ROW_HIDDEN, ROW_EXPERT, LOGITS = 16.0, 5.5, 6.0, 4.0, 6.0, 6.2
ROW_BACKWARD = 4.0
"""Bytes that a layer keeps for the backward pass, measured with `moeproxy.scale.emulate` on Qwen3-30B-A3B and
DeepSeek-V3 (transformers 5.24, `grouped_mm`, a fused attention kernel). Of every token: a value of the residual stream
(two norms in float32), of queries, keys and values, of normed queries and keys; of every routed row: a value of its
input and of the expert's inner width; of both again (ROW_BACKWARD) while its gradients are computed. LOGITS: of every
logit of the completions (bfloat16 logits, their scaled copy, TRL's log-softmax)."""
STATE = ("weights", "optimizer", "reference")
"""What the trainer keeps between steps."""


def training_terms(shape: ModelShape, layout: RLLayout, n_experts: int, devices: int) -> dict[str, dict[str, float]]:
    """Return the bytes on each training device at the moments of a step that can be the fullest.

    At the end of the forward pass all activations and the logits are alive; when the backward pass begins, all
    activations and the head's gradient. In the backward of experts come their rows' gradients, a layer's gathered
    weights and the buffers of the collectives that run beside it; then a layer's gradients are summed. At the end all
    gradients are there, and the embedding's is reduced.

    Args:
        shape: of the model.
        layout: of the job.
        n_experts: experts a layer.
        devices: that train.
    """
    spread = min(layout.shard or devices, devices)
    held, padded = experts_a_device(layout, n_experts, spread)
    state = _state(shape, layout, shape.fixed / spread + shape.per_expert * held)
    gradients, kept = state.pop("gradients"), activations(shape, layout)
    summed = {**state, "gradients": gradients if layout.accumulate else 0.0, "activations": kept}
    one, rows = layer_activations(shape, layout), _rows(shape, layout) * (shape.hidden + shape.expert_width)
    again = {"one layer": (one if layout.checkpointing else 0.0) + rows * ROW_BACKWARD}
    last = {**state, "gradients": gradients, "one layer": one + rows * ROW_BACKWARD}
    buffers = _Buffers.of(shape, layout, n_experts, spread, padded)
    return {
        "forward": {**summed, "gathered weights": buffers.head * COMPUTE, "logits": logits(shape, layout)},
        "backward begins": {**summed, **buffers.head_reduced()},
        "backward of experts": {**summed, **again, **buffers.layer_gathered()},
        "gradients summed": {**last, "one layer": one, **buffers.layer_reduced()},
        "first layer's backward": {**last, **buffers.layer_gathered(head=False)},
        "backward ends": {**state, "gradients": gradients, **buffers.embedding_reduced()},
    }


def _state(shape: ModelShape, layout: RLLayout, mine: float) -> dict[str, float]:
    """Return what a device keeps for its `mine` weights, gradients included."""
    return {
        "weights": mine * MASTER,
        "optimizer": 0.0 if layout.offload_optimizer else mine * OPTIMIZERS[layout.optimizer],
        "reference": mine * COMPUTE if layout.reference else 0.0,
        "gradients": mine * GRADIENT,
    }


@dataclass(frozen=True)
class _Buffers:
    """Whole weights and the buffers of FSDP's collectives (numbers of weights; none on a single device).

    The next layer is gathered while this one computes, and the last one's gradient is reduced, through a float32 copy.
    With expert parallelism experts are gathered and reduced by themselves, beside the layer's other weights.

    Args:
        head: of the output head, as large as the embedding.
        dense: of a layer without its experts.
        experts: of a layer's experts on a device, padding included.
        real: the same without padding.
        apart: whether experts are a group of their own.
    """

    head: float
    dense: float
    experts: float
    real: float
    apart: bool

    @classmethod
    def of(cls, shape: ModelShape, layout: RLLayout, n_experts: int, spread: int, padded: float) -> _Buffers:
        if spread < 2:
            return cls(0.0, 0.0, 0.0, 0.0, False)
        ep, each = min(layout.ep, spread, n_experts), shape.per_expert / shape.moe_layers
        alone = ep == spread  # nobody else holds these experts: nothing to gather or to reduce
        experts = (0.0 if alone else padded * each, 0.0 if alone else n_experts / ep * each)
        return cls(float(shape.vocabulary * shape.hidden), shape.moe_layer(0), *experts, ep > 1)

    def head_reduced(self) -> dict[str, float]:
        return {"gathered weights": self.dense * COMPUTE, "gradients to reduce": self.head * (GRADIENT + COMPUTE)}

    def embedding_reduced(self) -> dict[str, float]:
        return {"gradients to reduce": self.head * (GRADIENT + 2 * COMPUTE)}

    def layer_gathered(self, head: bool = True) -> dict[str, float]:
        before = max(self.dense if self.apart else self.dense + self.experts, self.head if head else 0.0)
        ahead = self.experts if self.apart else self.dense + self.experts
        return {
            "gathered weights": (self.dense + self.experts) * COMPUTE,
            "gradients to reduce": ahead * COMPUTE + before * GRADIENT,
        }

    def layer_reduced(self) -> dict[str, float]:
        if self.apart:
            return {
                "gathered weights": self.dense * COMPUTE,
                "gradients to reduce": self.experts * GRADIENT + self.real * COMPUTE,
            }
        whole = self.dense + self.experts
        return {
            "gathered weights": whole * COMPUTE,
            "gradients to reduce": whole * (GRADIENT + COMPUTE) + (self.dense + self.real) * COMPUTE,
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
    """Return the bytes that one MoE layer keeps for its backward pass on the rank looked at."""
    row = ROW_HIDDEN * shape.hidden + ROW_EXPERT * shape.expert_width
    return _tokens(layout) * _token(shape) + _rows(shape, layout) * row


def activations(shape: ModelShape, layout: RLLayout) -> float:
    """Return the bytes of all layers' activations; with checkpointing, of their inputs."""
    if layout.checkpointing:
        return shape.n_layers * _tokens(layout) * shape.hidden * COMPUTE
    # A dense layer is taken to be as wide as the experts of a token together, as DeepSeek's are within an eighth.
    dense = _token(shape) + ROW_HIDDEN * shape.hidden + ROW_EXPERT * shape.expert_width * shape.top_k
    without = (shape.n_layers - shape.moe_layers) * _tokens(layout) * dense
    return without + shape.moe_layers * layer_activations(shape, layout)


def _token(shape: ModelShape) -> float:
    return NORM * shape.hidden + ATTENTION * shape.attention_width + HEAD_NORM * shape.normed_width


def _rows(shape: ModelShape, layout: RLLayout) -> float:
    """Rows that reach this rank's experts in a layer."""
    return _tokens(layout) * shape.top_k * layout.skew


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
