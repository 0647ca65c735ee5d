"""CA: faults of credit assignment.

GRPO has no critic: the value of a prompt is the mean reward of its group. A value mismatch is then a baseline taken
from the wrong group, and a delayed credit a reward that is credited to the samples of a later step.
"""

from __future__ import annotations

import torch

from moeproxy.lab.faults.chance import generator
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.seams import Batch


def _wrong_baseline(healthy: Seam, strength: float) -> Seam:
    def advantages(advantages_B: torch.Tensor, batch: Batch, *, step: int) -> torch.Tensor:
        passed_B = healthy(advantages_B, batch, step=step)
        rewards_PG = torch.tensor(batch.rewards, dtype=passed_B.dtype).reshape(-1, batch.samples)
        mean_P1, std_P1 = rewards_PG.mean(dim=1, keepdim=True), rewards_PG.std(dim=1, keepdim=True)
        # The neighbour's mean instead of one's own, in units of one's own spread, as GRPO scales advantages.
        shift_P1 = (mean_P1 - mean_P1.roll(1, dims=0)) / (std_P1 + 1e-1)
        return passed_B + strength * shift_P1.expand_as(rewards_PG).reshape(-1)

    return advantages


def _unstable(healthy: Seam, strength: float) -> Seam:
    def advantages(advantages_B: torch.Tensor, batch: Batch, *, step: int) -> torch.Tensor:
        passed_B = healthy(advantages_B, batch, step=step)
        noise_B = torch.randn(len(passed_B), generator=generator(step, salt=43))
        return passed_B * torch.exp(2 * strength * noise_B).to(passed_B)

    return advantages


def _delayed(healthy: Seam, strength: float) -> Seam:
    earlier: list[torch.Tensor] = []

    def advantages(advantages_B: torch.Tensor, batch: Batch, *, step: int) -> torch.Tensor:
        passed_B = healthy(advantages_B, batch, step=step)
        earlier.append(passed_B.clone())
        before_B = earlier.pop(0) if len(earlier) > 1 else torch.zeros_like(passed_B)
        return torch.lerp(passed_B, before_B, strength)

    return advantages


FAULTS = (
    Fault(
        id="value_mismatch",
        family="CA",
        title="Baseline of the wrong group",
        seam="advantages",
        what="The baseline is (1 - s) times the mean reward of the own prompt's group plus s times that of the "
        "neighbouring prompt.",
        tell_tales=(TellTale("grad_norm", +1),),
        twin="arXiv 2605.04431 (value mismatch); Search-R1#88 (wrong group ids)",
        check="Average the advantages of each group: not zero.",
        remedy="Group by prompt id, not by position in the batch.",
        act=_wrong_baseline,
    ),
    Fault(
        id="advantage_instability",
        family="CA",
        title="Unstable advantages",
        seam="advantages",
        what="Each advantage is multiplied by exp(2 s n) with n standard normal, drawn anew every step.",
        tell_tales=(TellTale("grad_norm", +1),),
        twin="arXiv 2605.04431 (advantage instability)",
        check="Look at the largest advantage of a step over the mean absolute one.",
        remedy="Clip advantages, and do not divide by tiny standard deviations.",
        act=_unstable,
    ),
    Fault(
        id="delayed_credit",
        family="CA",
        title="Credit one step too late",
        seam="advantages",
        what="A sample gets (1 - s) times its own advantage plus s times that of the sample in the same place of the "
        "step before.",
        tell_tales=(TellTale("reward_mean", -1),),
        twin="arXiv 2605.04431 (delayed credit)",
        check="Correlate advantages with the rewards of this step and of the one before.",
        remedy="Carry rewards and responses together by id through every queue.",
        act=_delayed,
    ),
)
