"""The named places of the loop where a fault, or a remedy, may act.

Each seam passes its input through. A fault replaces one of them on one `Seams` object and puts it back afterwards
(`moeproxy.lab.faults.inject`), and so does a remedy, around the fault (`moeproxy.lab.remedies.treat`); nothing else of
the loop knows about either. `step` counts from 1.

The seams down to `sampled_logprobs` belong to the rollout engine and act on its own copy of the weights; the others
belong to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeproxy.lab.calculator import ToolTurn

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Routing:
    """What one router decides for T tokens.

    Args:
        layer: decoder layer.
        logits_TE: router logits.
        weights_TK: gate weights of the chosen experts.
        index_TK: the chosen experts.
        sigmoid: whether scores are sigmoids of the logits (else a softmax).
    """

    layer: int
    logits_TE: torch.Tensor
    weights_TK: torch.Tensor
    index_TK: torch.Tensor
    sigmoid: bool

    @classmethod
    def of(cls, layer: int, output: tuple[torch.Tensor, ...], sigmoid: bool) -> Routing:
        """Return the routing in a router's output (logits, weights, indices)."""
        logits_TE, weights_TK, index_TK = output
        return cls(layer, logits_TE, weights_TK, index_TK, sigmoid)


@dataclass(frozen=True)
class Batch:
    """What a round of generation gives the trainer besides tokens: B*G samples, `samples` of them a prompt.

    Args:
        rewards: of each sample.
        samples: samples a prompt.
        turns: the tool call of each sample, None for one without; empty where there is no tool.
        truncated: whether the length limit cut each sample.
    """

    rewards: Sequence[float]
    samples: int
    turns: Sequence[ToolTurn | None] = ()
    truncated: Sequence[bool] = ()


@dataclass(frozen=True)
class Coefficients:
    """Weights of the loss's parts.

    Args:
        beta: of the KL divergence from the reference policy.
        entropy: of the entropy bonus.
        balance: of a Switch load-balancing loss (arXiv 2101.03961) over all MoE layers, beside the model's own.
    """

    beta: float
    entropy: float = 0.0
    balance: float = 0.0


@dataclass(frozen=True)
class Correction:
    """How the loss treats the difference between the engines.

    Args:
        old_BT: old log-probs of the importance ratio; None takes the trainer's own, so that the ratio is 1.
        weight_BT: factor on the advantage of each token, or None.
    """

    old_BT: torch.Tensor | None
    weight_BT: torch.Tensor | None = None


@dataclass(frozen=True)
class Update:
    """The optimizer's step; calling it applies the gradients."""

    apply: Callable[[], Any]
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.apply()


class Seams:
    """The healthy loop: every seam is the identity."""

    def sync(self, send: Callable[..., None], *, step: int) -> None:
        """Send the trainer's weights to the rollout engine; `send` takes a dtype to send them in."""
        send()

    def rollout_weights(self, model: nn.Module, *, step: int) -> None:
        """Look at, or change, the rollout engine's weights after a sync."""

    def attention_scale(self, scale: float, *, step: int) -> float:
        """Return the factor on attention scores that the rollout engine uses (head dimension ** -0.5)."""
        return scale

    def attention_input(self, hidden_BTD: torch.Tensor, positions_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return what the rollout engine's attention layers are given."""
        return hidden_BTD

    def position_ids(self, positions_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return the rotary positions that the rollout engine uses; T is 1 while it writes its responses."""
        return positions_BT

    def router_input(self, hidden_TD: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return what the rollout engine's routers are given."""
        return hidden_TD

    def routing(self, routing: Routing, *, step: int) -> Routing:
        """Return which experts the rollout engine uses, with which weights."""
        return routing

    def response_limit(self, limit: int, *, step: int) -> int:
        """Return the longest response in tokens, of each turn."""
        return limit

    def head_logits(self, logits_BV: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return what the rollout engine's output head computes for the next token."""
        return logits_BV

    def sampling_logits(self, logits_BV: torch.Tensor, drawn_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return the logits that the rollout engine samples the next token from, and reports log-probs of.

        `drawn_BT` are the response tokens drawn so far.
        """
        return logits_BV

    def tool_turns(self, turns: Sequence[ToolTurn], *, step: int) -> Sequence[ToolTurn]:
        """Return the environment's answers to the tool calls of this step, as the rollout engine receives them."""
        return turns

    def sampled_logprobs(self, logprobs_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return the rollout engine's log-probabilities (B, T) of the sampled tokens as the trainer receives them."""
        return logprobs_BT

    def reward(self, rewards: list[float], texts: Sequence[str], answers: Sequence[str], *, step: int) -> list[float]:
        """Return the rewards (B*G) that advantages are computed from."""
        return rewards

    def advantages(self, advantages_B: torch.Tensor, batch: Batch, *, step: int) -> torch.Tensor:
        """Return the advantage of each sample (B*G)."""
        return advantages_B

    def correction(
        self, score: Callable[[], torch.Tensor], sampled_BT: torch.Tensor, mask_BT: torch.Tensor, *, step: int
    ) -> Correction:
        """Return how the loss treats the engines' difference; `score` computes the trainer's log-probs (B, T).

        The healthy loop takes the rollout engine's log-probs as the old ones (verl calls it bypass mode).
        """
        return Correction(sampled_BT)

    def replay(self, choices_BTLK: torch.Tensor | None, *, step: int) -> torch.Tensor | None:
        """Return the experts that the trainer's routers shall send tokens to (-1: their own choice), or None.

        `choices_BTLK` are the rollout engine's. The healthy trainer routes by itself.
        """
        return None

    def loss_mask(self, mask_BT: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return which response tokens count in the loss."""
        return mask_BT

    def coefficients(self, coefficients: Coefficients, *, step: int) -> Coefficients:
        """Return the weights of the loss's parts."""
        return coefficients

    def gradients(self, named: Named, *, step: int) -> None:
        """Look at, or change in place, the gradients before they are measured and clipped."""

    def optimizer_step(self, update: Update, *, step: int) -> None:
        """Apply the gradients to the weights."""
        update()


SEAMS = tuple(name for name, value in vars(Seams).items() if callable(value))

ROLLOUT_SEAMS = SEAMS[: SEAMS.index("sampled_logprobs")]
"""The seams inside the lab's rollout engine: another engine does not have them."""
