"""The panel of notebook 03: choose a fault, see recorded runs of original and proxy, run it live, read the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import LabError, MoeproxyError
from moeproxy.lab.faults import check_injection, fault
from moeproxy.lab.settings import Injection, RunSpec
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.fault_controls import FaultControls
from moeproxy.view.apps.fault_figure import (
    LEAST_WIDTH_PX,
    SLOTS,
    FaultState,
    describe,
    fault_figure,
    layout_values,
    panel_titles,
    signal_table,
    values,
)
from moeproxy.view.apps.fault_runs import Asked, gather
from moeproxy.view.apps.fault_study import study_verdict
from moeproxy.view.apps.fault_text import fault_html, verdict_html
from moeproxy.view.apps.fault_verdict import Verdict, judge
from moeproxy.view.apps.fit import fitted
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.live_runs import Found, LiveRuns
from moeproxy.view.apps.live_work import LiveWork
from moeproxy.view.apps.recordings import HEALTHY, Recordings
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Debouncer, Job, Redraw, Report, Status

_KEPT = "stopped. Finished runs, and the steps of the others, are kept: Run live goes on with what is missing."


class FaultPanel:
    """Controls, one live figure, a verdict with controls, and a job that trains what is asked for.

    What is shown are recorded runs, and live ones in their place once there are any. A figure is drawn from what lies
    on disk: a panel opened after a restart of the kernel finds every finished run, and every step of the others.

    Args:
        fault_id: fault shown at first; by default the first that is recorded.
        out: folder of live runs and of the proxies built for them.
        recordings: recorded runs, opened or their folder; by default those that come with moeproxy.
        models: labels to choose from beside the original; by default all that are recorded, clustering first.
        proxies: directories of proxies that exist already, by label; others are built when they are first trained.
        workers: training processes at a time, by default one a core.

    Raises:
        FaultError: no such fault.
        MoeproxyError: there are no recorded runs.

    Example:
        >>> panel = FaultPanel("update_freeze")
        >>> panel  # the last expression of a cell shows it
        >>> panel.controls.choose("kl_sign"); panel.settle(); panel.verdict.text
    """

    def __init__(
        self,
        fault_id: str | None = None,
        *,
        out: str | Path = "out/lab",
        recordings: Recordings | str | Path | None = None,
        models: Sequence[str] | None = None,
        proxies: Mapping[str, Path] | None = None,
        workers: int | None = None,
    ) -> None:
        self.recordings = recordings if isinstance(recordings, Recordings) else Recordings.open(recordings)
        self.live = LiveRuns(self.recordings.original, Path(out), self.recordings.settings, proxies=proxies)
        self._workers = workers
        self.summary, self.status = Status(), Status()
        self.about, self.answer = widgets.HTML(), widgets.HTML(layout=widgets.Layout(max_width="950px"))
        self.table, self.verdict_table = LiveTable(wrap=False), LiveTable(300, wrap=False)
        self.verdict = Verdict(("It is being computed.",))
        self._redraw, self._judge = Redraw(self._draw, self.status), Debouncer(self.status.guard(self._decide), 0.3)
        self._judged: tuple[Any, ...] | None = None
        first = fault_id or next(iter(self.recordings.faults()), "update_freeze")
        labels = self._labels() if models is None else self._checked(models)
        self.controls = FaultControls(self.recordings, first, labels, self.status, self._redraw)
        self.state = self._read()
        self.figure = LiveFigure(fault_figure(self.state))
        self.job = Job(self._train, "Run live", cancel="Stop", status=self.status, cancelled=_KEPT)
        self._tell()
        self.answer.value = verdict_html(self.verdict.sentences)
        self._judge()
        self.widget = self._arrange()

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until figure and verdict show what the controls say; return whether they do."""
        return self._redraw.settle(timeout_s) and self._judge.settle(timeout_s)

    def _labels(self) -> tuple[str, ...]:
        others = [model for model in self.recordings.models if model.label != "original"]
        return tuple(m.label for m in sorted(others, key=lambda m: (m.method != "cluster", -m.n_experts, m.label)))

    def _checked(self, models: Sequence[str]) -> tuple[str, ...]:
        recorded = {model.label for model in self.recordings.models}
        lost = [label for label in models if label not in recorded and not self.live.trainable(label)]
        if lost or not set(models) - {"original"}:
            raise MoeproxyError(
                f"no model {lost[0]!r}" if lost else f"models {list(models)}: no proxy among them",
                expected=f"proxies, of {', '.join(sorted(recorded - {'original'}))} or one to be built (METHOD-COUNT)",
            )
        return tuple(label for label in dict.fromkeys(models) if label != "original")

    def _read(self) -> FaultState:
        asked = self.controls.asked()
        found = self._found(asked)
        runs = [gather(asked, m, self._recorded(asked, m), found.finished, found.growing) for m in asked.models[:SLOTS]]
        return FaultState(asked, tuple(runs))

    def _recorded(self, asked: Asked, model: str) -> tuple[Trace, ...]:
        known = self.recordings
        return (*known.recorded(None, 0.0, model), *known.recorded(asked.fault, asked.strength, model))

    def _found(self, asked: Asked) -> Found:
        return self.live.found(self._specs(asked)) if asked.live else Found()

    def _specs(self, asked: Asked) -> list[RunSpec]:
        """Return the live runs of the question: first what is broken, seed by seed, then the healthy twins."""
        injections = {seed: Injection(asked.fault, asked.strength, onset) for seed, onset in asked.onsets.items()}
        runs = [(seed, broken) for broken in (True, False) for seed in asked.seeds]
        return [
            spec
            for seed, broken in runs
            for label in asked.models
            for spec in self.live.specs(label, injections[seed] if broken else None, [seed], asked.steps)
        ]

    def _draw(self) -> None:
        self.state = state = self._read()
        self.figure.show(values(state), layout_values(state), panel_titles(state))
        self._tell()
        self._judge()

    def _tell(self) -> None:
        """Say in words and in a table what the figure shows."""
        state, asked = self.state, self.state.asked
        self.about.value = fault_html(fault(asked.fault))
        self.summary.say(describe(state) + self._offer(asked))
        self.table.show(signal_table(state), "Means from the onset on")

    def _offer(self, asked: Asked) -> str:
        if any(runs.broken for runs in self.state.runs):
            return ""
        strengths = self.recordings.strengths(asked.fault)
        known = f"at strength {' and '.join(f'{value:g}' for value in strengths)}" if strengths else "not at all"
        return f" {asked.fault} is recorded {known}, not as asked for here: press Run live to train it."

    def _decide(self) -> None:
        """Compare anew, unless nothing that decides it has changed."""
        asked, found = self.state.asked, self._found(self.state.asked)
        key = (repr(asked), tuple(str(trace.provenance) for trace in found.finished))
        if key == self._judged:
            return
        self.verdict = self._from_study(asked, found) or self._compared(asked, found)
        self._judged = key
        self.answer.value = verdict_html(self.verdict.sentences)
        self.verdict_table.show(self.verdict.rows, "Does the proxy show the same failure?")

    def _from_study(self, asked: Asked, found: Found) -> Verdict | None:
        """Return what the study of the recorded runs says, where it scored just these."""
        known = self.recordings
        if found.finished or known.study is None:
            return None
        return study_verdict(known.study, asked, known.level(asked.fault, asked.strength))

    def _compared(self, asked: Asked, found: Found) -> Verdict:
        labels = [model.label for model in self.recordings.models]
        healthy, broken = [], []
        for label in dict.fromkeys((*asked.models, *labels)):
            healthy += self.recordings.recorded(None, 0.0, label)
            broken += self.recordings.recorded(asked.fault, asked.strength, label)
        healthy += [trace for trace in found.finished if trace.provenance.healthy]
        broken += [trace for trace in found.finished if not trace.provenance.healthy]
        return judge(asked, healthy, broken, lambda onset, seeds: self._others(asked, onset, seeds))

    def _others(self, asked: Asked, onset: int, seeds: tuple[int, ...]) -> Iterable[Trace]:
        """Return the original's recorded runs with other faults that began at the same step with the same seeds."""
        rows = self.recordings.index
        rows = rows.loc[(rows["model"] == "original") & (rows["fault"] != HEALTHY) & (rows["fault"] != asked.fault)]
        rows = rows.loc[(rows["onset"] == onset) & rows["seed"].isin(seeds)]
        for name in rows["fault"].unique():
            strongest = self.recordings.strengths(name)[-1]
            if all(self.recordings.onsets(name, strongest).get(seed) == onset for seed in seeds):
                found = self.recordings.recorded(name, strongest, "original")
                yield from (trace for trace in found if trace.provenance.seed in seeds)

    def _train(self, report: Report) -> list[Trace]:
        asked = self.controls.asked()
        for onset in asked.by_onset:
            check_injection(Injection(asked.fault, asked.strength, onset), asked.steps, settings=self.live.settings)
        if lost := [label for label in asked.models if not self.live.trainable(label)]:
            raise LabError(f"{lost[0]!r} is recorded only", remedy="choose another proxy to train live")
        self.controls.shown.value = True
        report(0.0, "Building proxies that do not exist yet.")
        self.live.build(asked.models)
        traces = self._follow(asked, report)
        self.settle()
        self.status.say(f"{len(traces)} live runs are finished; the verdict is computed from them.")
        return traces

    def _follow(self, asked: Asked, report: Report) -> list[Trace]:
        """Train in a thread of its own, and redraw while it goes on."""
        specs = self._specs(asked)
        live = LiveWork(lambda watch: self.live.train(specs, watch, workers=self._workers))
        stopping = partial(self.status.say, "Stopping the runs.")
        return live.follow(report, f"Training {asked.fault}", look=self._redraw, stopping=stopping)

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")

        def line(*children: widgets.Widget) -> widgets.Box:
            return widgets.Box(list(children), layout=rows)

        box = self.controls
        return widgets.VBox(
            [
                line(box.family, box.fault),
                self.about,
                line(box.strength, box.onset, box.as_recorded),
                line(box.seeds, box.proxy, box.second, box.shown),
                line(box.steps, self.job.widget),
                self.status.widget,
                fitted(self.figure.widget, LEAST_WIDTH_PX),
                self.summary.widget,
                self.table.widget,
                self.answer,
                self.verdict_table.widget,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)
