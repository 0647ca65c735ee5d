"""A job's time line from its events: attempts at steps, outages of members, and what each second went into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moeproxy.recovery.events import (
    CHECKPOINT,
    CONNECTED,
    DETECT,
    FAULT,
    JOB_END,
    JOB_START,
    MANAGER,
    PHASE,
    READY,
    ROLLOUT,
    STANDBY,
    STEP_BEGIN,
    STEP_COMMIT,
    SURVIVED,
    TASK_RESTART,
    TRAINER,
    Event,
)

PRODUCTIVE = "productive"
WAIT = "wait"
_SAME_S = 1.0
LOST: tuple[str, ...] = ("detect", "restart", "reconnect", "recompute", "checkpoint", "idle")


@dataclass(frozen=True)
class Attempt:
    """One try of the trainer at a step.

    Args:
        step: the step.
        begin, end: seconds since 1970; the end of one that a fault cut short is the last sign of life before it.
        done: whether it was finished.
        kept: whether its result is part of the finished run, not done again later.
    """

    step: int
    begin: float
    end: float
    done: bool
    kept: bool = False


@dataclass(frozen=True)
class Outage:
    """One member away, or the whole task.

    Args:
        member, role: which.
        step: the trainer's step at the time, None before the first.
        fault: when it failed (seconds since 1970); where nobody knows, its last sign of life before the detection.
        detect, ready, end: when it was noticed, when its replacement could work, when that worked again.
        kind: what was noticed: "died", "hung", ...
        whole_task: whether all roles were restarted for it.
    """

    member: str
    role: str
    step: int | None
    fault: float
    detect: float
    ready: float
    end: float
    kind: str = ""
    whole_task: bool = False

    @property
    def seconds(self) -> float:
        """From the fault to work again."""
        return self.end - self.fault


@dataclass(frozen=True)
class Span:
    """A stretch of a job's time line.

    Args:
        begin, end: in seconds.
        what: `productive`, or why the time is lost.
        credit: share of it that counts all the same, for the roles that worked on.
    """

    begin: float
    end: float
    what: str
    credit: float = 0.0


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """Return the trainer's tries at steps, in order; of those that finished a step the last one is kept.

    Ranks that train together are in the same try, from the first that begins it to the first that finishes it. A fault
    ends it unless one of them finishes it all the same, or a trainer that takes over goes on after it: then it was
    finished, and only its event is missing.
    """
    tried: list[Attempt] = []
    open_: Event | None = None
    for number, event in enumerate(events):
        if open_ is not None and _beside(event, open_):
            continue
        if open_ is not None and event.event in (FAULT, DETECT) and _finished_after(events[number + 1 :], open_.step):
            continue
        ends = event.event in (STEP_BEGIN, STEP_COMMIT, FAULT, DETECT, TASK_RESTART, JOB_END)
        if open_ is not None and ends and (event.role == TRAINER or event.event in (TASK_RESTART, JOB_END)):
            done = event.event == STEP_COMMIT and event.step == open_.step
            tried.append(Attempt(int(open_.step or 0), open_.t, max(open_.t, _failed(event)), done))
            open_ = None
        if event.role == TRAINER and event.event == STEP_BEGIN:
            open_ = event
    tried = [replace(item, done=item.done or _taken_over(item, events)) for item in tried]
    last = {item.step: number for number, item in enumerate(tried) if item.done}
    return [replace(item, kept=last.get(item.step) == number) for number, item in enumerate(tried)]


def _taken_over(tried: Attempt, events: Sequence[Event]) -> bool:
    """Whether a trainer went on with the state after this try's step, which nobody began again."""
    later = [event for event in events if event.t > tried.begin and (event.role, event.step) == (TRAINER, tried.step)]
    return any(event.event == CONNECTED for event in later) and all(event.event != STEP_BEGIN for event in later)


def _beside(event: Event, begun: Event) -> bool:
    """Whether another rank begins the same step, or ends the one before."""
    if event.role != TRAINER or event.member == begun.member:
        return False
    return event.event == (STEP_BEGIN if event.step == begun.step else STEP_COMMIT)


def _finished_after(later: Iterable[Event], step: int | None) -> bool:
    """Whether a rank finishes the step that is under way, without beginning another or the same one anew."""
    again: set[str] = set()
    for event in later:
        if event.event in (TASK_RESTART, JOB_END):
            return False
        if event.role == TRAINER and event.event == STEP_BEGIN:
            again.add(event.member)
        if event.role == TRAINER and event.event == STEP_COMMIT and event.step == step and event.member not in again:
            return True
    return False


def outages(events: Sequence[Event]) -> list[Outage]:
    """Return every outage that was noticed, in order.

    A member's begins with its `fault` (else its `detect`) and ends when the replacement works: a trainer with its next
    step, a rollout when it is connected (or waits for work, if there was none any more), a manager when it is ready: it
    needs nothing from others. A standby's is none of the job's: nobody waits for it. A fault that ends no process, as a
    full disk, begins none.
    """
    found: list[Outage] = []
    pending: dict[str, float] = {}
    step: int | None = None
    for number, event in enumerate(events):
        if event.event == STEP_BEGIN and event.role == TRAINER:
            step = event.step
        if event.role == STANDBY:
            continue
        if event.event == FAULT and event.info.get("kind") not in SURVIVED:
            pending.setdefault(event.member, event.t)
        elif event.event in (DETECT, TASK_RESTART):
            fault = min(pending.pop(event.member, _failed(event)), event.t)
            made = _outage(event, fault, step, events[number + 1 :])
            if made.whole_task and found and event.t - found[-1].detect < _SAME_S:
                # What was noticed just before is why: one outage, in which nobody's work counts.
                cause = found.pop()
                made = replace(made, fault=cause.fault, detect=cause.detect)
            found.append(made)
    return found


def _failed(event: Event) -> float:
    """Return when what was noticed had begun, as far as the one who noticed it could tell."""
    return event.t - float(event.info.get("silent", 0.0))


def _outage(event: Event, fault: float, step: int | None, later: Sequence[Event]) -> Outage:
    whole = event.event == TASK_RESTART
    own = [e for e in later if e.member == event.member]
    last = later[-1].t if later else event.t
    stop = _returned(TRAINER if whole else event.role, own, later) or _first(later, JOB_END) or last
    up = [e.t for e in (later if whole else own) if e.event == READY and e.t <= stop]
    ready = (max(up) if whole else up[0]) if up else stop
    kind = str(event.info.get("kind", event.info.get("reason", "")))
    return Outage(event.member, event.role, step, fault, event.t, ready, stop, kind, whole)


def _returned(role: str, own: Sequence[Event], later: Sequence[Event]) -> float | None:
    """Return when a member worked again: `own` are its events after the outage was noticed, `later` everybody's."""
    if role == TRAINER:  # ranks that train together begin together; after the last step there is none to begin
        return _first(later, STEP_BEGIN) or _first(own, CONNECTED)
    if role == MANAGER:
        return _first(own, READY)
    phases = [e.info.get("phase") for e in own if e.event == PHASE]
    # It connects with its first share. One that waits to the end for a share was ready all the time.
    return _first(own, CONNECTED) or (_first(own, READY) if phases[-1:] == ["idle"] else None)


def _first(events: Iterable[Event], name: str) -> float | None:
    return next((e.t for e in events if e.event == name), None)


def spans(
    events: Sequence[Event], tried: Sequence[Attempt], away: Sequence[Outage], begin: float, end: float
) -> list[Span]:
    """Return what every second of the job between `begin` and `end` went into."""
    marked = _marked(events, tried, away)
    times = {t for item in (*marked, *(Span(o.fault, o.end, "") for o in away)) for t in (item.begin, item.end)}
    cuts = sorted({begin, end, *(t for t in times if begin < t < end)})
    trainers, rollouts = _sizes(events)
    line: list[Span] = []
    for left, right in pairwise(cuts):
        middle = (left + right) / 2
        what = next((span.what for span in marked if span.begin <= middle < span.end), "idle")
        credit = _credit(middle, away, trainers, rollouts) if what in ("detect", "restart", "reconnect") else 0.0
        if line and (line[-1].what, line[-1].credit) == (what, credit):
            line[-1] = replace(line[-1], end=right)
        else:
            line.append(Span(left, right, what, credit))
    return line


def _marked(events: Sequence[Event], tried: Sequence[Attempt], away: Sequence[Outage]) -> list[Span]:
    """Return what is known of the time line; of two that overlap the first counts.

    A step that is kept goes before an outage: the other ranks worked on while one was dead. But a trainer that waits
    while a rollout is out and nobody has noticed works at nothing; afterwards another one does the rollout's share.
    """
    found = [Span(e.t - float(e.info.get("seconds", 0)), e.t, "checkpoint") for e in events if e.event == CHECKPOINT]
    unnoticed = [item for item in away if item.role == ROLLOUT and not item.whole_task]
    for begin, end in _waits(events) if unnoticed else ():
        held = [(max(begin, item.fault), min(end, item.detect)) for item in unnoticed]
        found += [Span(left, right, "detect") for left, right in held if left < right]
    found += [Span(item.begin, item.end, PRODUCTIVE) for item in tried if item.kept]
    for item in away:
        if item.role == TRAINER or item.whole_task:
            found += [
                Span(item.fault, item.detect, "detect"),
                Span(item.detect, item.ready, "restart"),
                Span(item.ready, item.end, "reconnect"),
            ]
    return found + [Span(item.begin, item.end, "recompute") for item in tried if not item.kept]


def _waits(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return when the trainer waited for trajectories, as far as its job logs phases."""
    found: list[tuple[float, float]] = []
    since: float | None = None
    for event in events:
        if event.role == TRAINER or event.event in (TASK_RESTART, JOB_END):
            if since is not None:
                found.append((since, event.t))
            waits = event.event == PHASE and event.info.get("phase") == WAIT
            since = event.t if waits else None
    return found


def _sizes(events: Sequence[Event]) -> tuple[int, int]:
    """Return (trainers, rollouts): as the job said, else those that appear."""
    for event in events:
        if event.event == JOB_START and "rollouts" in event.info:
            return int(event.info.get("trainers", 1)), int(event.info["rollouts"])
    members = {(event.role, event.member) for event in events}
    count = {role: sum(found == role for found, _ in members) for role in (TRAINER, ROLLOUT)}
    return max(1, count[TRAINER]), count[ROLLOUT]


def _credit(t: float, away: Sequence[Outage], trainers: int, rollouts: int) -> float:
    """Return the share of roles at work at `t`, when a trainer is away: none while the whole task restarts.

    None either while the trainer is there, and waits for a rollout that is out.
    """
    now = [item for item in away if item.fault <= t < item.end]
    if any(item.whole_task for item in now) or not any(item.role == TRAINER for item in now):
        return 0.0
    running = rollouts - len({item.member for item in now if item.role == ROLLOUT})
    return max(0, running) / (rollouts + trainers)
