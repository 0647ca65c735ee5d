"""Which runs and which of their signals are looked at, in words, in a table, and as series to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from moeproxy.errors import MoeproxyError
from moeproxy.traces.logtrace import LogTrace, overlay_notes
from moeproxy.traces.signals import signal_of
from moeproxy.traces.trace import Trace
from moeproxy.view.log_events import Event, failures, resumes
from moeproxy.view.log_series import Series, series_of

MAX_SIGNALS = 6
"""Panels of one figure."""

MAX_RUNS = 2
"""Runs that are laid over each other."""

_FIRST = (
    "policy_loss",
    "total_loss",
    "lm_loss",
    "grad_norm",
    "reward_mean",
    "kl",
    "entropy",
    "logprob_diff_mean",
    "logprob_diff_k3",
    "prob_diff_mean",
    "response_length",
)
_BY_DEFAULT = 4


@dataclass(frozen=True, eq=False)
class DrawnRun:
    """A run: its name in the legend, the signals that are drawn of it, what befell it."""

    label: str
    series: Mapping[str, Series]
    resumes: tuple[Event, ...] = ()
    failures: tuple[Event, ...] = ()


@dataclass(frozen=True, eq=False)
class LogView:
    """What one figure shows.

    Args:
        runs: none, one, or two laid over each other.
        signals: of the first run, in the order of the panels.
        notes: for signals that the two runs define differently, how.
        onsets: by signal, where the first run was judged to depart (`moeproxy.view.log_onsets`).
    """

    runs: tuple[DrawnRun, ...] = ()
    signals: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    onsets: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)

    @cached_property
    def span(self) -> tuple[int, int]:
        """First and last step of everything drawn; (0, 1) without any."""
        steps = [s.steps_S[[0, -1]] for run in self.runs for s in run.series.values() if s.steps_S.size]
        return (int(np.min(steps)), int(np.max(steps))) if steps else (0, 1)

    def drawn(self, signal: str) -> list[Series]:
        """Return the series of a signal, of the runs that have it."""
        return [run.series[signal] for run in self.runs if signal in run.series]

    def is_log(self, signal: str) -> bool:
        """Whether a signal is drawn on a logarithmic axis: it is such a quantity, and no value forbids it."""
        values = np.concatenate([s.finite_S for s in self.drawn(signal)] or [np.zeros(0)])
        return signal_of(signal).scale == "log" and bool(values.size and values.min() > 0)

    def table(self) -> pd.DataFrame:
        """Return a row for every signal of every run: how many numbers, which range, what is no number."""
        return pd.DataFrame([_row(name, run) for name in self.signals for run in self.runs if name in run.series])

    @property
    def departures(self) -> tuple[Event, ...]:
        """Every mark of an onset once, the earliest first."""
        marks = dict.fromkeys(event for name in self.signals for event in self.onsets.get(name, ()))
        return tuple(sorted(marks, key=lambda event: event.step))

    def describe(self) -> str:
        """Return in one or two sentences what is drawn."""
        if not self.runs or not self.signals:
            return "There is nothing to draw."
        runs = " and ".join(run.label for run in self.runs)
        parts = [f"{n.replace('_', ' ')} {' and '.join(_said(n, run) for run in self.runs)}" for n in self.signals]
        several = len(self.runs) > 1
        events = [(run.label, event.text) for run in self.runs for event in (*run.resumes, *run.failures)]
        first = [(self.runs[0].label, event.text) for event in self.departures]
        said = [f"{label}: {text}" if several else f"{text[:1].upper()}{text[1:]}" for label, text in [*events, *first]]
        return ". ".join([f"{runs}, steps {self.span[0]:,} to {self.span[1]:,}: {'; '.join(parts)}", *said]) + "."


def log_view(runs: Sequence[LogTrace | Trace], signals: Sequence[str] | None = None) -> LogView:
    """Return a view of one run, or of two laid over each other.

    Args:
        runs: with metrics; the first one's signals are drawn, of the second those that it has too.
        signals: at most six; by default the usual ones.

    Raises:
        MoeproxyError: there are too many runs or signals, or the first run lacks one.
        TraceError: a log has no metric; the error says what it does contain.
    """
    traces = [run if isinstance(run, Trace) else run.trace for run in runs]
    chosen = usual(traces) if signals is None else tuple(signals)
    _check(traces, chosen)
    found = [
        DrawnRun(label, {n: series_of(run, n) for n in chosen if n in trace.signals}, resumes(run), failures(run))
        for label, run, trace in zip(_labels(runs), runs, traces, strict=True)
    ]
    return LogView(tuple(found), chosen, _notes(runs, chosen))


def usual(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return the signals of the first run to show at first; those that the others have too go before."""
    names = traces[0].signals if traces else ()
    order = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    common = [name for name in order if all(name in trace.signals for trace in traces)]
    return tuple(dict.fromkeys([*common, *order]))[:_BY_DEFAULT]


def label_of(run: LogTrace | Trace) -> str:
    """Return the name of a run in a legend."""
    if isinstance(run, Trace):
        return str(run.provenance) if run.provenance.source != "file" else run.provenance.model
    return f"{run.info.name} ({run.info.framework})"


def _labels(runs: Sequence[LogTrace | Trace]) -> list[str]:
    names = [label_of(run) for run in runs]
    return [name if names.index(name) == i else f"{name}, the other" for i, name in enumerate(names)]


def _check(traces: Sequence[Trace], signals: tuple[str, ...]) -> None:
    for what, count, most in (("runs", len(traces), MAX_RUNS), ("signals", len(signals), MAX_SIGNALS)):
        if count > most:
            raise MoeproxyError(f"{count} {what} for one figure", expected=f"at most {most}")
    for name in signals:
        if traces and name not in traces[0].signals:
            raise MoeproxyError(f"the run has no signal {name!r}", expected=f"one of {', '.join(traces[0].signals)}")


def _notes(runs: Sequence[LogTrace | Trace], signals: tuple[str, ...]) -> dict[str, str]:
    if len(runs) < MAX_RUNS:
        return {}
    said = {name: text for name, _, text in (note.partition(": ") for note in overlay_notes(runs[0], runs[1]))}
    return {name: said[name] for name in signals if name in said}


def _row(name: str, run: DrawnRun) -> dict[str, str]:
    series = run.series[name]
    finite = series.finite_S
    low, high, last = (f"{value:.4g}" for value in (finite.min(), finite.max(), finite[-1])) if finite.size else "–––"
    other = ", ".join(f"{count} {kind}" for kind, count in series.counts().items())
    if series.n_replaced:
        other = ", ".join(filter(None, [other, f"{series.n_replaced} replaced"]))
    numbers = {"numbers": f"{finite.size:,}", "smallest": low, "largest": high, "last": last}
    words = {"no number": other or "–", "key": series.key, "definition": series.definition or "canonical"}
    return {"signal": name.replace("_", " "), "run": run.label, **numbers, **words}


def _said(name: str, run: DrawnRun) -> str:
    series = run.series.get(name)
    if series is None:
        return "not logged"
    row = _row(name, run)
    rest = "" if row["no number"] == "–" else f" ({row['no number']})"
    return f"{row['smallest']} to {row['largest']}{rest}" if series.finite_S.size else f"never finite{rest}"
