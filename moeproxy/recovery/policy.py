"""Restart one role, the whole task, or nothing: RobustRL's rules (arXiv 2512.22492, as `papers` summarises them).

Only the failed role restarts, but for three cases in which the whole task does: an exception in the first step (it is
likely to come from the set-up, which a restart of one role would not change), a second fault in the same step, and a
second failed attempt to restart a role.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moeproxy.recovery.plan import ROLE, RolePlan

RESTART_ROLE, RESTART_TASK, STOP = "restart the role", "restart the task", "stop"

DIED, HUNG, RAISED, NO_RESTART = "died", "hung", "raised", "restart failed"
KINDS = (DIED, HUNG, RAISED, NO_RESTART)


@dataclass(frozen=True)
class Decision:
    """What to do about a fault, and why."""

    action: str
    reason: str


@dataclass
class Policy:
    """Decides about one fault after another of a job.

    Args:
        plan: of the job.
        first: the step at which the task (re)started: its first.
    """

    plan: RolePlan
    first: int = 1
    task_restarts: int = 0
    _faults: dict[int, int] = field(default_factory=dict)
    _failed: dict[str, int] = field(default_factory=dict)

    def decide(self, kind: str, member: str, step: int) -> Decision:
        """Return what to do about a fault of `member` while the trainer is in `step`.

        Args:
            kind: one of `KINDS`.
            member: the failed one.
            step: the trainer's step.
        """
        reason = self._whole(kind, member, step)
        if reason is None:
            return Decision(RESTART_ROLE, f"{member} {kind}")
        if self.task_restarts >= self.plan.max_task_restarts:
            return Decision(STOP, f"{reason}, and the task was restarted {self.task_restarts} times already")
        return Decision(RESTART_TASK, reason)

    def restarted(self, member: str) -> None:
        """Take note that a role works again."""
        self._failed.pop(member, None)

    def task_restarted(self, first: int) -> None:
        """Take note that the whole task restarts at step `first`. Faults of before do not count any more."""
        self.first, self.task_restarts = first, self.task_restarts + 1
        self._faults.clear()
        self._failed.clear()

    def _whole(self, kind: str, member: str, step: int) -> str | None:
        """Return why the whole task has to restart, or None."""
        self._faults[step] = self._faults.get(step, 0) + (kind != NO_RESTART)
        if self.plan.strategy != ROLE:
            return f"{member} {kind}, and every fault restarts the task here"
        if kind == RAISED and step <= self.first:
            return f"{member} raised in the first step"
        if self._faults[step] > 1:
            return f"a second fault in step {step} ({member} {kind})"
        if kind == NO_RESTART:
            self._failed[member] = self._failed.get(member, 0) + 1
            if self._failed[member] > 1:
                return f"the second restart of {member} failed"
        return None
