"""Snapshots: the state of a run between two steps, so that another run can go on from there bit for bit.

A run passes through the same states as every other run of its model, seed and settings until its first fault or remedy
acts. So the snapshots of one healthy run serve all faulty ones of its seed, with and without remedies, and a run that
starts from one leaves the same trace as a run that starts from the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeproxy.errors import LabError
from moeproxy.files import atomic_file
from moeproxy.lab.settings import RunSpec

_FORMAT = "moeproxy.snapshot"
VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step.

    Args:
        step: the last step that is done.
        passage: which runs pass through this state (see `passage`).
        weights: of the trainer's model.
        optimizer: its state.
        rollout: weights of the rollout engine's copy.
        random: states of the generators of torch, Python and NumPy.
        record: what the run has recorded so far: steps, rows, trajectories.
    """

    step: int
    passage: str
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rollout: dict[str, torch.Tensor]
    random: dict[str, Any]
    record: dict[str, Any]

    def save(self, path: Path) -> Path:
        """Write the snapshot to one file, atomically, and return its path."""
        stored = {name: getattr(self, name) for name in self.__dataclass_fields__}
        with atomic_file(path) as temporary:
            torch.save({"format": _FORMAT, "version": VERSION, **stored}, temporary)
        return path

    @staticmethod
    def load(path: Path) -> Snapshot:
        """Read a snapshot.

        Raises:
            LabError: the file is absent, broken or of another version.
        """
        remedy = "remove the file: runs then start from the checkpoint"
        try:
            stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            found = (stored.pop("format"), stored.pop("version"))
            snapshot = Snapshot(**stored)
        except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
            raise LabError(f"no readable snapshot ({error!r})", where=path, remedy=remedy) from error
        if found != (_FORMAT, VERSION):
            raise LabError(f"a file of {found}", where=path, expected=f"{_FORMAT}, version {VERSION}", remedy=remedy)
        return snapshot


def passage(spec: RunSpec, fingerprint: str) -> str:
    """Return what two runs have in common that pass through the same states before a fault or remedy acts.

    How many steps a run makes is no part of it: the learning rate is constant.
    """
    settings = {name: value for name, value in spec.settings.to_dict().items() if name != "steps"}
    content = {"model": fingerprint, "dense": spec.method == "dense", "seed": spec.seed, "settings": settings}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def snapshot_path(spec: RunSpec, fingerprint: str, step: int) -> Path:
    """Return the file of the snapshot after `step` that this run takes, or starts from."""
    if spec.snapshots is None:
        raise LabError("the run names no folder of snapshots", expected="RunSpec(..., snapshots=Snapshots(folder))")
    return Path(spec.snapshots.folder) / f"{passage(spec, fingerprint)}-after{step:05d}.pt"


def undisturbed(spec: RunSpec) -> int:
    """Return the last step before any fault or remedy acts."""
    starts = [item.onset for item in spec.injections if item.strength > 0] + [item.start for item in spec.remedies]
    return min([spec.settings.steps + 1, *starts]) - 1


def newest(spec: RunSpec, fingerprint: str) -> Path | None:
    """Return the newest snapshot that the run passes through and does not end at, or None."""
    if spec.snapshots is None:
        return None
    last = min(undisturbed(spec), spec.settings.steps - 1)
    paths = (snapshot_path(spec, fingerprint, step) for step in range(last, 0, -1))
    return next((path for path in paths if path.is_file()), None)


def check_snapshots(spec: RunSpec, n_tasks: int, n_processes: int) -> None:
    """Refuse snapshots that could not be gone on from bit for bit.

    Raises:
        LabError: the run goes over its prompts more than once, has several processes or another engine, or is to
            leave a snapshot after a fault or a remedy has begun to act.
    """
    if spec.snapshots is None:
        return
    settings = spec.settings
    if n_processes > 1 or settings.engine != "lab":
        raise LabError("snapshots are for one process and the lab's own engine", remedy="leave `snapshots` out")
    if settings.steps > n_tasks // settings.prompts:
        raise LabError(
            f"{settings.steps} steps of {settings.prompts} prompts go over {n_tasks} prompts more than once",
            expected="at most one pass, where snapshots are used",
            remedy="raise tasks, or leave `snapshots` out",
        )
    late = [step for step in spec.snapshots.steps if not 1 <= step <= undisturbed(spec)]
    if late:
        raise LabError(
            f"a snapshot after step {late[0]}",
            expected=f"steps 1 to {undisturbed(spec)}: before any fault or remedy acts, and before the run ends",
        )


def random_state(devices: Iterable[int] = ()) -> dict[str, Any]:
    """Return the states of the global generators, those of the given CUDA devices among them."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - third parties draw from the legacy generator
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "python": list(random.getstate()),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
    }


def restore_random(state: dict[str, Any]) -> None:
    """Put the global generators back into a state."""
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(cuda, device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
