"""RLLayout: how an RL job uses its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from moeproxy.errors import ProxyError
from moeproxy.proxy.hardware import Device

Steps = Literal["node", "power", "any"]
OPTIMIZERS: dict[str, float] = {"adamw": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.0, "sgd": 0.0}
"""Bytes a weight of optimizer state beside the float32 weights."""


@dataclass(frozen=True)
class RLLayout:
    """A GRPO job: trainer and rollout engines on the same devices or on their own.

    Args:
        colocated: trainer and rollout take turns on the same devices; otherwise `trainer_share` of them train.
        trainer_share: share of the devices that train, where they are not colocated.
        tp: ranks that share a sequence's activations in training.
        ep: ranks over which a layer's experts are spread in training (as many as there are devices at most).
        shard: devices over which FSDP spreads the trainer's state; 0 for all that train.
        rollout_devices: devices of one rollout instance, over which its weights are spread.
        sequences: sequences a micro-batch on each device.
        accumulate: a step sums the gradients of several micro-batches.
        prompt, response: tokens.
        concurrent: sequences in generation at a time on each device of the rollout.
        optimizer: one of `OPTIMIZERS`.
        checkpointing: recompute activations.
        reference: keep a frozen reference model (bfloat16, sharded like the trainer's).
        offload_optimizer: optimizer state lives in host memory.
        offload_weights: the trainer's state leaves the device while the rollout works.
        rollout_sleeps: the rollout's weights and cache leave the device while the trainer works.
        skew: rows that the expert-parallel rank looked at gets, over the mean; above 1 for the busiest.
        whole_experts: experts are sharded whole and padded, as FSDP2 does it in transformers and torchtitan; otherwise
            any slice of them can lie anywhere (FSDP1, ZeRO, Megatron's distributed optimizer).
        usable: share of a device's memory that tensors may take; the rest is for the communication library, kernels
            and fragmentation.
        steps: numbers of devices tried: whole nodes, powers of two, or any (multiples of the rollout instance always).

    Raises:
        ProxyError: a size or a share is impossible.
    """

    colocated: bool = True
    trainer_share: float = 0.5
    tp: int = 1
    ep: int = 8
    shard: int = 0
    rollout_devices: int = 4
    sequences: int = 1
    accumulate: bool = True
    prompt: int = 512
    response: int = 1024
    concurrent: int = 32
    optimizer: str = "adamw"
    checkpointing: bool = True
    reference: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    rollout_sleeps: bool = True
    skew: float = 1.0
    whole_experts: bool = False
    usable: float = 0.9
    steps: Steps = "power"

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "rollout_devices", "sequences", "prompt", "response", "concurrent"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
                raise ProxyError(
                    f"{name} is {number!r}", expected="a whole number, at least 1", remedy="choose another"
                )
        if not (0 < self.usable <= 1 and 0 < self.trainer_share < 1 and self.skew >= 0 and self.shard >= 0):
            raise ProxyError(
                f"usable is {self.usable}, trainer_share {self.trainer_share}, skew {self.skew}, shard {self.shard}",
                expected="shares within (0, 1), a skew of at least 0, shard 0 or more",
            )
        if self.optimizer not in OPTIMIZERS:
            raise ProxyError(f"optimizer is {self.optimizer!r}", expected=f"one of {', '.join(OPTIMIZERS)}")
        if self.steps not in ("node", "power", "any"):
            raise ProxyError(f"steps is {self.steps!r}", expected="node, power or any")

    @property
    def smallest(self) -> int:
        """Fewest devices the layout itself asks for."""
        together = math.lcm(self.tp, self.rollout_devices)
        return together if self.colocated else max(self.tp + self.rollout_devices, 2)

    def candidates(self, kind: Device, most: int) -> Iterator[int]:
        """Yield the numbers of devices to try, ascending."""
        if self.steps == "power":
            numbers = [2**exponent for exponent in range(most.bit_length())]
        else:
            numbers = (
                list(range(1, most + 1)) if self.steps == "any" else list(range(kind.per_node, most + 1, kind.per_node))
            )
        for number in numbers:
            trainer, rollout = self.split(number)
            fits = trainer % self.tp == 0 and rollout % self.rollout_devices == 0
            if number >= self.smallest and trainer >= 1 and rollout >= 1 and fits:
                yield number

    def split(self, number: int) -> tuple[int, int]:
        """Return the devices that train and those that generate."""
        if self.colocated:
            return number, number
        rollout = number - round(number * self.trainer_share)
        rollout -= rollout % self.rollout_devices
        return number - rollout, rollout

    def smallest_because(self, kind: Device) -> str:
        """Say why not even fewer devices were tried, where the first number already fits."""
        if self.smallest == 1 or (self.steps == "node" and self.smallest < kind.per_node):
            return "one node" if self.steps == "node" else "one device"
        return f"the layout: {self.rollout_devices} devices a rollout instance, tp {self.tp}"
