"""A verdict on a run as the page shows it: sentences, and beside them the numbers that they come from."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import pandas as pd

from moeproxy.triage.alarms import NOT_FINITE, Alarm, judged_number, mean_of, times, usual_heading
from moeproxy.triage.attempted import JudgedAttempt, leading
from moeproxy.triage.detect import ALARM, UNCLEAR
from moeproxy.triage.diagnose import Cause, Diagnosis
from moeproxy.triage.jsonable import sure
from moeproxy.view.apps.tables import html_frame

_KEYS = "data-lm-suppress-shortcuts='true'"  # JupyterLab takes the enter key otherwise
_BOX = "max-width:950px;line-height:1.4"


def attempts_html(judged: Sequence[JudgedAttempt]) -> str:
    """Return the verdict on the attempt that leads, below a sentence on every attempt where there are several."""
    lead = leading(judged)
    if not lead.label:
        return verdict_html(lead.diagnosis)
    said = _paragraph("The log was resumed; each attempt is judged:") + _items([_attempt(one) for one in judged])
    return _box(said + _paragraph(f"What follows is about {lead.label}.")) + verdict_html(lead.diagnosis)


def verdict_html(verdict: Diagnosis) -> str:
    """Return the verdict: what departs from where on, likely causes with evidence, what to check, what is not known."""
    detection = verdict.detection
    said = _paragraph(detection.sentences[0], strong=True, role="status")
    parts = [said, *(_paragraph(f"The metric itself looks wrong: {one}", strong=True) for one in verdict.wrong_metrics)]
    if detection.verdict == UNCLEAR:
        return _box("".join(parts) + _items(detection.notes))
    if detection.verdict == ALARM:
        parts.append(_scrolled(html_frame(alarm_table(detection.alarms), "What departs"), "What departs"))
        parts.append(_paragraph(_lead(verdict), strong=True))
        parts += [_cause(place, cause) for place, cause in enumerate(verdict.causes, start=1)]
    notes = f"<details><summary {_KEYS}>What else was seen ({len(detection.notes)})</summary>{_items(detection.notes)}"
    return _box("".join(parts) + (f"{notes}</details>" if detection.notes else ""))


def alarm_table(alarms: Sequence[Alarm]) -> pd.DataFrame:
    """Return one row for every signal that departs."""
    return pd.DataFrame([_alarm(alarm) for alarm in alarms]).rename(columns={"expected": usual_heading(alarms)})


def evidence_table(cause: Cause) -> pd.DataFrame:
    """Return what speaks for and against a cause: the changes seen, and those of recorded runs with this fault.

    Both are in units of what healthy runs reach.
    """
    sides = (("for", cause.supports), ("against", cause.contradicts))
    rows = [
        {
            "speaks": side,
            "signal": one.signal.replace("_", " "),
            "when": one.window,
            "change seen": one.cells[0],
            "in recorded runs": one.cells[1],
        }
        for side, evidence in sides
        for one in evidence
    ]
    return pd.DataFrame(rows)


def _attempt(one: JudgedAttempt) -> str:
    ended = f", {one.ended_by}" if one.ended_by else ""
    return f"{one.label} (steps {one.steps[0]} to {one.steps[1]}{ended}): {one.diagnosis.detection.sentences[0]}"


def _alarm(alarm: Alarm) -> dict[str, str]:
    back = f", back from step {alarm.recovered} on" if alarm.recovered is not None else ""
    row = {"signal": alarm.signal.replace("_", " "), "from step": str(alarm.onset), "mean": mean_of(alarm.signal)}
    if alarm.direction == NOT_FINITE:
        return row | {
            **{"how": f"not finite at {alarm.steps} steps{back}", "over steps": "–", "seen": "NaN or infinite"},
            **{"expected": _number(alarm.before), "size": "–", "times what healthy runs reach": "–"},
        }
    return row | {
        **{"how": f"{alarm.kind} {alarm.direction}{back}", "over steps": f"{alarm.shown[0]} to {alarm.shown[1]}"},
        **{"seen": _number(alarm.after), "expected": _number(alarm.expected)},
        **{"size": f"{times(alarm.size)} {alarm.size_in}", "times what healthy runs reach": _excess(alarm)},
    }


def _lead(verdict: Diagnosis) -> str:
    if verdict.unknown:
        return verdict.sentences[len(verdict.wrong_metrics)]
    compared = f"compared with {verdict.n_recorded} recorded runs"
    distance = f"distance {verdict.distance:.2f} a feature, where known faults stay below {verdict.farthest:.2f}"
    return f"Likely causes, {compared} ({distance}); changes are in units of what healthy runs reach:"


def _cause(place: int, cause: Cause) -> str:
    head = f"{place}. {cause.fault} ({cause.title}), confidence {sure(cause.confidence)}"
    table = evidence_table(cause)
    words = {
        "Not logged, would tell": ", ".join(name.replace("_", " ") for name in cause.missing),
        "Explains": ", ".join(name.replace("_", " ") for name in cause.explains),
        "Resembles, as a consequence": ", ".join(cause.consequences),
        "Check next": cause.check,
        "Usual remedy": cause.remedy,
        "Public report": cause.twin,
    }
    rows = "".join(f"<li><b>{name}:</b> {html.escape(text)}</li>" for name, text in words.items() if text)
    shown = html_frame(table, f"Evidence for and against {cause.fault}") if len(table) else ""
    state = "open" if place == 1 else ""
    summary = f"<summary {_KEYS} style='cursor:pointer'>{html.escape(head)}</summary>"
    return (
        f"<details {state} style='margin:3px 0 3px 12px'>{summary}{shown}<ul style='margin:2px 0'>{rows}</ul></details>"
    )


def _excess(alarm: Alarm) -> str:
    return f"{times(alarm.excess)} times {alarm.against}" if alarm.by_limit else times(alarm.excess)


def _number(value: float) -> str:
    return "–" if np.isnan(value) else judged_number(value)


def _scrolled(table: str, label: str) -> str:
    """A loud failure moves fifty signals: their table must not push the causes off the page."""
    box = f"role='region' aria-label='{label}' {_KEYS} style='max-height:330px;overflow:auto'"
    return f"<div tabindex='0' {box}>{table}</div>"


def _items(sentences: Sequence[str]) -> str:
    rows = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul style='margin:2px 0 2px 18px;padding:0'>{rows}</ul>" if rows else ""


def _paragraph(text: str, *, strong: bool = False, role: str = "") -> str:
    said = html.escape(text)
    spoken = f" role='{role}' aria-live='polite'" if role else ""
    return f"<div{spoken} style='margin:4px 0'>{f'<b>{said}</b>' if strong else said}</div>"


def _box(inside: str) -> str:
    return f"<div style='{_BOX}'>{inside}</div>"
