"""What is refused before a job begins, rather than minutes later in one of its processes."""

from __future__ import annotations

import os
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.experts.config import read_config
from moeproxy.lab.settings import RunSpec
from moeproxy.recovery.plan import RolePlan


def check(spec: RunSpec, plan: RolePlan, folder: Path) -> None:
    """Refuse what cannot be made in roles.

    Raises:
        RecoveryError: a run with faults of its own, prompts that cannot be shared out, or an unusable folder.
        CheckpointError: there is no model.
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
    new_folder(folder, spec.model)


def new_folder(folder: str | Path, model: Path) -> Path:
    """Make the folder of a job that trains a model, and return its absolute path.

    Raises:
        RecoveryError: it holds something, or cannot be made or written.
        CheckpointError: there is no model.
    """
    read_config(model)
    place = Path(folder).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        full, writable = any(place.iterdir()), os.access(place, os.W_OK)
    except OSError as error:
        raise RecoveryError(f"no folder for a job ({error.strerror})", where=place, remedy="name another") from error
    if full:
        raise RecoveryError("the folder is not empty", where=place, remedy="give each job a new one")
    if not writable:
        raise RecoveryError("the folder cannot be written", where=place, remedy="name another")
    return place
