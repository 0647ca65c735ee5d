"""What decides a job in roles: how many of each, how faults are noticed and answered, and mishaps made on purpose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.recovery.calculator import NONE, ROLE, STRATEGIES, TASK
from moeproxy.recovery.events import FAULT, MANAGER, ROLLOUT, TRAINER
from moeproxy.recovery.inputs import positive, whole, yes_or_no

__all__ = ["NONE", "PHASES", "ROLE", "TASK", "Mishap", "RolePlan", "due", "happening", "suffer"]

PHASES: Mapping[str, tuple[str, ...]] = {
    TRAINER: ("recover", "wait", "update", "publish"),
    ROLLOUT: ("idle", "weights", "generate", "deliver"),
    MANAGER: ("serve",),
}
"""What each role does: a trainer takes over a state, waits for trajectories, updates, and gives its state away."""

ROLE_KINDS = ("kill", "hang", "raise", "slow", "disk_full", "corrupt")
RANK_KINDS = ("kill", "hang", "raise", "slow", "drop", "mute")
KINDS = tuple(dict.fromkeys(ROLE_KINDS + RANK_KINDS))
ON_DISK = ("disk_full", "corrupt")
_ONLY_IN = {**dict.fromkeys(ON_DISK, "publish"), "drop": "update", "mute": "update"}
_BETWEEN_STEPS = ("recover", "idle")


@dataclass(frozen=True)
class Mishap:
    """One fault to make on purpose in a job.

    Args:
        member: who is hit: "trainer", "manager", "rollout-0", ...
        step: the trainer's step, from 1; for a rollout the first step that it works for from there on. The phases
            `recover` and `idle` belong to no step, and their mishaps happen in the first one: give 0.
        phase: in which of its `PHASES`.
        kind: `kill` (SIGKILL to itself), `hang` (the phase never ends; the process lives on), `raise` (an exception),
            `slow` (`seconds` longer in this phase from this step on), `disk_full` (no room for this step's checkpoint),
            `corrupt` (this step's checkpoint is damaged after it was written); in a job with hot swap also `drop`
            (its connections to the other ranks break) and `mute` (what is sent over them gets lost).
        seconds: of `slow`.

    Raises:
        RecoveryError: it could never happen: no such member, phase or kind, or no such step for them.
    """

    member: str
    step: int
    phase: str
    kind: str = "kill"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        role = self.member.partition("-")[0] if isinstance(self.member, str) else ""
        if self.phase not in PHASES.get(role, ()):
            known = "; ".join(f"{name}: {', '.join(phases)}" for name, phases in PHASES.items())
            raise RecoveryError(f"a mishap of {self.member!r} in phase {self.phase!r}", expected=known)
        if role == MANAGER and self.kind != "kill":
            raise RecoveryError(f"a mishap of kind {self.kind!r} of the manager", expected="kill")
        if self.kind not in KINDS:
            raise RecoveryError(f"a mishap of kind {self.kind!r}", expected=f"one of {', '.join(KINDS)}")
        if (role, self.phase) != (TRAINER, _ONLY_IN.get(self.kind, self.phase)) and self.kind in _ONLY_IN:
            raise RecoveryError(
                f"a mishap of kind {self.kind!r} of {self.member} in phase {self.phase!r}",
                expected=f"the trainer, in phase {_ONLY_IN[self.kind]!r}",
            )
        self._check_numbers(role)

    def _check_numbers(self, role: str) -> None:
        which = f"of a mishap of {self.member} in phase {self.phase!r}"
        whole(f"the step {which}", self.step, 0 if role == ROLLOUT or self.phase in _BETWEEN_STEPS else 1)
        if self.phase in _BETWEEN_STEPS and self.step:
            raise RecoveryError(
                f"the step {which} is {self.step}",
                expected="0: the phase belongs to no step",
                remedy="give step 0; it happens the first time that the member is in this phase",
            )
        positive(f"seconds {which}", self.seconds, zero=self.kind != "slow")


@dataclass(frozen=True)
class RolePlan:
    """How a job in roles runs.

    Args:
        rollouts: rollout members.
        shares: parts of a step's prompts that are generated apart; any rollout can make any share, with the same
            result. With 1 share and lag 0 the job is the lab's own run bit for bit.
        lag: steps that rollouts may be ahead of the trainer: with 1, the responses of a step come from the weights
            before the last update, so rollouts work while the trainer updates, or restarts.
        holders: rollouts that hold the trainer's state of the last steps in memory.
        standby: whether a second trainer process waits with everything loaded (the paper: on a rollout's machine).
        strategy: after a fault, `role`, `task` or `none`, as in `moeproxy.recovery.calculator`.
        checkpoint_every: steps between checkpoints on disk.
        heartbeat: seconds between looks at the members.
        trainer_hang: seconds in the phase `update` or `publish` without progress, after which a trainer is failed; also
            in `wait`, when it answers nothing or takes nothing of what is there. In `recover` five times as long.
        rollout_hang: seconds without throughput, though it has work, after which a rollout is asked for a heartbeat,
            and failed when it gives none (60 in RobustRL); one that answers, but finishes nothing, after five times as
            long. One without work is failed when it answers nothing for so long, and a manager for the shorter of both
            times, but at least `answer`.
        answer: seconds a member has to answer a heartbeat.
        max_task_restarts: restarts of the whole task after which the job ends.
        mishaps: faults to make on purpose.
        digests: whether to log digests of every step, for `verify`.
    """

    rollouts: int = 2
    shares: int = 2
    lag: int = 1
    holders: int = 2
    standby: bool = True
    strategy: str = ROLE
    checkpoint_every: int = 10
    heartbeat: float = 0.5
    trainer_hang: float = 60.0
    rollout_hang: float = 60.0
    answer: float = 5.0
    max_task_restarts: int = 3
    mishaps: tuple[Mishap, ...] = ()
    digests: bool = True

    def __post_init__(self) -> None:
        least = {"rollouts": 1, "shares": 1, "lag": 0, "holders": 1, "checkpoint_every": 1, "max_task_restarts": 0}
        for name, value in least.items():
            whole(name, getattr(self, name), value)
        for name in ("heartbeat", "trainer_hang", "rollout_hang", "answer"):
            positive(name, getattr(self, name))
        for name in ("standby", "digests"):
            yes_or_no(name, getattr(self, name))
        if self.strategy not in STRATEGIES:
            raise RecoveryError(f"strategy is {self.strategy!r}", expected=f"one of {', '.join(STRATEGIES)}")
        names = {"trainer", "manager", *self.rollout_names}
        if others := {item.kind for item in self.mishaps} - set(ROLE_KINDS):
            raise RecoveryError(f"mishaps of kind {', '.join(sorted(others))}", expected=", ".join(ROLE_KINDS))
        if unknown := {item.member for item in self.mishaps} - names:
            raise RecoveryError(f"mishaps of {', '.join(sorted(unknown))}", expected=f"of {', '.join(sorted(names))}")

    @property
    def rollout_names(self) -> tuple[str, ...]:
        """Names of the rollouts."""
        return tuple(f"rollout-{number}" for number in range(self.rollouts))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RolePlan:
        """Return the plan that `to_dict` wrote."""
        return replace(cls(), **{**stored, "mishaps": tuple(Mishap(**item) for item in stored["mishaps"])})


def happening(mishaps: Sequence[Mishap], steps: int, phases: Mapping[str, Callable[[Mishap], bool]]) -> None:
    """Refuse mishaps of a job that would never happen in it.

    Args:
        mishaps: of the plan.
        steps: of the job.
        phases: of those that not every step has, whether the mishap's step does.

    Raises:
        RecoveryError: a mishap is beyond the last step, or in a phase that its step does not have.
    """
    for item in mishaps:
        if item.step > steps:
            raise RecoveryError(f"{item} is beyond the last step", expected=f"at most step {steps}")
        if item.phase in phases and not phases[item.phase](item):
            raise RecoveryError(
                f"{item} would never happen: that step does not have it",
                expected="a step with a checkpoint or a snapshot",
                remedy="change the step, or how often they are made",
            )


def due(mishaps: Sequence[Mishap], folder: Path, member: str, phase: str, step: int) -> Mishap | None:
    """Return the mishap that is to happen now, at most once in a job, whoever asks.

    A file records that it has happened, since the member that it hits does not live to tell. A `slow` one goes on.
    """
    for number, item in enumerate(mishaps):
        if (item.member, item.phase) != (member, phase):
            continue
        if item.kind == "slow" and step >= item.step:
            return item
        # A rollout may get no share of the very step: its mishap then waits for the next that it does get.
        now = step >= item.step if item.member.startswith(ROLLOUT) else step == item.step
        if now and item.kind != "slow" and _first(folder / f"mishap-{number}"):
            return item
    return None


def suffer(
    mishaps: Sequence[Mishap], folder: Path, member: str, phase: str, step: int, say: Callable[..., object]
) -> Mishap | None:
    """Let a member die here and now, hang, fail or be slow, if the plan says so; return a mishap that is left to it.

    Args:
        mishaps: of the plan.
        folder: of the job.
        member: who asks, in this process.
        phase, step: where it is.
        say: logs an event of the member, as `EventLog.add`.

    Raises:
        RuntimeError: as the plan says.
    """
    mishap = due(mishaps, folder, member, phase, step)
    if mishap is None:
        return None
    if mishap.kind != "slow":
        say(FAULT, step, kind=mishap.kind, phase=phase)
    if mishap.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mishap.kind == "raise":
        raise RuntimeError(f"made to fail in step {step}, phase {phase}")
    while mishap.kind == "hang":
        time.sleep(0.1)
    if mishap.kind == "slow":
        time.sleep(mishap.seconds)
    return mishap


def _first(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
