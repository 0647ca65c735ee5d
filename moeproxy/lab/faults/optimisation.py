"""OD: faults of the optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable

from moeproxy.lab.faults.fault import Fault, Seam, TellTale


def _skipped_updates(healthy: Seam, strength: float) -> Seam:
    def optimizer_step(update: Callable[[], None], *, step: int) -> None:
        # Evenly spread: of n steps, floor(n * strength) are skipped.
        skip = math.floor(step * strength) > math.floor((step - 1) * strength)
        if not skip:
            healthy(update, step=step)

    return optimizer_step


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
)
