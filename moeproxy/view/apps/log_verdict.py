"""Judges the run that is shown: alone, or beside healthy runs that the reader names."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets

from moeproxy.errors import TraceError
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.attempted import JudgedAttempt, judge_attempts, leading
from moeproxy.triage.diagnose import Diagnosis
from moeproxy.triage.logs import runs_in
from moeproxy.view.apps.log_verdict_text import attempts_html
from moeproxy.view.apps.ui import Debouncer, Press, Status

_WAIT_S = 0.05
Healthy = tuple[LogTrace | Trace, ...]


class LogVerdict:
    """A field for healthy runs, and the verdict on the last run that was asked about.

    Args:
        status: told when a run cannot be judged for a reason that is not its own.
        on_verdict: called without arguments once a verdict is there.
    """

    def __init__(self, status: Status, on_verdict: Callable[[], None]) -> None:
        self._on_verdict, self._status = on_verdict, status
        self._judge = Debouncer(status.guard(self._decide), _WAIT_S)
        self._asked: LogTrace | None = None
        self._done: tuple[LogTrace | None, tuple[JudgedAttempt, ...]] = (None, ())
        self.healthy: Healthy = ()
        self.path = widgets.Text(description="Healthy runs", placeholder="optional: logs or folders, parted by ;")
        self.path.style.description_width, self.path.layout.width = "initial", "520px"
        self.use = widgets.Button(description="Judge beside them", layout=widgets.Layout(width="auto"))
        self._press = Press(self.use, lambda: self.beside(str(self.path.value)), status)
        self.page = widgets.HTML()
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        self.widget = widgets.VBox([widgets.Box([self.path, self.use], layout=rows), self.page])

    @property
    def leading(self) -> JudgedAttempt | None:
        """The attempt that the verdict on the run asked about last is about: the first that departs, else the last.

        None until it is there, or when the run cannot be judged.
        """
        judged = self._done[1] if self._asked is not None and self._done[0] is self._asked else ()
        return leading(judged) if judged else None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Of that attempt."""
        return self.of(self._asked)

    def of(self, log: LogTrace | None) -> Diagnosis | None:
        """Return the verdict on a run, None unless it is the one judged last."""
        found = self.leading if log is self._asked else None
        return None if found is None else found.diagnosis

    def ask(self, log: LogTrace | None) -> None:
        """Judge a run soon, in a thread of its own; nothing happens when it is judged already; None shows nothing."""
        if log is self._asked and log is self._done[0]:
            return
        self._asked = log
        self._judge()

    def beside(self, text: str) -> None:
        """Judge beside the healthy runs of these logs; beside none where the text is empty.

        Raises:
            TraceError: a log cannot be read or holds no metric.
        """
        self.healthy = healthy_runs(text)
        self._done = (None, ())
        self._judge()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the run asked about is judged; return whether it is."""
        return self._press.settle(timeout_s) and self._judge.settle(timeout_s)

    def _decide(self) -> None:
        log = self._asked
        if log is None:
            self._done, self.page.value = (None, ()), ""
            return
        self._done, self.page.value = (log, ()), ""
        judged = judge_attempts(log, self.healthy)
        self._done, self.page.value = (log, judged), attempts_html(judged)
        self._on_verdict()


def healthy_runs(text: str) -> Healthy:
    """Return every run of the logs named in a text: paths, folders or patterns, parted by semicolons.

    Raises:
        TraceError: nothing fits a pattern, a log cannot be read, or one holds no metric.
    """
    found: list[LogTrace | Trace] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        paths = sorted(glob.glob(str(Path(part).expanduser()))) if glob.has_magic(part) else [part]
        if not paths:
            raise TraceError("no file of this pattern", where=part, expected="logs of healthy runs")
        for path in paths:
            found += [run for _, run in runs_in(Path(path).expanduser())]
    for run in found:
        if isinstance(run, LogTrace) and not run.has_metrics:
            raise TraceError(f"no metric in it; it contains {run.contents}", where=run.info.name)
    return tuple(found)
