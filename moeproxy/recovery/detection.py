"""Role-aware detection (RobustRL): a member is judged by what its role should be doing now.

A trainer that waits for trajectories is idle by right: it is judged in its own phases only. A rollout is judged by its
throughput first; one that has work and finishes none is asked for a heartbeat, and failed when none comes. (Ours: also
when it answers, but has finished nothing for `PATIENCE` times as long.) A process that died is noticed by Ray at once,
whatever its role.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeproxy.recovery.events import ROLLOUT, TRAINER
from moeproxy.recovery.plan import RolePlan

FINE, ASK, FAILED = "fine", "ask", "failed"
PATIENCE = 5.0
_OWN = {TRAINER: ("update", "publish"), ROLLOUT: ("weights", "generate", "deliver")}


@dataclass(frozen=True)
class Progress:
    """What a member says of itself.

    Args:
        phase: of its role.
        done: a count that grows with its work: phases for a trainer, shares for a rollout.
        step: that it works on.
    """

    phase: str
    done: int
    step: int


@dataclass
class _Seen:
    progress: Progress
    changed: float
    answered: float
    asked: float | None = None


class Monitor:
    """Judges the members of a job.

    Args:
        plan: with the times allowed.
    """

    def __init__(self, plan: RolePlan) -> None:
        self._plan = plan
        self._seen: dict[str, _Seen] = {}

    def seen(self) -> dict[str, Progress]:
        """Return the last answer of every member."""
        return {member: seen.progress for member, seen in list(self._seen.items())}

    def forget(self, member: str) -> None:
        """Start anew with a member that was replaced."""
        self._seen.pop(member, None)

    def answered(self, member: str, progress: Progress, now: float) -> None:
        """Take note of a member's answer to a look at `now` (seconds, of any one clock)."""
        seen = self._seen.get(member)
        if seen is None:
            self._seen[member] = _Seen(progress, now, now)
            return
        if progress != seen.progress:
            seen.progress, seen.changed = progress, now
        seen.answered, seen.asked = now, None

    def judge(self, member: str, role: str, now: float) -> str:
        """Return `FINE`, `ASK` (ask for a heartbeat now) or `FAILED`.

        A member that never answered is fine: it is still starting, and the start has a limit of its own.
        """
        seen = self._seen.get(member)
        if seen is None:
            return FINE
        own = seen.progress.phase in _OWN.get(role, ())
        if role == TRAINER:
            return FAILED if own and now - seen.changed > self._plan.trainer_hang else FINE
        if not own or now - seen.changed <= self._plan.rollout_hang:
            return FINE
        if now - seen.changed > PATIENCE * self._plan.rollout_hang:
            return FAILED
        # It has work and finishes none: slow, or gone? A heartbeat after the suspicion tells.
        if seen.asked is None:
            if seen.answered > seen.changed + self._plan.rollout_hang:
                return FINE
            seen.asked = now
            return ASK
        return FAILED if now - seen.asked > self._plan.answer else FINE
