"""Where a run was judged to depart, as marks for the figure of its signals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeproxy.triage.alarms import NOT_FINITE, Alarm, times
from moeproxy.triage.detect import ALARM, Detection
from moeproxy.view.log_events import Event
from moeproxy.view.log_view import LogView


def with_onsets(view: LogView, detection: Detection) -> LogView:
    """Return the view with a mark at the onset in every panel, and at the signal's own where it has one."""
    return replace(view, onsets=onsets(detection, view.signals))


def onsets(detection: Detection, signals: tuple[str, ...]) -> Mapping[str, tuple[Event, ...]]:
    """Return by signal where the run departs, and where the signal itself does; nothing without an alarm."""
    if detection.verdict != ALARM or detection.onset is None:
        return {}
    whole = Event(detection.onset, f"the run departs from step {detection.onset} on")
    own = {name: [a for a in detection.alarms if a.signal.partition("/")[0] == name] for name in signals}
    return {name: (whole, *(Event(alarm.onset, _said(alarm)) for alarm in own[name])) for name in signals}


def _said(alarm: Alarm) -> str:
    name = alarm.signal.replace("_", " ")
    if alarm.direction == NOT_FINITE:
        return f"{name} is not finite from step {alarm.onset} on"
    return f"{name} {alarm.direction} from step {alarm.onset} on, {times(alarm.excess)} times {alarm.against}"
