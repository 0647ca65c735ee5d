"""The panel of notebook 05: a failure, its candidate remedies, and what each does: before and after, kept or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import MoeproxyError
from moeproxy.lab.remedies import candidates
from moeproxy.triage.diagnose import Diagnosis, diagnose
from moeproxy.triage.remedy_recorded import RemedyStudy
from moeproxy.triage.remedy_result import Remedy, Trial
from moeproxy.view.apps.fit import fitted
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.live_work import LiveWork
from moeproxy.view.apps.remedy_figure import (
    LEAST_WIDTH_PX,
    RemedyState,
    describe,
    layout_values,
    remedy_figure,
    titles,
    trial_table,
    values,
)
from moeproxy.view.apps.remedy_runs import Asked, Failure, RemedyRuns
from moeproxy.view.apps.remedy_text import cause_options, failure_html, fault_option, remedy_table
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Debouncer, Job, Redraw, Report, Status

MINUTES = 5
_KEPT = "stopped. What is finished is kept and shown: Try live goes on with what is missing."
_NONE = ""


class RemedyPanel:
    """A failure, the remedies of its cause, one live figure, and a job that tries them in a closed loop.

    What the study recorded is shown at once; what is tried here takes its place. Everything made is kept in a folder
    and found again by a later kernel.

    Args:
        fault_id: fault shown at first; by default the first of which trials are recorded.
        model: by default the proxy: there a remedy is tried first.
        out: folder of new runs, results, and of a proxy built for them.
        study: recorded trials, opened or their folder; by default those that come with moeproxy.
        bench: packs of recorded runs, by default those that come with moeproxy.

    Raises:
        MoeproxyError: there are no recorded runs or trials, or none of this fault or model.

    Example:
        >>> panel = RemedyPanel("kl_explosion")
        >>> panel  # the last expression of a cell shows it
        >>> panel.settle(); panel.trials[0].accepted
    """

    def __init__(
        self,
        fault_id: str | None = None,
        *,
        model: str | None = None,
        out: str | Path = "out/remedy",
        study: RemedyStudy | str | Path | None = None,
        bench: str | Path | None = None,
    ) -> None:
        known = RemedyStudy.load(study) if isinstance(study, str | Path) else study
        self.runs = RemedyRuns(Path(out), bench=Path(bench) if bench else None, study=known)
        self.status, self.summary = Status(), Status()
        self.about = widgets.HTML()
        self.table, self.remedies = LiveTable(320), LiveTable(260, folded=True)
        self._redraw, self._judge = Redraw(self._draw, self.status), Debouncer(self.status.guard(self._diagnose), 0.3)
        self._diagnoses: dict[tuple[str, str, int], Diagnosis] = {}
        self._live: LiveWork[Remedy] | None = None
        self._filling, self._own = threading.RLock(), False
        self._make_controls(fault_id, model)
        self.state = self._read()
        self.figure = LiveFigure(remedy_figure(self.state))
        self.job = Job(self._try, "Try live", cancel="Stop", status=self.status, cancelled=_KEPT)
        self._tell()
        self._connect()
        self._judge()
        self.widget = self._arrange()

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until the panel shows what the controls say, diagnosis included; return whether it does."""
        return all(part.settle(timeout_s) for part in (self._redraw, self._judge, self._redraw))

    def choose(self, fault_id: str, model: str | None = None, remedy: str | None = None) -> None:
        """Choose a failure, and the remedy that is shown, as a user would.

        Raises:
            MoeproxyError: it is not recorded, or was not tried.
        """
        for box, value in ((self.model, model), (self.fault, fault_id)):
            if value is not None and value != box.value:
                _choose(box, value)
        self.settle()
        if remedy is not None:
            _choose(self.shown, remedy)
            self.settle()

    @property
    def asked(self) -> Asked:
        """The failure that is chosen."""
        return Asked(str(self.model.value), str(self.fault.value), int(self.seed.value or 0), str(self.cause.value))

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What was tried against it: made here, else recorded, in the order in which remedies are tried."""
        asked = self.asked
        recorded = self.runs.recorded(asked)
        every = {trial.remedy: trial for trial in recorded.trials} if recorded else {}
        every |= self.runs.made(asked)
        order = [name for name in self._candidates() if name in every]
        return tuple(every[name] for name in (*order, *(name for name in every if name not in order)))

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What triage says of the broken run, None until it is there."""
        asked = self.asked
        return self._diagnoses.get((asked.model, asked.fault, asked.seed))

    def _candidates(self) -> tuple[str, ...]:
        return candidates(self.asked.treated_for)

    def _read(self) -> RemedyState:
        asked, failure = self.asked, self._failure()
        trials, shown = self.trials, str(self.shown.value)
        live = self._live  # another thread sets it
        growing = self.runs.growing(live.progress) if live else None
        if growing is not None and self.following.value:
            shown = growing.provenance.remedies[0][0]
        made = shown in self.runs.made(asked)
        whole = self.runs.treated(asked, failure.onset, shown, made=made) if shown else None
        recorded = self.runs.recorded(asked)
        before, margin = (trials[0].before, trials[0].margin) if trials else (None, 0.0)
        if recorded and not trials:
            before, margin = recorded.before, recorded.margin
        unfinished = growing is not None and growing.provenance.remedies[0][0] == shown and not made
        return RemedyState(
            *(asked.model, asked.fault, asked.seed, failure.onset, failure.twin, failure.broken),
            treated=growing if unfinished else whole,
            shown=shown,
            growing=unfinished,
            before=before,
            margin=margin,
            trials=trials,
        )

    def _failure(self) -> Failure:
        return self.runs.failure(self.asked)

    def _draw(self) -> None:
        self._offer_shown()
        self.state = state = self._read()
        self.figure.show(values(state), layout_values(state), titles(state))
        self._tell()
        self._judge()

    def _tell(self) -> None:
        """Say in words and tables what the figure shows."""
        asked = self.asked
        self.about.value = failure_html(asked.fault, self.diagnosis)
        self.summary.say(describe(self.state))
        elsewhere = [one for one in self._elsewhere(asked) if one.trials]
        beside = (elsewhere[0].trials, elsewhere[0].model) if elsewhere else ((), "")
        self.table.show(trial_table(self.state.trials, *beside), f"What was tried against {asked.fault}")
        caption = f"Candidate remedies for {asked.treated_for}, in the order in which they are tried"
        self.remedies.show(remedy_table(self._candidates()), caption)

    def _elsewhere(self, asked: Asked) -> list[Remedy]:
        """Return what the study did on the other models with what was kept."""
        if asked.treated_for != asked.fault:
            return []
        others = [label for label in self.runs.study.models if label != asked.model]
        found = [self.runs.study.found(label, asked.fault, asked.seed) for label in others]
        return [one for one in found if one is not None]

    def _diagnose(self) -> None:
        """Judge the broken run beside healthy ones, once, and offer its causes."""
        asked = self.asked
        key = (asked.model, asked.fault, asked.seed)
        if key not in self._diagnoses:
            failure = self.runs.failure(asked)
            self._diagnoses[key] = diagnose(failure.broken, failure.healthy)
            self._redraw()
        self._offer_causes()

    def _try(self, report: Report) -> Remedy:
        asked, minutes = self.asked, float(self.minutes.value)
        names = tuple(name for name in self._candidates() if name in self.which.value)
        if not names:
            raise MoeproxyError("no remedy is chosen", expected="one or more of the list Try these")
        said = [f"Preparing the runs of {asked.fault} on {asked.model}"]
        report(0.0, f"{said[-1]}; a proxy is built if it does not exist yet.")

        def told(_: object, trial: Trial) -> None:
            said.append(f"{trial.remedy} {trial.words.partition(':')[0]}; trying what is next")
            self._redraw()

        self._live = LiveWork(lambda watch: self.runs.treat(asked, names, minutes, watch, told))
        try:
            stopping = partial(self.status.say, "Stopping the runs.")
            found = self._live.follow(report, lambda: said[-1], look=self._redraw, stopping=stopping)
        finally:
            self._live = None
            self._redraw()
        self.settle()
        left = f" Not tried: {', '.join(found.not_tried)}." if found.not_tried else ""
        self.status.say(f"{found!r}.{left}")
        return found

    def _make_controls(self, fault_id: str | None, model: str | None) -> None:
        self.model = _dropdown("Model", [(label, label) for label in self.runs.models], "230px")
        if model is not None:
            _choose(self.model, model)
        self.fault = _dropdown("Failure", self._fault_options(), "520px")
        if fault_id is not None:
            _choose(self.fault, fault_id)
        self.seed = _dropdown("Seed", self._seed_options(), "120px")
        self.cause = _dropdown("Treat it for", cause_options(str(self.fault.value), None), "330px")
        self.shown = _dropdown("Show", self._shown_options(), "430px")
        self._show_best()
        self.which = widgets.SelectMultiple(description="Try these", rows=5, style={"description_width": "initial"})
        self.which.layout.width = "330px"
        self._offer_which()
        self.minutes = widgets.BoundedIntText(MINUTES, min=1, max=24 * 60, description="Minutes")
        self.minutes.style.description_width, self.minutes.layout.width = "initial", "140px"
        self.following = widgets.Checkbox(value=True, description="Show the run that is being made", indent=False)

    def _fault_options(self) -> list[tuple[str, str]]:
        model, study = str(self.model.value), self.runs.study
        tried = {one.cause: len(one.trials) for one in (*study.originals, *study.proxies) if one.model == model}
        return [(fault_option(name, tried.get(name, 0)), name) for name in self.runs.faults(model)]

    def _seed_options(self) -> list[tuple[str, int]]:
        seeds = self.runs.seeds(str(self.model.value), str(self.fault.value))
        return [(str(seed), seed) for seed in seeds]

    def _shown_options(self) -> list[tuple[str, str]]:
        return [("no remedy", _NONE), *((f"{t.remedy} ({t.words.partition(':')[0]})", t.remedy) for t in self.trials)]

    def _connect(self) -> None:
        changes = {self.model: self._another_model, self.fault: self._another, self.seed: self._refit}
        for box, act in (changes | {self.cause: self._refit, self.shown: self._redraw}).items():
            box.observe(self.status.guard(lambda _, act=act: None if self._own else act()), "value")

    def _another_model(self) -> None:
        self._refill(self.fault, self._fault_options())
        self._another()

    def _another(self) -> None:
        """Another failure: its seeds, what it is treated for, and the best of what was tried."""
        self._refill(self.seed, self._seed_options())
        self._refill(self.cause, cause_options(str(self.fault.value), self.diagnosis), first=True)
        self._refit()

    def _refit(self) -> None:
        self._offer_which()
        self._refill(self.shown, self._shown_options())
        self._show_best()
        self._redraw()

    def _offer_causes(self) -> None:
        self._refill(self.cause, cause_options(str(self.fault.value), self.diagnosis))

    def _offer_which(self) -> None:
        names = self._candidates()
        if tuple(value for _, value in self.which.options) != names:
            with self.which.hold_sync():
                self.which.options = [(name.replace("_", " "), name) for name in names]
                self.which.value = names

    def _offer_shown(self) -> None:
        """Trials come while runs are made; what is shown stays."""
        self._refill(self.shown, self._shown_options())

    def _show_best(self) -> None:
        kept = [trial for trial in self.trials if trial.accepted and trial.after]
        best = min(
            kept,
            key=lambda trial: (trial.kind != "mitigation", trial.after.value if trial.after else 1.0),
            default=None,
        )
        if best is not None:
            self.shown.value = best.remedy

    def _refill(self, box: widgets.Dropdown, options: list[tuple[str, Any]], *, first: bool = False) -> None:
        """Offer other options; the value stays where it is among them. Nobody is told: the caller goes on."""
        if tuple(box.options) == tuple(options):
            return
        with self._filled(), box.hold_sync():
            before, known = box.value, [value for _, value in options]
            box.options = options
            box.value = before if before in known and not first else known[0]

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """While this is held, changes of the controls are the panel's own."""
        with self._filling:
            self._own = True
            try:
                yield
            finally:
                self._own = False

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 20px")

        def line(*children: widgets.Widget) -> widgets.Box:
            return widgets.Box(list(children), layout=rows)

        return widgets.VBox(
            [
                line(self.model, self.fault, self.seed),
                self.about,
                line(self.cause, self.shown),
                self.remedies.widget,
                fitted(self.figure.widget, LEAST_WIDTH_PX),
                self.summary.widget,
                self.table.widget,
                line(self.which, widgets.VBox([line(self.minutes, self.job.widget), self.following])),
                self.status.widget,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _first_shown(trial: Trial) -> tuple[bool, float]:
    """Sort mitigations before repairs, which prove the diagnosis only, and then by severity."""
    return trial.kind != "mitigation", trial.after.value if trial.after else 1.0


def _choose(box: widgets.Dropdown, value: Any) -> None:
    known = [known for _, known in box.options]
    if value not in known:
        raise MoeproxyError(f"{box.description}: no {value!r}", expected=f"one of {', '.join(map(str, known))}")
    box.value = value


def _dropdown(name: str, options: list[tuple[str, Any]], width: str) -> widgets.Dropdown:
    made = widgets.Dropdown(options=options, description=name, style={"description_width": "initial"})
    made.layout.width = width
    return made
