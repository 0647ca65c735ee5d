"""Role-aware detection (RobustRL): a member is judged by what its role should be doing now.

A trainer that waits for trajectories is idle by right: it is judged in its own phases only. A rollout is judged by its
throughput first; one that has work and finishes none is asked for a heartbeat, and failed when none comes. A process
that died is noticed by Ray at once, whatever its role.

Ours: a rollout is failed, too, when it answers, but has finished nothing for `PATIENCE` times as long. A trainer that
waits for what has been finished is not idle by right, and one that recovers, which depends on others, has `PATIENCE`
times as long as in its own phases. And who is idle by right still has to answer: a process that is
frozen does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeproxy.recovery.events import MANAGER, ROLLOUT, TRAINER
from moeproxy.recovery.plan import RolePlan

FINE, ASK, FAILED = "fine", "ask", "failed"
WAIT, RECOVER = "wait", "recover"
PATIENCE = 5.0
_OWN = {TRAINER: ("update", "publish"), ROLLOUT: ("weights", "generate", "deliver")}


@dataclass(frozen=True)
class Progress:
    """What a member says of itself.

    Args:
        phase: of its role.
        done: a count that grows with its work: phases for a trainer, shares for a rollout.
        step: that it works on; for a manager the last one whose trajectories are all there.
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

        The first time that it is asked about a member, which then begins its work, counts as an answer.
        """
        seen = self._seen.get(member)
        if seen is None:
            self._seen[member] = _Seen(Progress("", 0, 0), now, now)
            return FINE
        if seen.progress.phase not in _OWN.get(role, ()):
            vain = role == TRAINER and (self._waits_in_vain(seen) or self._stuck(seen, now))
            return FAILED if vain or now - seen.answered > self._silence(role) else FINE
        if role == TRAINER:
            return FAILED if now - seen.changed > self._plan.trainer_hang else FINE
        return self._rollout(seen, now)

    def silent(self, member: str, now: float) -> float:
        """Return for how many seconds a member that is failed has shown no sign of what it should be doing."""
        seen, manager = self._seen[member], self._seen.get(MANAGER)
        if now - seen.answered > self._plan.answer:
            return now - seen.answered
        waits = manager is not None and seen.progress.phase == WAIT
        return now - (max(seen.changed, manager.changed) if waits and manager else seen.changed)

    def _waits_in_vain(self, trainer: _Seen) -> bool:
        """Whether the manager has said for long that it has all that the trainer waits for."""
        manager = self._seen.get(MANAGER)
        if manager is None or trainer.progress.phase != WAIT or manager.progress.step < trainer.progress.step:
            return False
        since = max(trainer.changed, manager.changed)
        return manager.answered - since > self._plan.trainer_hang  # not by the clock: it may be the manager that hangs

    def _stuck(self, trainer: _Seen, now: float) -> bool:
        """Whether it has taken back its state for so long that it never will."""
        return trainer.progress.phase == RECOVER and now - trainer.changed > PATIENCE * self._plan.trainer_hang

    def _silence(self, role: str) -> float:
        """Return for how long a member that has no work may be silent; a manager holds up both of the others."""
        hang = {TRAINER: self._plan.trainer_hang, ROLLOUT: self._plan.rollout_hang}
        return max(self._plan.answer, hang.get(role, min(hang.values())))

    def _rollout(self, seen: _Seen, now: float) -> str:
        if now - seen.changed <= self._plan.rollout_hang:
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
