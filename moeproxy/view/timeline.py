"""The timeline of an incident: attempts, onset, alarms, failures and what the authors did, all by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moeproxy.triage.alarms import Alarm
from moeproxy.triage.attempted import JudgedAttempt
from moeproxy.view.actions import KINDS, Action, in_order
from moeproxy.view.incident import Incident
from moeproxy.view.log_events import Event

ATTEMPT, RESUMED, FAILED, ONSET = "attempt", "resumed", "failure", "onset"
UP, DOWN, NOT_FINITE = "alarm: up", "alarm: down", "alarm: not finite"
MOST_ALARMS = 10
"""Alarms of an attempt that have a row of their own, the earliest first."""

ACTIONS = "actions"
"""Name of the row on which actions stand; those too close to stand beside each other go to "actions, row 2"."""

CLOSE = 0.05
"""Share of the timeline within which two marks would lie on each other."""


@dataclass(frozen=True)
class Moment:
    """Something at a step of the timeline.

    Args:
        row: name of the row that it stands on.
        kind: what it is: a constant of this module, or a value of `actions.KINDS`.
        step: where it is, or begins.
        until: where it ends, None for a moment.
        text: in words.
        number: of an action, from 1.
        open_end: whether it lasts beyond the last step.
    """

    row: str
    kind: str
    step: int
    until: int | None
    text: str
    number: int | None = None
    open_end: bool = False


@dataclass(frozen=True)
class Timeline:
    """What happened, row by row.

    Args:
        moments: in the order of their rows, those of a row by step.
        beyond: alarms that have no row of their own.
        aside: actions without a step, and those more than a step away from the run's, with their numbers.
    """

    moments: tuple[Moment, ...]
    beyond: int = 0
    aside: tuple[tuple[Action, int], ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows, from the top."""
        return tuple(dict.fromkeys(moment.row for moment in self.moments))

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; (0, 1) without any."""
        steps = [step for m in self.moments for step in (m.step, m.until) if step is not None]
        return (min(steps), max(steps)) if steps else (0, 1)

    def table(self) -> pd.DataFrame:
        """Return a row for everything that happened, by step; actions that stand at none of them last."""
        moments = sorted(self.moments, key=lambda m: m.step)
        rows: list[dict[str, Any]] = [
            {"step": str(m.step), "until": _until(m), "what": _what(m), "in words": m.text} for m in moments
        ]
        rows += [
            {"step": _step(a), "until": "–", "what": f"{n}: {KINDS[a.kind]}", "in words": _said(a)}
            for a, n in self.aside
        ]
        return pd.DataFrame(rows, columns=pd.Index(["step", "until", "what", "in words"]))


def timeline(incident: Incident, actions: Sequence[Action] = ()) -> Timeline:
    """Return the timeline of a run.

    Args:
        incident: the run, judged.
        actions: what its authors did and saw.
    """
    ordered = in_order(actions)
    moments: list[Moment] = []
    for number, judged in enumerate(incident.judgements):
        moments += _attempt(incident, judged, number)
        moments += [_alarm(alarm, judged, number) for alarm in judged.diagnosis.detection.alarms[:MOST_ALARMS]]
    beyond = sum(max(0, len(one.diagnosis.detection.alarms) - MOST_ALARMS) for one in incident.judgements)
    numbered = [(action, number) for number, action in enumerate(ordered, 1)]
    steps = [step for moment in moments for step in (moment.step, moment.until or moment.step)]
    first, last = min(steps, default=0), max(steps, default=1)
    placed = [(a, n) for a, n in numbered if among(a.step, first, last)]
    moments += _actions(placed, last - first)
    return Timeline(tuple(moments), beyond, tuple((a, n) for a, n in numbered if not among(a.step, first, last)))


def among(step: int | None, first: int, last: int) -> bool:
    """Return whether a step is one of a run's or next to them; one far away would squeeze the run into an edge."""
    return step is not None and first - 1 <= step <= last + 1


def _attempt(incident: Incident, judged: JudgedAttempt, number: int) -> Iterable[Moment]:
    row, (first, last) = judged.label or "run", judged.steps
    onset = judged.diagnosis.detection.onset
    yield Moment(row, ATTEMPT, first, last, f"{row}, steps {first} to {last}")
    if 0 < number <= len(incident.resumes):
        resume = incident.resumes[number - 1]
        yield Moment(row, RESUMED, resume.step, None, resume.text)
    if onset is not None:
        yield Moment(row, ONSET, onset, None, f"onset: the run departs from step {onset} on")
    yield from (Moment(row, FAILED, event.step, None, event.text) for event in _of_attempt(incident, number))


def _of_attempt(incident: Incident, number: int) -> list[Event]:
    """Return the failures of an attempt: those that stand at a step which only it reached last before them.

    A log says after which step something failed, and the attempts are in order, so each failure belongs to the first
    attempt whose last step is not passed yet.
    """
    left: list[Event] = list(incident.failures)
    found: list[Event] = []
    for place, judged in enumerate(incident.judgements):
        last = place == len(incident.judgements) - 1
        mine = left if last else _until_step(left, judged.steps[1])
        if place == number:
            found = mine
        left = left[len(mine) :]
    return found


def _until_step(events: list[Event], last: int) -> list[Event]:
    """Return the events up to the last one that stands at the last step of an attempt, none when there is no such."""
    at = [place for place, event in enumerate(events) if event.step == last]
    return events[: at[-1] + 1] if at else []


def _alarm(alarm: Alarm, judged: JudgedAttempt, number: int) -> Moment:
    kind = {"up": UP, "down": DOWN}.get(alarm.direction, NOT_FINITE)
    end = judged.steps[1] if alarm.recovered is None else alarm.recovered
    row = alarm.signal if number == 0 else f"{alarm.signal} ({judged.label})"
    return Moment(row, kind, alarm.onset, end, alarm.sentence, open_end=alarm.recovered is None)


def _actions(placed: Sequence[tuple[Action, int]], length: int) -> list[Moment]:
    """Return the actions, each on the first of their rows that is free about its step."""
    found: list[Moment] = []
    taken: list[list[int]] = []
    for action, number in placed:
        step = action.step or 0
        free = (i for i, steps in enumerate(taken) if all(abs(step - other) > CLOSE * length for other in steps))
        place = next(free, len(taken))
        if place == len(taken):
            taken.append([])
        taken[place].append(step)
        row = ACTIONS if place == 0 else f"{ACTIONS}, row {place + 1}"
        found.append(Moment(row, KINDS[action.kind], step, None, _said(action), number))
    return sorted(found, key=lambda moment: moment.row)


def _said(action: Action) -> str:
    return f"{action.text} ({action.time})" if action.time else action.text


def _step(action: Action) -> str:
    return "–" if action.step is None else str(action.step)


def _until(moment: Moment) -> str:
    if moment.until is None:
        return "–"
    return f"{moment.until} (end)" if moment.open_end else str(moment.until)


def _what(moment: Moment) -> str:
    return f"{moment.number}: {moment.kind}" if moment.number is not None else moment.kind
