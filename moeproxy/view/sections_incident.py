"""The sections of a postmortem that say what happened: timeline, what was seen, the probable cause, what was done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.logtrace import LogTrace
from moeproxy.triage.alarms import Alarm, judged_number, mean_of, times, usual_heading
from moeproxy.triage.attempted import JudgedAttempt
from moeproxy.triage.detect import ALARM, UNCLEAR, Detection
from moeproxy.triage.diagnose import Cause, Diagnosis
from moeproxy.triage.fingerprint import SPANS, WINDOW_NAMES
from moeproxy.triage.jsonable import plain, sure
from moeproxy.triage.judged import meaning_of, unit_of
from moeproxy.view.actions import KINDS, Action, in_order
from moeproxy.view.document import Block, Figure, Heading, Points, Section, Table, Text
from moeproxy.view.figures_evidence import evidence_figure
from moeproxy.view.figures_incident import departed_signals, signals_figure
from moeproxy.view.figures_timeline import timeline_figure
from moeproxy.view.incident import Incident
from moeproxy.view.report_input import ReportInput
from moeproxy.view.scores import score_rows, score_sentences
from moeproxy.view.style import counted
from moeproxy.view.timeline import timeline

_UNITS = {
    "healthy spreads": "Size is counted in healthy spreads: how far healthy runs stray from each other at that step.",
    "standard errors of its own noise": "Size is counted in standard errors of the run's own noise before the onset.",
}

_EVIDENCE = (
    "Confidence is calibrated on recorded runs of every fault, with the seed held out. Changes are in units of what "
    "healthy runs reach; "
    + " and ".join(
        f"“{name}” is steps {start} to {stop - 1} after the onset"
        for name, (start, stop) in zip(WINDOW_NAMES, SPANS, strict=True)
    )
    + "."
)


def incident_lead(result: ReportInput) -> Iterable[str]:
    """Yield what went wrong, from which step on, and why, a few sentences a run."""
    for one in result.incidents:
        main = one.main
        if main is None:
            yield f"{one.name}: could not be judged, since its log has no metric; it contains {one.contents}."
            continue
        yield f"{_called(one, main)}: {main.diagnosis.detection.sentences[0]}"
        yield from (f"The metric itself looks wrong: {sentence}" for sentence in main.diagnosis.wrong_metrics)
        yield from _cause_lead(main.diagnosis)
        after = [other for other in one.judgements if not other.alarmed and other.began > main.began]
        if main.alarmed and after and after[-1].diagnosis.detection.verdict != UNCLEAR:
            first, last = after[-1].steps
            yield f"After the last resume (steps {first} to {last}, {after[-1].label}) there is no alarm."
    if result.actions:
        yield f"The authors noted {counted(len(result.actions), 'action')}."


def incident_sections(result: ReportInput) -> Iterable[Section]:
    """Yield the sections of every run; those of several runs carry their names."""
    if result.actions or result.notes or result.authors:
        yield Section("What the authors say", tuple(_said(result)))
    for one in result.incidents:
        suffix = f": {one.name}" if len(result.incidents) > 1 else ""
        if one.main is None:
            yield Section(f"What the log holds{suffix}", tuple(_contents(one)))
            continue
        yield Section(f"Timeline{suffix}", tuple(_timeline(one, result.actions)))
        yield Section(f"What was seen{suffix}", tuple(_seen(one, result.actions)))
        if one.main.alarmed:
            yield Section(f"Probable cause{suffix}", tuple(_causes(one, one.main.diagnosis)))


def incident_limits(result: ReportInput) -> Iterable[str]:
    """Yield what the verdict does not show."""
    yield from score_sentences(result)
    if any(incident.judgements for incident in result.incidents):
        yield (
            "The faults that a cause is sought among were injected into tiny models; a real run can have a cause that "
            "is not among them, and its signals may be defined otherwise than ours."
        )


def incident_facts(incidents: Sequence[Incident]) -> Iterable[Block]:
    """Yield where each run comes from."""
    for one in incidents:
        if one.facts:
            frame = pd.DataFrame({"what": list(one.facts), "value": [str(value) for value in one.facts.values()]})
            yield Table(f"The log of {one.name}", frame)


def incident_data(result: ReportInput) -> dict[str, Any]:
    """Return every number that the sections say, for machines."""
    if not (result.incidents or result.actions or result.notes):
        return {}
    return {
        "authors": result.authors,
        "notes": list(result.notes),
        "actions": [plain(action.__dict__) for action in in_order(result.actions)],
        "incidents": [_incident_data(one, result.actions) for one in result.incidents],
        "scores": [dict(row) for row in score_rows(result)],
    }


def _incident_data(one: Incident, actions: Sequence[Action]) -> dict[str, Any]:
    drawn = timeline(one, actions)
    return {
        "run": one.name,
        "verdict": one.verdict,
        "contents": one.contents,
        "facts": plain(dict(one.facts)),
        "notes": list(one.notes),
        "healthy_runs": len(one.healthy),
        "attempts": [_attempt_data(judged) for judged in one.judgements],
        "timeline": [plain(moment.__dict__) for moment in drawn.moments],
    }


def _attempt_data(judged: JudgedAttempt) -> dict[str, Any]:
    index = judged.trace.steps.index
    return {
        "label": judged.label,
        "first_step": int(index[0]),
        "began": judged.began,
        "last_step": int(index[-1]),
        "ended_by": judged.ended_by,
        "signals_departed": departed_signals(judged.diagnosis.detection.alarms),
        "diagnosis": judged.diagnosis.to_dict(),
    }


def _called(one: Incident, judged: JudgedAttempt) -> str:
    return f"{one.name}, {judged.label}" if judged.label else one.name


def _cause_lead(diagnosis: Diagnosis) -> Iterable[str]:
    if diagnosis.detection.verdict != ALARM:
        return
    if diagnosis.unknown or not diagnosis.causes:
        yield f"Cause: {diagnosis.sentences[-1]}"
        return
    first, *others = diagnosis.causes
    second = f"; next {others[0].fault}, {sure(others[0].confidence)}" if others else ""
    yield f"Likeliest cause: {first.fault} ({first.title}), confidence {sure(first.confidence)}{second}."


def _contents(one: Incident) -> Iterable[Block]:
    yield Text(f"There is no metric in the log, so nothing was judged. It contains {one.contents}.")
    if isinstance(one.run, LogTrace):
        yield Text(f"What to do: {one.run.remedy}.")
    if one.notes:
        yield Points(one.notes)


def _timeline(one: Incident, actions: Sequence[Action]) -> Iterable[Block]:
    drawn = timeline(one, actions)
    if one.resumes:
        count = len(one.judgements)
        yield Text(
            f"The run was resumed, so its log holds {counted(count, 'attempt')}. Each is judged as it stood in the log "
            "when the next one began; what a resume replaced is judged too."
        )
    yield Figure("Attempts, onset, alarms and actions by step.", timeline_figure(drawn, one.name), open=True)
    far = [f"{number} (step {action.step})" for action, number in drawn.aside if action.step is not None]
    if far:
        yield Text(f"Listed and not drawn, since the run has no such step: {', '.join(far)}.", note=True)


def _seen(one: Incident, actions: Sequence[Action]) -> Iterable[Block]:
    several = len(one.judgements) > 1
    for judged in one.judgements:
        detection = judged.diagnosis.detection
        if several:
            yield Heading(f"{judged.label.capitalize()}, steps {judged.steps[0]} to {judged.steps[1]}")
        yield Text(detection.sentences[0])
        for sentence in judged.diagnosis.wrong_metrics:
            yield Text(f"The metric itself looks wrong: {sentence}")
        if detection.alarms:
            # Steps of several attempts overlap, and an action belongs to one of them: nobody says which.
            marked = () if several else in_order(actions)
            yield Figure("The signals that departed first.", signals_figure(one, judged, actions=marked))
            rows = _filled([_alarm_row(alarm) for alarm in detection.alarms])
            yield Table(
                "Alarms, the earliest first", rows.rename(columns={"expected": usual_heading(detection.alarms)})
            )
            yield from _size_words(detection)
        elif not several and detection.signals:
            yield Figure("The usual signals.", signals_figure(one, judged, actions=in_order(actions)))
        if detection.notes:
            yield Points(detection.notes)
    if one.notes:
        yield Heading("What else is to be known")
        yield Points(one.notes)


def _size_words(detection: Detection) -> Iterable[Block]:
    units = dict.fromkeys(alarm.size_in for alarm in detection.alarms if np.isfinite(alarm.size))
    if units:
        said = [_UNITS.get(unit, f"Size is counted in {unit}.") for unit in units]
        yield Text(" ".join([*said, "“Times healthy” says how many times it exceeds what healthy runs reach."]))


def _filled(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Return rows as a table without the columns in which none of them has anything."""
    frame = pd.DataFrame(rows).astype(object)
    return frame.loc[:, [name for name in frame if any(row[name] is not None for row in rows)]]


def _alarm_row(alarm: Alarm) -> dict[str, object]:
    broken = not np.isfinite(alarm.size)
    end = f", until step {alarm.recovered}" if alarm.recovered is not None else ""
    how = f"not finite at {alarm.steps} steps" if broken else f"{alarm.kind} {alarm.direction}"
    return {
        "signal": alarm.signal,
        "from step": alarm.onset,
        "how": f"{how}{end}",
        "seen": None if broken else judged_number(alarm.after),
        "expected": None if broken else judged_number(alarm.expected),
        "unit": unit_of(alarm.signal) or None,
        "mean": None if broken else mean_of(alarm.signal),
        "over steps": f"{alarm.shown[0]}–{alarm.shown[1]}",
        "before": None if np.isnan(alarm.before) else judged_number(alarm.before),
        "size": None if broken else times(alarm.size),
        "times healthy": None if broken else _excess(alarm),
        "what it measures": meaning_of(alarm.signal),
    }


def _excess(alarm: Alarm) -> str:
    return f"{times(alarm.excess)} times {alarm.against}" if alarm.by_limit else times(alarm.excess)


def _causes(one: Incident, diagnosis: Diagnosis) -> Iterable[Block]:
    if len(one.judgements) > 1 and one.main is not None:
        first, last = one.main.steps
        yield Text(f"This is about {one.main.label}, steps {first} to {last}.")
    if diagnosis.unknown:
        yield Text(diagnosis.sentences[-1])
    if not diagnosis.causes:
        return
    first = diagnosis.causes[0]
    if not diagnosis.unknown:
        yield from _first_cause(first)
    yield Table("Faults that such a departure resembles", _filled([_cause_row(cause) for cause in diagnosis.causes]))
    yield Text(f"{_EVIDENCE} Compared with {counted(diagnosis.n_recorded, 'recorded run')}.")
    if any(not evidence.broken for evidence in (*first.supports, *first.contradicts)):
        yield Figure(f"What speaks for and against {first.fault}.", evidence_figure(diagnosis))
    rows = [row for cause in diagnosis.causes for row in _evidence_rows(cause)]
    if rows:
        yield Table("Evidence for and against each", pd.DataFrame(rows), folded=True)


def _first_cause(cause: Cause) -> Iterable[Block]:
    yield Text(f"{cause.title} ({cause.fault}), confidence {sure(cause.confidence)}.")
    told = {
        "Check next": cause.check,
        "What usually helps": cause.remedy,
        "Public reports of such a case": cause.twin,
        "Alarms that follow from it": ", ".join(cause.explains),
        "Not logged, though it would tell": ", ".join(cause.missing),
        "Resembles as a consequence": ", ".join(cause.consequences),
    }
    yield Points(tuple(f"{what}: {words.rstrip('.')}." for what, words in told.items() if words))


def _cause_row(cause: Cause) -> dict[str, object]:
    strongest = [evidence.sentence for evidence in cause.supports[:2]]
    against = [evidence.sentence for evidence in cause.contradicts[:2]]
    return {
        "fault": cause.fault,
        "confidence": sure(cause.confidence),
        "what it is": cause.title,
        "for": "; ".join(strongest) or None,
        "against": "; ".join(against) or None,
        "check next": cause.check or None,
    }


def _evidence_rows(cause: Cause) -> Iterable[dict[str, object]]:
    for which, evidence in (("for", cause.supports), ("against", cause.contradicts)):
        for one in evidence:
            yield {
                "fault": cause.fault,
                "speaks": which,
                "signal": one.signal,
                "when": one.window,
                "in this run": one.cells[0] if one.broken else round(one.seen, 2),
                "in recorded runs": one.cells[1] if one.broken else round(one.expected, 2),
            }


def _said(result: ReportInput) -> Iterable[Block]:
    if result.authors:
        yield Text(f"Written by {result.authors}.")
    yield from (Text(part) for note in result.notes for part in note.split("\n") if part.strip())
    if result.actions:
        ordered = in_order(result.actions)
        yield Table("Actions, numbered as in the figures", _filled([_action(n, a) for n, a in enumerate(ordered, 1)]))


def _action(number: int, action: Action) -> dict[str, object]:
    step = None if action.step is None else str(action.step)
    return {
        "no.": str(number),
        "step": step,
        "time": action.time or None,
        "kind": KINDS[action.kind],
        "what": action.text,
    }
