"""What happened to a job: one JSON object a line, each member of a job writing a file of its own.

A line is written at once and whole, so a member that is killed leaves all it did; a last line cut short is left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError

SUFFIX = ".events.jsonl"
_TAIL = 8192

JOB = "job"
TRAINER = "trainer"
ROLLOUT = "rollout"
MANAGER = "manager"
STANDBY = "standby"
ROLES = (JOB, TRAINER, ROLLOUT, MANAGER, STANDBY)

JOB_START = "job_start"  # info: trainers, rollouts
JOB_END = "job_end"  # info: outcome
START = "start"  # a process has begun; info: pid
READY = "ready"  # it can work
CONNECTED = "connected"  # it has what it needs from the others: weights, state, their addresses
PHASE = "phase"  # info: phase
STEP_BEGIN = "step_begin"
STEP_COMMIT = "step_commit"  # the step is done and its state kept elsewhere
CHECKPOINT = "checkpoint"  # info: seconds that the trainer waited, and path or problem
FAULT = "fault"  # when it happened, where that is known; info: kind
DETECT = "detect"  # info: kind; cause if an exception was raised; silent: seconds without a sign of life before it
TASK_RESTART = "task_restart"  # info: reason
EVENTS = (
    JOB_START,
    JOB_END,
    START,
    READY,
    CONNECTED,
    PHASE,
    STEP_BEGIN,
    STEP_COMMIT,
    CHECKPOINT,
    FAULT,
    DETECT,
    TASK_RESTART,
)
SURVIVED = ("disk_full", "corrupt", "drop", "mute")
"""Kinds of faults that end no process."""


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        t: when, in seconds since 1970, by the clock of the member's machine.
        role: what the member is, one of `ROLES`.
        member: its name, as "rollout-1"; a replacement has the name of what it replaces.
        event: one of `EVENTS`.
        step: the training step concerned, from 1, or None.
        info: further JSON values.
    """

    t: float
    role: str
    member: str
    event: str
    step: int | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the event as one line of JSON."""
        stored = {"t": self.t, "role": self.role, "member": self.member, "event": self.event, "step": self.step}
        return json.dumps({**stored, **({"info": self.info} if self.info else {})}) + "\n"

    @staticmethod
    def of(stored: dict[str, Any]) -> Event:
        """Return the event that a line holds.

        Raises:
            ValueError: it is no event.
        """
        found = Event(
            float(stored["t"]),
            str(stored["role"]),
            str(stored["member"]),
            str(stored["event"]),
            None if stored.get("step") is None else int(stored["step"]),
            dict(stored.get("info", {})),
        )
        if not math.isfinite(found.t):
            raise ValueError(f"a time of {found.t}")
        if found.role not in ROLES or found.event not in EVENTS:
            raise ValueError(f"an event {found.event!r} of a {found.role!r}")
        return found


class EventLog:
    """Writer of one member's events.

    Args:
        folder: of the job; the file is named after the member, and lines are added to one that exists.
        role: what the member is.
        member: its name.
    """

    def __init__(self, folder: Path, role: str, member: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{member}{SUFFIX}"
        mend(self.path)
        self._role, self._member = role, member

    def add(self, event: str, step: int | None = None, *, t: float | None = None, **info: Any) -> Event:
        """Append one event, of now unless `t` says otherwise, and return it."""
        made = Event(time.time() if t is None else t, self._role, self._member, event, step, info)
        with open(self.path, "ab", buffering=0) as stream:
            stream.write(made.line().encode())
        return made


def read_events(path: str | Path) -> list[Event]:
    """Read the events of a job, in the order of time.

    Args:
        path: a file of events, or a job's folder, of which all members' files are read.

    Raises:
        RecoveryError: there are none, or a line is no event.
    """
    place = Path(path)
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    found = [event for file in files for event in _file(file)]
    if not found:
        raise RecoveryError("no events", where=place, expected=f"JSON lines of a job's members (*{SUFFIX})")
    return in_order(found)


def trainer_step(folder: Path) -> int:
    """Return the step that the trainer is in, or was in when it died; 1 before the first."""
    path = folder / f"{TRAINER}{SUFFIX}"
    if not path.exists():
        return 1
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL))
        lines = stream.read().split(b"\n")[:-1]
    for line in reversed(lines):
        # A line that the tail cut in two is too old to matter.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = Event.of(json.loads(line))
            if event.event == STEP_BEGIN and event.step:
                return event.step
            if event.event == STEP_COMMIT and event.step:
                return event.step + 1
    return 1


def mend(path: Path) -> None:
    """End a last line that a killed writer cut short, so that the next writer's line stands alone."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as stream:
            stream.seek(-1, 2)
            whole = stream.read(1) == b"\n"
        if not whole:
            with open(path, "ab", buffering=0) as stream:  # behind whatever others have added meanwhile
                stream.write(b"\n")


def is_torn(line: bytes) -> bool:
    """Whether a line is the beginning of a JSON object that was cut short, and no object."""
    return not line.strip() or (line.startswith(b"{") and not line.rstrip().endswith(b"}"))


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events by time; those of one time stay as they were given, but for the job's end, which is the last."""
    return sorted(events, key=lambda event: (event.t, event.event == JOB_END))


def _file(path: Path) -> list[Event]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is not finished
    except OSError as error:
        raise RecoveryError(f"no events ({error.strerror})", where=path) from error
    found = []
    for number, line in enumerate(lines, 1):
        if is_torn(line):
            continue
        try:
            found.append(Event.of(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecoveryError(
                f"line {number} is no event ({error})", where=path, expected="what EventLog writes"
            ) from error
    return found


def since_start(events: Sequence[Event]) -> list[Event]:
    """Return what has happened since the whole task was started, or last restarted."""
    starts = [number for number, event in enumerate(events) if event.event == TASK_RESTART]
    return list(events[starts[-1] + 1 :] if starts else events)
