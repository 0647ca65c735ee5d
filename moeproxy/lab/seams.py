"""The named places of the loop where a fault may act.

Each seam passes its input through. A fault replaces one of them on one `Seams` object and puts it back afterwards
(`moeproxy.lab.faults.inject`); nothing else of the loop knows about faults. `step` counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Seams:
    """The healthy loop: every seam is the identity."""

    def sync(self, send: Callable[[], None], *, step: int) -> None:
        """Send the trainer's weights to the rollout engine."""
        send()

    def attention_scale(self, scale: float, *, step: int) -> float:
        """Return the factor on attention scores that the rollout engine uses (head dimension ** -0.5)."""
        return scale

    def reward(self, rewards: list[float], *, step: int) -> list[float]:
        """Return the rewards (B*G) that advantages are computed from."""
        return rewards

    def optimizer_step(self, update: Callable[[], None], *, step: int) -> None:
        """Apply the gradients to the weights."""
        update()

    def sampled_logprobs(self, logprobs_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return the rollout engine's log-probabilities (B, T) of the sampled tokens as the trainer receives them."""
        return logprobs_BT


SEAMS = tuple(name for name, value in vars(Seams).items() if callable(value))
