"""OD: faults of the optimisation."""

from __future__ import annotations

from dataclasses import replace

from moeproxy.lab.faults.chance import due
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.seams import Coefficients, Update


def _skipped_updates(healthy: Seam, strength: float) -> Seam:
    def optimizer_step(update: Update, *, step: int) -> None:
        if not due(step, strength):
            healthy(update, step=step)

    return optimizer_step


def _too_fast(healthy: Seam, strength: float) -> Seam:
    factor = 1 + 9 * strength

    def optimizer_step(update: Update, *, step: int) -> None:
        groups = update.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] *= factor
            healthy(update, step=step)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return optimizer_step


def _against_entropy(healthy: Seam, strength: float) -> Seam:
    def coefficients(before: Coefficients, *, step: int) -> Coefficients:
        passed = healthy(before, step=step)
        return replace(passed, entropy=passed.entropy - strength)

    return coefficients


FAULTS = (
    Fault(
        id="update_freeze",
        family="OD",
        title="Actor update omission",
        seam="optimizer_step",
        what="The share s of the optimizer steps, evenly spread, is omitted; at strength 1 the actor never changes.",
        tell_tales=(TellTale("update_norm", -1), TellTale("reward_mean", -1), TellTale("kl", -1)),
        twin="arXiv 2608.10823 (actor update omission); trl#5312, ms-swift#5571",
        check="Hash the actor's weights before and after a step: they are equal although gradients are not zero.",
        remedy="Restore the update (optimizer step, parameter groups, weight sync) and restart from before the onset.",
        act=_skipped_updates,
    ),
    Fault(
        id="kl_explosion",
        family="OD",
        title="KL explosion",
        seam="optimizer_step",
        what="The learning rate is 1 + 9 s times what is configured (ten times at full strength).",
        tell_tales=(TellTale("kl", +1), TellTale("update_norm", +1)),
        twin="arXiv 2605.04431 (KL explosion); trl#2980, Search-R1#88",
        check="Divide the update norm by that of a run with the configured rate: the factor stands still.",
        remedy="Lower the learning rate, warm up, raise beta.",
        act=_too_fast,
    ),
    Fault(
        id="entropy_collapse",
        family="OD",
        title="Entropy collapse",
        seam="coefficients",
        what="The entropy bonus has the wrong sign: s times the mean entropy is added to the loss.",
        tell_tales=(TellTale("entropy", -1),),
        twin="arXiv 2605.04431 (entropy collapse); verl#5953",
        check="Train with the bonus at zero: entropy falls more slowly.",
        remedy="Correct the sign of the bonus, or raise the upper clip bound.",
        act=_against_entropy,
    ),
)
