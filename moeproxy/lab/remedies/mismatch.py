"""Remedies in the trainer against what lies between the engines: other old log-probs, token weights, replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeproxy.lab.remedies.treatment import Seam, Treatment, always
from moeproxy.lab.seams import Correction

_TRUNCATE = 2.0
_BAND = (0.5, 5.0)

Score = Callable[[], torch.Tensor]


def _recomputed(_seam: Seam) -> Seam:
    def correction(_score: Score, _sampled_BT: torch.Tensor, _mask_BT: torch.Tensor, *, step: int) -> Correction:
        return Correction(None)

    return correction


def _weighted(weigh: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Seam], Seam]:
    """An act that takes the trainer's log-probs as the old ones and weighs tokens by the ratio to the rollout's."""

    def act(_seam: Seam) -> Seam:
        def correction(score: Score, sampled_BT: torch.Tensor, mask_BT: torch.Tensor, *, step: int) -> Correction:
            difference_BT = torch.where(mask_BT.bool(), score() - sampled_BT, 0.0)
            return Correction(None, weigh(difference_BT.exp()))

        return correction

    return act


def truncated(ratio_BT: torch.Tensor) -> torch.Tensor:
    """Return token weights of truncated importance sampling: the ratio, at most 2."""
    return ratio_BT.clamp(max=_TRUNCATE)


def in_band(ratio_BT: torch.Tensor) -> torch.Tensor:
    """Return IcePop's token weights: the ratio where it lies between 0.5 and 5, else 0."""
    low, high = _BAND
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0.0)


def _replay(_seam: Seam) -> Seam:
    return lambda choices_BTLK, *, step: choices_BTLK


REMEDIES = (
    Treatment(
        id="recomputed_logprobs",
        kind="mitigation",
        title="Old log-probs of the trainer",
        what="The importance ratio compares the trainer with itself; the rollout engine's log-probs no longer enter "
        "the loss.",
        source="verl (old_log_prob recomputed, no bypass mode)",
        seams=("correction",),
        plan=always(_recomputed, "correction"),
    ),
    Treatment(
        id="tis",
        kind="mitigation",
        title="Truncated importance sampling",
        what=f"Old log-probs are the trainer's, and each token counts with the ratio of trainer to rollout "
        f"probability, at most {_TRUNCATE:g}.",
        source="token-level TIS with clamp 2, as in verl and TRL (token_truncate)",
        seams=("correction",),
        plan=always(_weighted(truncated), "correction"),
    ),
    Treatment(
        id="icepop",
        kind="mitigation",
        title="IcePop",
        what=f"As truncated importance sampling, but a token whose ratio lies outside {_BAND[0]:g} to {_BAND[1]:g} "
        "does not count at all.",
        source="IcePop (ratios kept in 0.5 to 5), as in TRL (token_mask)",
        seams=("correction",),
        plan=always(_weighted(in_band), "correction"),
    ),
    Treatment(
        id="routing_replay",
        kind="mitigation",
        title="Routing replay",
        what="The trainer sends every token to the experts that the rollout engine chose; gate weights are its own.",
        source="R3, arXiv 2510.11370; Megatron-LM#4168, NeMo-RL#2590",
        seams=("replay",),
        plan=always(_replay, "replay"),
        needs_experts=True,
    ),
)
