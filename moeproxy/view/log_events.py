"""What befell a run beside its metrics, by step: resumes, failures, where the log breaks off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeproxy.traces.logs.sink import Finding
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace

MAX_EVENTS = 20
_WIDTH = 90


@dataclass(frozen=True)
class Event:
    """Something that happened at a step, in words."""

    step: int
    text: str


def resumes(run: LogTrace | Trace) -> tuple[Event, ...]:
    """Return where a run went on from an earlier step; at most the last 20."""
    if isinstance(run, Trace):
        return ()
    return tuple(Event(resume.step, str(resume)) for resume in run.info.resumes[-MAX_EVENTS:])


def failures(run: LogTrace | Trace) -> tuple[Event, ...]:
    """Return tracebacks, kills and the like, each at the last step logged before it, and an end that came too early.

    Those that came before the first step stand there. At most the last 20.
    """
    if isinstance(run, Trace) or not run.has_metrics:
        return ()
    found = [Event(_step(run, finding), _short(str(finding))) for finding in run.info.findings]
    if end := early_end(run):
        found.append(Event(int(run.trace.steps.index[-1]), end))
    return tuple(list(dict.fromkeys(found))[-MAX_EVENTS:])


def early_end(log: LogTrace) -> str:
    """Return in words that the last progress bar of a log is not full, "" when it is or there is none."""
    if log.info.progress is None:
        return ""
    done, _, total = log.info.progress.text.partition("/")
    if not (done.isdigit() and total.isdigit()) or int(done) >= int(total):
        return ""
    return f"the log ends at {done} of {total} (line {log.info.progress.line})"


def _step(log: LogTrace, finding: Finding) -> int:
    """Return the last step that was logged before a line, the first of all when there is none."""
    places = log.places
    before = (places["step"].to_numpy() >= 0) & (places["line"].to_numpy() <= finding.line)
    if finding.file:
        before &= (places["file"] == finding.file).to_numpy()
    rows = np.flatnonzero(before)
    return int(places["step"].iloc[rows[-1]]) if rows.size else int(log.trace.steps.index[0])


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
