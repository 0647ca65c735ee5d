"""Reproduces the cause of a failure on a proxy: recorded runs of it in seconds, new ones on request within minutes."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets as widgets
import numpy as np
import pandas as pd

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.places import data_dir
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.pack import load_bench, load_registry
from moeproxy.traces.trace import Trace
from moeproxy.triage.jsonable import sure
from moeproxy.triage.reproduction import Candidate, Reproduction
from moeproxy.view.apps.live_work import LiveWork
from moeproxy.view.apps.log_verdict import Healthy
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Report, Status

if TYPE_CHECKING:
    from moeproxy.lab.sweep_progress import Watch
    from moeproxy.triage.reproduce import ProxyRuns

MINUTES = 5
_KEPT = "stopped. Finished runs are kept: Run them live goes on with what is missing."
_STYLE = {"description_width": "initial"}


@dataclass(frozen=True)
class Failing:
    """The run whose failure is to be reproduced, the healthy runs it was judged by, and its likely causes."""

    run: LogTrace | Trace
    healthy: Healthy
    causes: tuple[str, ...]


class LogReproduce:
    """Two buttons and what came of them.

    Args:
        failing: returns the run at hand; raises when there is none that departs.
        lay_over: called with (model, words) to lay a recorded run of the proxy over the log.
        out: folder of new runs, and of a proxy built for them.
        bench: folder of recorded runs, by default what comes with moeproxy.
        workers: runs at a time.
    """

    def __init__(
        self,
        failing: Callable[[], Failing],
        lay_over: Callable[[str, str], None],
        out: Path,
        *,
        bench: Path | None = None,
        workers: int | None = None,
    ) -> None:
        self._failing, self._lay_over, self._out, self._workers = failing, lay_over, out, workers
        self._bench = bench or data_dir() / "bench"
        self._known: dict[str, ProxyRuns] = {}
        self.result: Reproduction | None = None
        self.status, self.said = Status(""), widgets.HTML()
        self.table = LiveTable(320, wrap=True)
        self.proxy = widgets.Dropdown(description="Proxy", options=proxies_of(self._bench), style=_STYLE)
        self.proxy.layout.width = "220px"
        self.minutes = widgets.BoundedIntText(MINUTES, min=1, max=24 * 60, description="Minutes", style=_STYLE)
        self.minutes.layout.width = "140px"
        self.job = Job(self._recorded, "Reproduce on the proxy", status=self.status, on_done=self._show)
        self.live_job = Job(
            self._live, "Run them live", cancel="Stop", status=self.status, on_done=self._show, cancelled=_KEPT
        )
        self.job.cancel_button.layout.display = "none"  # it takes seconds
        self.overlay = widgets.Button(description="Lay the best match over the log", disabled=True)
        self.overlay.layout.width = "auto"
        self.overlay.on_click(self.status.guard(lambda _: self._overlay()))
        self.widget = self._arrange()

    def clear(self) -> None:
        """Forget the last result: the log is another one."""
        self.result = None
        self.said.value = ""
        self.table.show(pd.DataFrame(), "")
        self.overlay.disabled = True
        if self.job.state != "running" and self.live_job.state != "running":
            self.status.say("")

    def show(self, shown: bool) -> None:
        """Show the buttons, or hide them where nothing departs."""
        self.widget.layout.display = "" if shown else "none"

    def _recorded(self, report: Report) -> Reproduction:
        from moeproxy.triage.reproduce import reproduce  # here: the lab takes seconds to import, and a log needs none

        failing = self._failing()
        known = self._proxy(report)
        report(0.9, "Laying the failing run over them.")
        return reproduce(failing.run, known, failing.healthy)

    def _live(self, report: Report) -> Reproduction:
        """Run the likely faults anew, whether or not runs with them are recorded."""
        from moeproxy.triage.reproduce import Live, reproduce
        from moeproxy.view.apps.live_runs import LiveRuns
        from moeproxy.view.apps.recordings import Recordings

        failing = self._failing()
        label = str(self.proxy.value)
        anew = self._proxy(report).without(failing.causes)
        recordings = Recordings.open(self._bench)
        runs = LiveRuns(recordings.original, self._out, recordings.settings)
        report(0.0, f"Building {label}, if it does not exist yet.")
        runs.build([label])
        (spec,) = runs.specs(label, None, [0], recordings.settings.steps)

        def work(watch: Watch) -> Reproduction:
            live = Live(spec, self._out, float(self.minutes.value), workers=self._workers, watch=watch)
            return reproduce(failing.run, anew, failing.healthy, live=live)

        stopping = partial(self.status.say, "Stopping the runs.")
        return LiveWork(work).follow(report, f"Running {', '.join(failing.causes)} on {label}", stopping=stopping)

    def _proxy(self, report: Report) -> ProxyRuns:
        """Return what is known of the proxy chosen; its runs are read and judged once."""
        from moeproxy.triage.reproduce import ProxyRuns

        label = str(self.proxy.value)
        if label not in self._known:
            report(0.1, f"Reading the recorded runs of {label}.")
            traces = load_bench(self._bench, models=[label], trajectories=False)
            report(0.4, f"Judging {len(traces)} recorded runs of {label}.")
            self._known[label] = ProxyRuns(traces)
        return self._known[label]

    def _show(self, result: Reproduction) -> None:
        self.result = result
        self.said.value = result_html(result)
        self.table.show(candidates_table(result), f"Candidates, ranked again by how {result.model} responds")
        self.overlay.disabled = not any(one.n_recorded for one in result.candidates)
        left = f" No time was left for {', '.join(result.left)}." if result.left else ""
        self.status.say(f"{len(result.candidates)} candidates were laid over the run.{left}")

    def _overlay(self) -> None:
        if self.result is None:
            raise MoeproxyError("nothing was reproduced yet", remedy="press Reproduce on the proxy first")
        best = next(one for one in self.result.candidates if one.n_recorded)
        self._lay_over(self.result.model, f"{best.fault} {best.strength:g} from")
        self.status.say(f"{best.fault} of {self.result.model} lies over the log, in the figure above.")

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")
        first = widgets.Box([self.proxy, self.job.widget, self.overlay], layout=rows)
        second = widgets.Box([self.minutes, self.live_job.widget], layout=rows)
        return widgets.VBox([first, second, self.status.widget, self.said, self.table.widget])


def proxies_of(bench: Path) -> list[str]:
    """Return the labels of the proxies by clustering that have recorded broken runs; none without a registry."""
    try:
        rows = load_registry(bench)
    except TraceError:
        return []
    broken = rows[(rows["method"] == "cluster") & (rows["fault"] != "")]
    return list(dict.fromkeys(map(str, broken["model"])))


def candidates_table(result: Reproduction) -> pd.DataFrame:
    """Return one row a candidate with the numbers behind its place."""
    return pd.DataFrame([_row(place, one) for place, one in enumerate(result.candidates, start=1)])


def _row(place: int, one: Candidate) -> dict[str, str]:
    match = "not run" if np.isnan(one.match) else f"{one.match:.2f}"
    runs = [f"{n} {kind}" for n, kind in ((one.n_recorded, "recorded"), (one.n_live, "new")) if n]
    return {
        "place": str(place),
        "fault": one.fault,
        "by the trace alone": sure(one.confidence),
        "match on the proxy": match,
        "strength": "–" if np.isnan(one.strength) else f"{one.strength:g}",
        "runs": " and ".join(runs) or "–",
        "moves alike": _names(one.agree),
        "moves otherwise": _names(one.differ),
        "score": f"{one.score:.2f}",
    }


def result_html(result: Reproduction) -> str:
    """Return what came of it in a sentence, and how to read the table below."""
    first, *rest = (html.escape(line) for line in (result.sentences[0], *result.notes))
    told = f"<div><b>{first}</b></div>" + "".join(f"<div>{line}</div>" for line in rest)
    how = (
        "A match is the cosine of the two responses over the signals that both log: 1 is the same response, 0 another "
        "one. The score adds it, eightfold, to the logarithm of the confidence."
    )
    return (
        f"<div role='status' aria-live='polite' style='max-width:950px;line-height:1.4'>{told}"
        f"<div>{html.escape(how)}</div></div>"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names) or "–"
