"""What decides a job with hot swap: driver, ranks, what is saved how often, mishaps made on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.recovery.inputs import positive, whole, yes_or_no
from moeproxy.recovery.plan import RANK_KINDS, Mishap, happening

REPLICATED, SHARDED = "replicated", "sharded"
DRIVERS: Mapping[str, tuple[str, str]] = {
    REPLICATED: ("torchft", "moeproxy.recovery.hotswap_replicated"),
    SHARDED: ("nvidia_resiliency_ext", "moeproxy.recovery.hotswap_sharded"),
}
"""Driver -> the package it needs, and the module that a member runs."""

FINISHED = "finished"
PLAN_FILE = "swap.json"


@dataclass(frozen=True)
class SwapPlan:
    """A job whose ranks can be swapped.

    Args:
        model: directory of a testbed checkpoint.
        driver: a key of `DRIVERS`.
        steps: optimizer steps.
        active: ranks that train. With `replicated`, gradients of two ranks add up the same in any order; of more they
            may differ in the last bit after a swap.
        spares: ranks that wait.
        batch: examples a rank and step.
        learning_rate: of AdamW.
        seed: of the batches.
        checkpoint_every: steps between checkpoints on disk.
        snapshot_every: with `sharded`, steps between copies of each shard; more than one costs the steps since the last
            when a rank dies.
        machine_survives: with `sharded`, whether a rank that dies leaves its machine up, in whose memory its own copies
            stay, so that no finished step is lost. Else they die with it, and a shard comes from next door; a copy that
            had not arrived there yet costs its step.
        digests: whether to log digests of every state, for `verify`; with `sharded`, of those that are copied.
        heartbeat: seconds without a sign of life after which a member counts as dead; a dead process is noticed at once
            with `sharded`, and a machine after ten seconds or more. A process that is frozen is ended after twenty or
            more, if the engine has not done so before.
        timeout: seconds after which a collective is given up.
        mishaps: members are "trainer-0", ..., in the order in which they were started, spares last; phases `update`
            (before the weights change), `publish` (while a snapshot or checkpoint is written; with `replicated` of the
            rank that writes it, the first), `recover` and, with `sharded`, `wait` (of a spare, of kind `kill`). With
            `replicated`, of kind `kill` only.

    Raises:
        RecoveryError: a value that cannot work, or a mishap that would never happen.
    """

    model: Path
    driver: str = REPLICATED
    steps: int = 20
    active: int = 2
    spares: int = 1
    batch: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    checkpoint_every: int = 5
    snapshot_every: int = 1
    machine_survives: bool = True
    digests: bool = True
    heartbeat: float = 0.5
    timeout: float = 2.0
    mishaps: tuple[Mishap, ...] = ()

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise RecoveryError(f"no driver {self.driver!r}", expected=f"one of {', '.join(DRIVERS)}")
        least = {"active": 2, "spares": 0, "seed": 0}
        least |= dict.fromkeys(("steps", "batch", "checkpoint_every", "snapshot_every"), 1)
        for name, value in least.items():
            whole(name, getattr(self, name), value)
        positive("learning_rate", self.learning_rate, zero=True)
        yes_or_no("machine_survives", self.machine_survives)
        yes_or_no("digests", self.digests)
        for name in ("heartbeat", "timeout"):
            positive(name, getattr(self, name))
        self._check_mishaps()

    def _check_mishaps(self) -> None:
        kinds = RANK_KINDS if self.driver == SHARDED else ("kill",)
        if others := {item.kind for item in self.mishaps} - set(kinds):
            raise RecoveryError(f"mishaps of kind {', '.join(sorted(others))}", expected=", ".join(kinds))
        unknown = {item.member for item in self.mishaps} - set(self.members)
        if unknown:
            raise RecoveryError(f"mishaps of {', '.join(sorted(unknown))}", expected=f"of {', '.join(self.members)}")
        waiting = [item for item in self.mishaps if item.phase == "wait"]
        if others := {item.member for item in waiting} - set(self.members[self.active :]):
            raise RecoveryError(f"mishaps in phase wait of {', '.join(sorted(others))}", expected="of a spare")
        if others := {item.kind if self.driver == SHARDED else self.driver for item in waiting} - {"kill"}:
            raise RecoveryError(
                f"mishaps in phase wait: {', '.join(sorted(others))}", expected=f"kind kill, driver {SHARDED}"
            )
        happening(self.mishaps, self.steps, {"publish": lambda item: self._publishes(item.step)})

    def _publishes(self, step: int) -> bool:
        copied = self.driver == SHARDED and step % self.snapshot_every == 0
        return copied or step % self.checkpoint_every == 0

    @property
    def outliving(self) -> int:
        """Number of shards of which copies outlive their processes."""
        return self.active if self.driver == SHARDED and self.machine_survives else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all ranks, spares last."""
        return tuple(f"trainer-{number}" for number in range(self.active + self.spares))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return {**asdict(self), "model": str(self.model)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SwapPlan:
        """Return the plan that `to_dict` wrote."""
        mishaps = tuple(Mishap(**item) for item in stored["mishaps"])
        return cls(**{**stored, "model": Path(stored["model"]), "mishaps": mishaps})


def read_plan(folder: Path) -> SwapPlan:
    """Return the plan of a member's job."""
    stored = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
    stored.pop("provenance")
    return SwapPlan.from_dict(stored)


def shard_folder(folder: Path, rank: int) -> Path:
    """Return where a rank's own checkpoints lie."""
    return folder / "checkpoints" / f"shard-{rank}"
