"""How a job with hot swap is watched: who died or froze, whether the engine can go on, and when the job is over.

What an engine does about a fault is its own. It leaves three things to whoever started the job: a fault before the
first step, when its ranks have not found one another yet (torchft 0.2 and nvidia-resiliency-ext 0.4 then wait for
minutes); with replicas, a new one when fewer are left than train; and a process that lives and does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.events import Event, EventLog, read_events, since_start
from moeproxy.recovery.swap_plan import FINISHED, REPLICATED, SHARDED, SwapPlan, shard_folder
from moeproxy.recovery.swap_processes import LIGHTHOUSE, Processes

FROZEN_S = 20.0
"""Seconds without a sign of life after which a process is ended; a busy machine keeps one from giving any for some."""

_LOOK_S = 0.05
_STARTS = 4


class Watch:
    """Watches one job.

    Args:
        plan: of the job.
        folder: of the job.
        processes: of the job.
    """

    def __init__(self, plan: SwapPlan, folder: Path, processes: Processes) -> None:
        self._plan, self._folder, self._processes = plan, folder, processes
        self._patience = max(FROZEN_S, plan.heartbeat)
        self._dead: set[str] = set()
        self._starts = 1

    def outcome(self, deadline: float) -> str:
        """Wait for the job's end and return it: "finished", or why not and what is usable.

        Args:
            deadline: until when it may take (monotonic seconds).
        """
        while time.monotonic() <= deadline:
            events = self._events()
            said = next((str(event.info["outcome"]) for event in events if event.event == ev.JOB_END), "")
            if said == FINISHED:
                return said
            if why := said or self._answered(events):
                return f"{why}; {self._usable()}"
            time.sleep(_LOOK_S)
        return f"out of time; {self._usable()}"

    def _events(self) -> list[Event]:
        try:
            return since_start(read_events(self._folder))
        except RecoveryError:  # none yet
            return []

    def _answered(self, events: Sequence[Event]) -> str:
        """Notice faults and do about them what the engine does not; return why the job is over, or ""."""
        frozen = self._processes.frozen(self._patience)
        for member in frozen:
            self._processes.end(member)
        died = sorted(self._processes.gone() - self._dead)
        for member in died:
            self._note(events, member, "hung" if member in frozen else "died")
        lighthouse = self._processes.ended(LIGHTHOUSE)
        if (died or lighthouse) and not begun(self._plan, events):
            return self._start_over(", ".join([*died, *[LIGHTHOUSE] * lighthouse]))
        if lighthouse:
            return "failed: the lighthouse died, without which ranks do not find one another"
        return self._enough(events)

    def _note(self, events: Sequence[Event], member: str, kind: str) -> None:
        EventLog(self._folder, ev.TRAINER, member).add(ev.DETECT, kind=kind, silent=silent(events, member))
        self._dead.add(member)

    def _start_over(self, who: str) -> str:
        """Start all processes anew: nothing is lost. Return why that is no use any more, or ""."""
        if self._starts == _STARTS:
            return (
                f"failed: {who} died before the first step, in the last of {_STARTS} starts (see the logs beside this)"
            )
        self._starts += 1
        self._processes.stop()
        self._dead.clear()
        EventLog(self._folder, ev.JOB, "job").add(ev.TASK_RESTART, reason=f"{who} died before the first step")
        self._processes.start_all()
        return ""

    def _enough(self, events: Sequence[Event]) -> str:
        """With replicas, start another one when fewer are left than train; return "" when enough are left."""
        plan, up = self._plan, self._processes.members - self._dead
        replicated = plan.driver == REPLICATED
        living = with_state(events, up) if replicated else up
        if len(living) < (1 if replicated else plan.active):
            return f"failed: {len(living)} of {plan.active} ranks are left and no spare"
        if replicated and len(up) < plan.active:
            self._processes.start(
                f"trainer-{len(self._processes.members)}"
            )  # cold: it heals from a living one's memory
        return ""

    def _usable(self) -> str:
        sharded = [shard_folder(self._folder, rank) for rank in range(self._plan.active)]
        shards = sharded if self._plan.driver == SHARDED else [self._folder / "checkpoints"]
        steps = set.intersection(*[set(Checkpoints(shard).whole()) for shard in shards])
        return f"the newest checkpoint is that after step {max(steps)}" if steps else "there is no checkpoint"


def begun(plan: SwapPlan, events: Sequence[Event]) -> bool:
    """Whether a job has come so far that its engine answers faults: replicas agree with the first step that ends."""
    first = ev.STEP_COMMIT if plan.driver == REPLICATED else ev.STEP_BEGIN
    return any(event.event == first for event in events)


def silent(events: Sequence[Event], member: str) -> float:
    """Return the seconds since a rank's last sign of life in training; 0 of one that was in none, such as a spare."""
    last = max((event for event in events if event.member == member), key=lambda event: event.t, default=None)
    trains = last is not None and last.event in (ev.CONNECTED, ev.STEP_BEGIN, ev.STEP_COMMIT)
    return max(0.0, time.time() - last.t) if last is not None and trains else 0.0


def with_state(found: Sequence[Event], members: set[str]) -> set[str]:
    """Return those members that have the state: all before the first step, then those that finished one or healed.

    Others, left alone, would begin anew, and nobody would notice.
    """
    if not any(event.event == ev.STEP_COMMIT for event in found):
        return members
    return members & {event.member for event in found if event.event in (ev.STEP_COMMIT, ev.CONNECTED)}
