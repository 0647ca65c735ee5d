"""The panel of notebook 04: read anybody's log, see its signals, judge it, reproduce the cause, lay a run over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.places import data_dir
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.reading import read
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.fit import fitted
from moeproxy.view.apps.log_follow import Following, fits
from moeproxy.view.apps.log_mapping import MappingEditor, columns_of
from moeproxy.view.apps.log_pair import PairChooser, shipped
from moeproxy.view.apps.log_reproduce import Failing, LogReproduce
from moeproxy.view.apps.log_source import LogSource
from moeproxy.view.apps.log_text import log_html, notes_html, run_option
from moeproxy.view.apps.log_verdict import LogVerdict
from moeproxy.view.apps.log_zoom import ZoomFigure
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Press, Redraw, Report, Status
from moeproxy.view.figures_log import LEAST_WIDTH_PX
from moeproxy.view.log_onsets import with_onsets
from moeproxy.view.log_view import MAX_SIGNALS, LogView, label_of, log_view, usual

EXAMPLE = "verl_console.log"
"""Log of `data/logs` that is read when none is given."""


@dataclass(frozen=True)
class _Wish:
    """What is to be read, and how."""

    path: Path
    mapping: dict[str, str] | None = None
    step: str | None = None


class LogPanel:
    """A path, what was read from it, its signals in one live figure, a verdict, and another run laid over them.

    Reading goes on in a thread, as judging and following a growing log do; errors stand in the status line. A run that
    departs can be reproduced on a proxy.

    Args:
        path: log that is read at once, by default a shipped one.
        out: folder of uploaded files, of new runs of a proxy, and of one built for them.
        runs: further folders with runs of the lab to lay over a log, beside the recorded ones.

    Example:
        >>> panel = LogPanel("train.log")
        >>> panel  # the last expression of a cell shows it
        >>> panel.settle(); panel.log.trace.values("grad_norm")
    """

    def __init__(
        self, path: str | Path | None = None, *, out: str | Path = "out/logs", runs: Sequence[str | Path] = ()
    ) -> None:
        self.logs: tuple[LogTrace, ...] = ()
        self.view = LogView()
        self._asked = self._has = _Wish(Path())
        self._shown: tuple[Any, ...] | None = None
        self._offered: tuple[Any, ...] | None = None
        self._reproduced: LogTrace | None = None
        self.status, self.summary = Status(), Status("")
        self._redraw = Redraw(self._draw, self.status)
        examples = data_dir() / "logs"
        self.first = Path(path) if path is not None else examples / EXAMPLE
        self.source = LogSource(self.first, examples, Path(out) / "uploads", self.status, self._start)
        self.job = Job(self._read, "Read", status=self.status, on_done=self._done)
        self.read_button = widgets.Button(description="Read", layout=widgets.Layout(width="auto"))
        self.run = _dropdown("Run", "520px")
        self.signals = widgets.SelectMultiple(description="Signals", rows=7, style={"description_width": "initial"})
        self.signals.layout.width = "520px"
        self.follow = widgets.ToggleButton(description="Follow", tooltip="Read on while the log grows")
        self.following = Following(self._take, self.status, self._unfollow)
        self.mapping = MappingEditor()
        self.map = widgets.ToggleButton(description="Map columns", tooltip="Say which column is which signal")
        self.pair = PairChooser([*shipped(), *map(Path, runs)], self.status, self._redraw)
        self.verdict = LogVerdict(self.status, self._redraw)
        self.reproduce = LogReproduce(self._failing, self._lay_over, Path(out) / "proxy")
        self.reproduce.show(False)
        self.about, self.notes = widgets.HTML(), widgets.HTML()
        self.figure = ZoomFigure(self.view, self.status)
        self.table = LiveTable(280, folded=True, wrap=False)
        self._connect()
        self.widget = self._arrange()
        self._start()

    @property
    def log(self) -> LogTrace:
        """The run that is shown.

        Raises:
            TraceError: nothing was read.
        """
        place = self.run.value
        if place is None or place >= len(self.logs):
            raise TraceError("nothing was read", where=self.source.text.value, remedy="see the status line")
        return self.logs[place]

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until the figure shows what the controls say; return whether it does."""
        for press in self._presses:
            press.settle(timeout_s)
        self.job.join(timeout_s)
        parts = (self._redraw, self.verdict, self._redraw, self.figure)  # a verdict is drawn too
        return self.job.state != "running" and all(part.settle(timeout_s) for part in parts)

    def read(self, path: str | Path) -> None:
        """Read another log, as a user would."""
        self.source.text.value = str(path)
        self._start()

    def example(self, name: str) -> LogTrace:
        """Read a shipped example and return its run, as a user would choose it from the list.

        Raises:
            MoeproxyError: there is none of that name.
        """
        known = {label: value for label, value in self.source.example.options if value}
        if name not in known:
            raise MoeproxyError(f"no example {name!r}", expected=f"one of {', '.join(known)}")
        self.read(known[name])
        self.settle()
        return self.log

    def _start(self) -> None:
        """Read what the field says, by its framework's own map."""
        self._begin(_Wish(self.source.path))

    def _apply(self) -> None:
        """Read again with the mapping that the lists say."""
        self._begin(_Wish(self._has.path, self.mapping.mapping(), self.mapping.step_key()))

    def _begin(self, wish: _Wish) -> None:
        if self.job.state == "running":
            raise TraceError(f"{self._asked.path.name} is still being read", remedy="try again when it is done")
        self._asked = wish
        self.follow.value = False
        self.job.start()

    def _read(self, report: Report) -> tuple[LogTrace, ...]:
        wish = self._asked
        self.status.say(f"Reading {wish.path.name}.")
        found = read(wish.path, mapping=wish.mapping, step=wish.step)
        plural = "" if len(found) == 1 else "s"
        self.status.say(f"Read {wish.path.name}: {len(found)} run{plural}.")
        return found

    def _done(self, logs: tuple[LogTrace, ...]) -> None:
        self._has = self._asked
        self._take(logs)

    def _take(self, logs: tuple[LogTrace, ...]) -> None:
        """Show new runs; the one of the same name stays chosen, else the first with metrics is taken."""
        before = self.logs[self.run.value].info.name if self.logs and self.run.value is not None else ""
        names = [log.info.name for log in logs]
        first = next((place for place, log in enumerate(logs) if log.has_metrics), 0)
        self.logs = logs
        options = [(run_option(place + 1, log), place) for place, log in enumerate(logs)]
        if tuple(options) != tuple(self.run.options):
            self.run.options = options
        self.run.value = names.index(before) if before in names else first
        self.pair.others(logs)
        self._redraw()

    def _follow(self, change: Any) -> None:
        if not change["new"]:
            self.following.stop()
            return
        try:
            if self._has == self._asked and not fits(self.logs):
                raise TraceError(f"{self.logs[0].info.container}: it cannot be followed", expected="a text log")
            self._has = wish = self._asked
            self.following.start(wish.path, mapping=wish.mapping, step=wish.step)
        except MoeproxyError:
            self._unfollow()
            raise

    def _unfollow(self) -> None:
        self.follow.value = False

    def _draw(self) -> None:
        log = self.log
        self.about.value = log_html(log)
        self._offer(log)
        self._hide(not log.has_metrics)
        if not log.has_metrics:
            self.view, self._shown = LogView(), None
            self.summary.say(f"No metric in this log; it contains {log.contents}.")
            self.notes.value = ""
            self.table.show(pd.DataFrame(), "")
            self._judged(None)
            return
        other = self.pair.selected()
        runs: list[LogTrace | Trace] = [log] if other is None or other is log else [log, other]
        view = log_view(runs, tuple(self.signals.value))
        if verdict := self.verdict.of(log):
            view = with_onsets(view, verdict.detection)
        self.view = view
        shown = (self._has.path, view.signals, *map(label_of, runs))
        self.figure.show(view, keep_zoom=shown == self._shown)
        self._shown = shown
        self.summary.say(view.describe())
        self.notes.value = notes_html(view.notes)
        self.table.show(view.table(), "Signals")
        self._judged(log)

    def _judged(self, log: LogTrace | None) -> None:
        """Have the run judged, and offer to reproduce what departs; a result of another run goes."""
        self.verdict.ask(log)
        verdict = self.verdict.of(log)
        self.reproduce.show(bool(verdict and verdict.causes))
        if log is not self._reproduced:
            self._reproduced = log
            self.reproduce.clear()

    def _failing(self) -> Failing:
        judged = self.verdict.leading
        if judged is None or not judged.alarmed:
            raise MoeproxyError("no run that departs is shown", remedy="read one, and wait for its verdict")
        named = [(cause.fault, *cause.consequences) for cause in judged.diagnosis.causes]
        return Failing(judged.trace, self.verdict.healthy, tuple(fault for faults in named for fault in faults))

    def _lay_over(self, model: str, words: str) -> None:
        self.pair.choose(model, words)

    def _offer(self, log: LogTrace) -> None:
        """Fill the lists of signals and columns, when they have changed."""
        names = log.trace.signals if log.has_metrics else ()
        offered = (self._has, log.info.name, log.info.framework, names, columns_of(log))
        if offered == self._offered:
            return
        same = self._offered is not None and self._offered[0].path == self._has.path
        self._offered = offered
        kept = [name for name in self.signals.value if name in names] if same else []
        with self.signals.hold_sync():  # a page that has fewer options than numbers of chosen ones fails
            self.signals.options = [(_option(log, name), name) for name in names]
            self.signals.value = tuple(kept or (usual([log.trace]) if names else ()))
        self.mapping.offer(log, self._has.mapping, self._has.step)
        unmapped = not log.has_metrics and log.info.rows > 0
        self.map.value = (same and self.map.value) or log.info.framework == "unknown" or unmapped

    def _hide(self, hidden: bool) -> None:
        """An empty plot says less than the words above it."""
        for widget in (self._figure_box, self.signals, self.pair.widget):
            widget.layout.display = "none" if hidden else ""

    def _connect(self) -> None:
        guard = self.status.guard
        self._presses = (
            Press(self.read_button, self._start, self.status),
            Press(self.mapping.apply, self._apply, self.status),
        )
        for control in (self.run, self.signals):
            control.observe(lambda _: self._redraw(), "value")
        self.follow.observe(guard(self._follow), "value")
        self.map.observe(guard(lambda change: self._show_map(change["new"])), "value")

    def _show_map(self, shown: bool) -> None:
        self.mapping.widget.layout.display = "" if shown else "none"

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        self._figure_box = fitted(self.figure.widget, LEAST_WIDTH_PX)
        self._show_map(False)

        def line(*children: widgets.Widget) -> widgets.Box:
            return widgets.Box(list(children), layout=rows)

        hint = widgets.HTML(f"<div style='line-height:1.4'>Up to {MAX_SIGNALS} signals: hold the control key.</div>")
        return widgets.VBox(
            [
                line(self.source.text, self.read_button, self.source.example, self.source.upload),
                self.status.widget,
                line(self.run, self.follow, self.map),
                self.about,
                self.mapping.widget,
                line(self.signals, hint),
                self.pair.widget,
                self._figure_box,
                self.notes,
                self.summary.widget,
                self.table.widget,
                self.verdict.widget,
                self.reproduce.widget,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _option(log: LogTrace, name: str) -> str:
    key = log.info.keys[name]
    return f"{name.replace('_', ' ')} ({key})" if key != name else name.replace("_", " ")


def _dropdown(name: str, width: str) -> widgets.Dropdown:
    made = widgets.Dropdown(options=[], description=name, style={"description_width": "initial"})
    made.layout.width = width
    return made
