"""LogTrace: one run read from a log, with everything that stood there and where it stood."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import TraceError
from moeproxy.traces.keys.base import UNDEFINED
from moeproxy.traces.logs.cells import NUMERIC, WORDS, Status
from moeproxy.traces.logs.joining import Resume
from moeproxy.traces.logs.sink import Finding, Skipped
from moeproxy.traces.trace import Trace

_NAMED = 8
"""Columns that are named where a log has no metric."""


@dataclass(frozen=True)
class LogInfo:
    """Where a run was read from, and what a reader of it must know.

    Args:
        name: name of the run: of the file, or of the run within it.
        framework: name in `moeproxy.traces.keys.FRAMEWORKS`, or "unknown".
        version: of the framework, "" when the log does not say.
        container: what the file is, in words.
        files: that were read, an archive's member as archive!member.
        lines: lines (or records, or entries) of the files.
        rows: rows of this run.
        skipped: lines left out, by reason.
        resumes: places where the run went on from an earlier step.
        findings: tracebacks, crashes and the like.
        progress: the last state of a progress bar.
        clock: the key that holds the step, or "row" when rows were numbered.
        keys: for every signal the key it was read from.
        definitions: for every signal how it differs from the canonical one, "" when it does not.
        notes: warnings, in words.
        facts: what else the file says of the run.
    """

    name: str
    framework: str
    container: str
    files: tuple[str, ...]
    version: str = ""
    lines: int = 0
    rows: int = 0
    skipped: tuple[Skipped, ...] = ()
    resumes: tuple[Resume, ...] = ()
    findings: tuple[Finding, ...] = ()
    progress: Finding | None = None
    clock: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    definitions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class LogTrace:
    """One run read from a log.

    Args:
        info: where it comes from.
        status: steps x signals, the state of every cell of `trace.steps` as a word (`measured`, `missing`, `nan`, ...).
        original: every row of the log with every original key, numbers and text as they stood there.
        original_status: of equal shape, the state of every cell.
        places: for every row file, line, process, step (-1 without), attempt, and whether it is shown in the trace.
    """

    info: LogInfo
    status: pd.DataFrame
    original: pd.DataFrame
    original_status: pd.DataFrame
    places: pd.DataFrame
    _trace: Trace | None = None

    @property
    def has_metrics(self) -> bool:
        """Whether the log holds a canonical signal at a step."""
        return self._trace is not None

    @property
    def trace(self) -> Trace:
        """The canonical signals.

        Raises:
            TraceError: there is none; the error says what the log does contain.
        """
        if self._trace is None:
            raise TraceError(
                f"no metric in this log; it contains {self.contents}",
                where=", ".join(self.info.files),
                expected="at least one metric at one step",
                remedy=self.remedy,
            )
        return self._trace

    @property
    def contents(self) -> str:
        """What the log contains, in words."""
        parts = [f"{self.info.lines} lines", f"{self.info.rows} rows"]
        if self._trace is None and self.info.rows:
            columns = [str(name) for name in self.original]
            more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
            parts.append(f"columns {', '.join(columns[:_NAMED])}{more}")
        if self.info.progress is not None:
            parts.append(f"progress that ends at {self.info.progress.text}")
        parts += [str(finding) for finding in _last_of_each(self.info.findings)]
        parts += [f"lines left out: {skipped}" for skipped in self.info.skipped]
        if len(parts) == 2 and not self.info.rows:
            parts.append("nothing that reads as a metric, a crash or progress")
        return "; ".join(parts)

    @property
    def unmapped(self) -> tuple[str, ...]:
        """Original keys that hold numbers and stand for no canonical signal here; a mapping can name them."""
        known = {*self.info.keys.values(), *self.info.clock.split(", ")}
        numeric = [WORDS[state] for state in NUMERIC]
        return tuple(
            str(name)
            for name in self.original
            if str(name) not in known and bool(np.asarray(self.original_status[name].isin(numeric)).any())
        )

    def counts(self, signal: str) -> dict[str, int]:
        """Return how many steps of a signal are in each state."""
        return {str(word): int(n) for word, n in self.status[signal].value_counts().items() if n}

    def summary(self) -> str:
        """Return what was read, for people."""
        info = self.info
        head = f"{info.name}: {info.framework}{f' {info.version}' if info.version else ''}, {info.container}"
        lines = [head, f"  files: {', '.join(info.files)}", f"  read: {info.lines} lines, {info.rows} rows"]
        if self._trace is None:
            lines.append(f"  no metric: {self.contents}")
        else:
            steps = self._trace.steps.index
            lines.append(f"  steps: {steps[0]} to {steps[-1]}, {len(steps)} of them, by {info.clock!r}")
            lines += [self._signal_line(name) for name in self._trace.signals]
        lines += self._unmapped_line()
        lines += [f"  skipped: {skipped}" for skipped in info.skipped]
        lines += [f"  {resume}" for resume in info.resumes]
        if self._trace is not None:
            lines += [f"  {finding}" for finding in _last_of_each(info.findings)]
        return "\n".join([*lines, *(f"  note: {note}" for note in info.notes)])

    def _signal_line(self, name: str) -> str:
        states = ", ".join(f"{n} {word}" for word, n in self.counts(name).items())
        definition = self.info.definitions.get(name, "")
        return f"  {name} = {self.info.keys[name]}: {states}{f'; {definition}' if definition else ''}"

    def _unmapped_line(self) -> list[str]:
        names = self.unmapped if self._trace is not None else ()  # without a trace `contents` names the columns
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [f"  no signal (a mapping can name them): {', '.join(names[:_NAMED])}{more}"] if names else []

    @property
    def remedy(self) -> str:
        """What to do about a log without a metric, in one clause."""
        if not self.info.rows:
            return "look at the end of the log, or give the file that the run's logger wrote"
        return (
            "name the columns with a mapping: read(path, mapping={'their_key': 'signal'}, step='their_step'), "
            "or --map their_key=signal and --step their_step"
        )

    def __repr__(self) -> str:
        if self._trace is None:
            return f"LogTrace({self.info.name}: {self.info.framework}; no metric: {self.contents})"
        steps, signals = len(self._trace.steps), len(self._trace.signals)
        return f"LogTrace({self.info.name}: {self.info.framework}; {steps} steps, {signals} signals)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"


def overlay_notes(left: LogTrace | Trace, right: LogTrace | Trace) -> tuple[str, ...]:
    """Return a sentence for each signal of both traces that they define differently; the lab's are canonical.

    Where a framework is not known or a mapping was given, nobody says how a signal is averaged, and that is said. So
    are steps that count something else.

    Example:
        >>> overlay_notes(read("theirs.log")[0], proxy_trace)
        ('total_loss: trl: mean over the steps since the last log ...; here: as moeproxy defines it',)
    """
    mine, theirs = _definitions(left), _definitions(right)
    signals = tuple(
        f"{name}: {mine[name][1]}; the other: {theirs[name][1]}"
        for name in mine
        if name in theirs and (mine[name][0] != theirs[name][0] or mine[name][0] in UNDEFINED)
    )
    return (*_clocks(left, right), *signals)


def _clocks(left: LogTrace | Trace, right: LogTrace | Trace) -> tuple[str, ...]:
    """Say that steps count different things: rows rather than steps, or two clocks of one framework."""
    (mine, ours), (theirs, others) = _clock(left), _clock(right)
    if mine == theirs or ("row" not in (mine, theirs) and (ours != others or not ours)):
        return ()
    return (f"steps: by {_counts(mine)}; the other: by {_counts(theirs)}",)


def _counts(clock: str) -> str:
    return "rows of the log, which has no step" if clock == "row" else repr(clock or "step")


def _clock(log: LogTrace | Trace) -> tuple[str, str]:
    """Return the key that steps come from, and the framework."""
    if isinstance(log, LogTrace):
        return log.info.clock, log.info.framework
    stored = log.provenance.config.get("log", {})
    return str(stored.get("clock", "")), str(stored.get("framework", ""))


def _definitions(log: LogTrace | Trace) -> dict[str, tuple[str, str]]:
    if isinstance(log, LogTrace):
        found, framework = log.info.definitions, log.info.framework
    else:  # a trace that was once read from a log still knows the definitions of that
        stored = log.provenance.config.get("log", {})
        found, framework = stored.get("definitions", {}), stored.get("framework", "")
    if not framework:
        return dict.fromkeys(log.trace.signals if isinstance(log, LogTrace) else log.signals, ("", _CANONICAL))
    return {name: (text, f"{framework}, {text or _CANONICAL}") for name, text in found.items()}


_CANONICAL = "as moeproxy defines it"


def _last_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    return list({finding.kind: finding for finding in findings}.values())


def words(status: Any) -> pd.Categorical:
    """Return states (uint8) as words."""
    return pd.Categorical.from_codes(status, categories=[WORDS[state] for state in Status])
