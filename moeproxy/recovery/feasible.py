"""What a job in roles can be made of: refusals before any process starts."""

from __future__ import annotations

from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import RunSpec
from moeproxy.recovery.inputs import usable_folder, usable_model
from moeproxy.recovery.plan import ON_DISK, RolePlan, happening
from moeproxy.recovery.trainer_role import one_pass


def _prompts(spec: RunSpec) -> int:
    """Return how many prompts a run will have, without making them (as `moeproxy.lab.prompts.pool` does)."""
    settings = spec.settings
    if settings.environment == "file":
        from moeproxy.lab.prompts import read_tasks

        return len(read_tasks(Path(settings.task_file)))
    return settings.tasks // 2 * 2 if settings.environment == "calculator" else settings.tasks


def check(spec: RunSpec, plan: RolePlan, folder: Path) -> None:
    """Refuse what cannot be made in roles.

    Raises:
        LabError: the run's own file of prompts cannot be used.
        RecoveryError: a run with faults of its own, prompts that cannot be shared out or that are too few, no model,
            mishaps that would never happen, or a folder that is not empty.
    """
    if spec.injections or spec.remedies or spec.snapshots or spec.settings.engine != "lab":
        raise RecoveryError(
            "a run with training faults, remedies, snapshots or another engine",
            expected="a healthy run on the lab's engine: a job in roles makes machine faults only",
        )
    if spec.settings.prompts * spec.settings.samples % plan.shares or spec.settings.prompts % plan.shares:
        raise RecoveryError(
            f"{spec.settings.prompts} prompts cannot be shared out into {plan.shares} parts", remedy="change `shares`"
        )
    one_pass(spec.settings, _prompts(spec))
    steps, every = spec.settings.steps, plan.checkpoint_every
    saved = {"publish": lambda item: item.kind not in ON_DISK or item.step % every == 0 or item.step == steps}
    happening(plan.mishaps, steps, saved)
    usable_model(spec.model)
    usable_folder(folder)
