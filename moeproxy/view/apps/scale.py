"""The panel of notebook 06: what the chosen and the hottest rank of a cluster hold, for original and proxy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import ScaleError
from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.proxy.hardware import DEVICES, Device
from moeproxy.proxy.shape import ModelShape
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.estimate import estimate
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.routing import Routing
from moeproxy.view.apps.fit import fitted
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.number import NumberControl
from moeproxy.view.apps.scale_settings import ROUTINGS, Case, Settings
from moeproxy.view.apps.scale_text import PLANS, advice_html, emulated_table, planned
from moeproxy.view.apps.scale_work import Emulations, Latest
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.apps.ui import Job, Redraw, Report, Status
from moeproxy.view.figures_scale import Bar, Course, ScaleView, bars_title, courses_title, scale_figure, shapes, values

MODELS: Mapping[str, Mapping[str, Any]] = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "DeepSeek-V3": DEEPSEEK_V3}
SLICE = 4
"""Layers that are emulated after every move: seconds, where the whole depth takes a minute."""
_LEAST_PX = 700


class ScalePanel:
    """Controls, one live figure, tables, and a job that emulates ranks op by op.

    After a move the bars follow at once, by the planner's sum; then a slice of a few layers is emulated in the
    background, the latest settings only. *Emulate the whole depth* takes a minute and can be cancelled.

    Args:
        model: one of the names of `models`.
        models: config by name; by default two published ones.
        world, ep, rank: ranks in all, those over which experts are spread, the one looked at.
        sequences, tokens: of a micro-batch on each rank.
        n_keep: experts a layer of the proxy; three eighths of the original's by default.
        routing: one of `ROUTINGS`.
        load: for the skewed routing, rows of the hot rank in percent of the mean.
        checkpointing: recompute activations.
        on: device type, a key of `DEVICES`.
        own: routing of the models by name ("original", "proxy") instead of the testbed's recorded one.
        follow: emulate a slice after every move.

    Raises:
        ScaleError: an unknown model or device.

    Example:
        >>> panel = ScalePanel(world=1024, ep=16)
        >>> panel  # the last expression of a cell shows it
        >>> panel.choose(load=400, routing="skewed"); panel.settle(); panel.view.describe()
    """

    def __init__(
        self,
        model: str = "Qwen3-30B-A3B",
        *,
        models: Mapping[str, Mapping[str, Any]] = MODELS,
        world: int = 1024,
        ep: int = 16,
        rank: int = 0,
        sequences: int = 1,
        tokens: int = 4096,
        n_keep: int | None = None,
        routing: str = "balanced",
        load: int = 400,
        checkpointing: bool = False,
        on: str = "H100",
        own: Mapping[str, Routing] | None = None,
        follow: bool = True,
    ) -> None:
        _check({"model": (model, models), "device type": (on, DEVICES), "routing": (routing, ROUTINGS)})
        self.models, self.own = dict(models), own
        self.status, self.summary, self.advice = Status(), Status(""), widgets.HTML()
        self.emulated, self.planner = LiveTable(300), LiveTable(330)
        self.emulations = Emulations()
        self._cases: list[Case] = []
        self._lock = threading.RLock()
        self._redraw = Redraw(self._draw, self.status)
        self.numbers = self._numbers(world, ep, rank, sequences, tokens, load, model, n_keep)
        self.model = _choice("Model", [(name, name) for name in self.models], model)
        self.on = _choice("Device", [(f"{one.name}, {one.memory_gib:g} GiB", one.name) for one in DEVICES.values()], on)
        self.routing = _choice("Routing", [(text, name) for name, text in ROUTINGS.items()], routing)
        self.plan = _choice("RL layout of the planner", [(name, name) for name in PLANS], next(iter(PLANS)))
        self.checkpointing = _tick("Recompute activations", checkpointing)
        self.follow = _tick("Emulate a slice after every move", follow)
        self.job = Job(self._whole, "Emulate the whole depth", status=self.status, on_done=self._show)
        self._slices = Latest(self._slice, self.status)
        self.view = ScaleView()
        self.figure = LiveFigure(scale_figure(self.view))
        self._connect()
        self.widget = self._arrange()
        self._redraw()

    @property
    def settings(self) -> Settings:
        """What the controls say."""
        name, routing = str(self.model.value), str(self.routing.value)
        chosen: dict[str, Any] = {"routing": routing, "checkpointing": self.checkpointing.value, "own": self.own}
        chosen |= {key: control.value for key, control in self.numbers.items()}
        return Settings(name, self.models[name], **chosen)

    def choose(self, **wanted: Any) -> None:
        """Set controls by name, as a user would.

        Args:
            wanted: `model`, `on`, `routing`, `plan`, `checkpointing`, or a number: `world`, `ep`, `rank`, `sequences`,
                `tokens`, `load`, `n_keep`.
        """
        for name, value in wanted.items():
            if name in self.numbers:
                self.numbers[name].choose(value)
            else:
                getattr(self, name).value = value

    def settle(self, timeout_s: float = 300.0) -> bool:
        """Wait until figure and emulations are those of the controls; return whether they are."""
        drawn = self._redraw.settle(timeout_s) and self._slices.settle(timeout_s)
        return drawn and self.job.join(timeout_s) != "running"

    def found(self, model: str = "original", *, hottest: bool = True) -> Emulation:
        """Return the emulation that is shown for a rank.

        Raises:
            ScaleError: there is none yet for these settings.
        """
        courses = [] if self.view.stale else self.view.courses
        ranks = [one for one in courses if one.model == model]
        # Where the chosen rank is the hottest, it stands for both.
        chosen = next((one for one in ranks if one.hottest == hottest), ranks[0] if ranks else None)
        if chosen is None:
            raise ScaleError("not emulated yet", remedy="call settle(), and see the status line")
        return chosen.emulation

    def _numbers(self, *first: int | str | None) -> dict[str, NumberControl]:
        world, ep, rank, sequences, tokens, load, model, n_keep = first
        counts = GRPOProgram(self.models[str(model)], prompt=1, completion=1).possible_counts
        powers = [2**power for power in range(14)]
        rows: dict[str, tuple[str, list[int], Any]] = {
            "world": ("Ranks in all", powers[1:], world),
            "ep": ("Expert-parallel ranks", powers[:9], ep),
            "rank": ("Rank looked at", [0, *powers[:10]], rank),
            "sequences": ("Sequences a rank", powers[:7], sequences),
            "tokens": ("Tokens a sequence", powers[8:], tokens),
            "load": ("Hot rank's load, %", [100, 150, 200, 300, 400, 600, 800], load),
            "n_keep": ("Experts kept", counts, n_keep or _three_eighths(counts)),
        }
        return {
            key: NumberControl(
                name, options, value, self.status, self._redraw, least=0
            )  # refused where 0 is impossible, not changed
            for key, (name, options, value) in rows.items()
        }

    def _other_model(self) -> None:
        counts = GRPOProgram(self.settings.config, prompt=1, completion=1).possible_counts
        self.numbers["n_keep"].offer(counts, _three_eighths(counts))
        self._redraw()

    def _draw(self) -> None:
        try:
            cases = self.settings.cases()
        except Exception:
            self._refused()
            raise
        with self._lock:
            self._cases = cases
        self._show()
        if self.follow.value:
            self._slices.ask(cases)  # also where all is known: what is under way is not wanted any more

    def _refused(self) -> None:
        """Take back what was said of the settings before: it does not hold for what the controls say now."""
        with self._lock:
            self._cases = []
            self.view = replace(self.view, stale=True, refused=True)
        self._put(self.view)
        self.summary.say("")
        self.advice.value = ""

    def _slice(self, cases: list[Case], wanted: Callable[[], bool]) -> None:
        """Emulate the slice; the status line of a refusal is left alone."""
        if self.emulations.make(cases, SLICE, self._say, wanted):
            self._show()
            self._say(1.0, "Ready.")

    def _say(self, _fraction: float, words: str) -> None:
        if not self.status.is_error:
            self.status.say(words)

    def _whole(self, report: Report) -> None:
        self._redraw.settle()
        with self._lock:
            cases = self._cases
        if not cases:
            cases = self.settings.cases()  # refused: says so again
        self.emulations.make(cases, None, report, lambda: True)
        self.status.say(f"Emulated all {cases[0].program.n_layers} layers.")

    def _show(self, _done: Any = None) -> None:
        """Draw what is known about the ranks asked for last: in the figure, in words and in tables."""
        if not self._cases:
            return
        with self._lock:
            cases, on = self._cases, DEVICES[str(self.on.value)]
            whole = all(self.emulations.get(case, None) for case in cases)
            layers = None if whole else SLICE
            pairs = [(case.found(made.rank), made) for case in cases if (made := self.emulations.get(case, layers))]
            courses = [Course(case.label, case.model, case.hottest, made) for case, made in pairs]
            fresh = len(courses) == len(cases)
            self.view = ScaleView(
                bars=[self._bar(case) for case in cases],
                courses=courses if fresh else self.view.courses,
                device=on.name,
                room_gib=on.memory_gib,
                depth=_depth(cases[0], layers) if fresh else self.view.depth,
                stale=not fresh,
            )
            self._put(self.view)
            self.summary.say(self.view.describe())
            self.advice.value = advice_html(self.view, cases)
            if fresh:
                table = emulated_table(courses, [case for case, _ in pairs], layers, on)
                self.emulated.show(table, f"Emulated: {self.view.depth}")
            self._show_plan(on)

    def _show_plan(self, on: Device) -> None:
        settings, plan = self.settings, str(self.plan.value)
        table = planned(settings, ModelShape.of(settings.config), plan, on)
        self.planner.show(table, f"Fewest {on.name} for RL with {settings.name}: {plan}")

    def _bar(self, case: Case) -> Bar:
        if made := self.emulations.get(case, None):
            return Bar(case.found(made.rank).label, dict(made.peak), True, case.model, case.hottest)
        summed = estimate(case.program, case.layout.world, case.layout.ep, case.load())
        return Bar(case.label, summed.peak, False, case.model, case.hottest)

    def _put(self, view: ScaleView) -> None:
        with self.figure.change() as figure:
            for trace, new in zip(figure.data, values(view), strict=True):
                trace.update(new, overwrite=False)
            figure.layout.annotations[0].text = bars_title(view)
            figure.layout.annotations[1].text = courses_title(view)
            figure.layout.shapes = shapes(view)

    def _connect(self) -> None:
        for control in (self.on, self.routing, self.plan, self.checkpointing, self.follow):
            control.observe(lambda _: self._redraw(), "value")
        self.model.observe(self.status.guard(lambda _: self._other_model()), "value")

    def _arrange(self) -> widgets.VBox:
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 28px")

        def line(*children: Any) -> widgets.Box:
            return widgets.Box(list(children), layout=rows)

        return widgets.VBox(
            [
                line(self.model, self.on),
                line(*(control.widget for control in self.numbers.values())),
                line(self.routing, self.checkpointing, self.follow),
                self.status.widget,  # beside the controls: a refusal below the figure would not be seen
                fitted(self.figure.widget, _LEAST_PX),
                self.summary.widget,
                self.advice,
                line(self.job.widget),
                self.emulated.widget,
                self.plan,
                self.planner.widget,
            ]
        )

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _check(asked: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    for what, (name, known) in asked.items():
        if name not in known:
            raise ScaleError(f"unknown {what} {name!r}", expected=f"one of {', '.join(known)}")


def _depth(case: Case, layers: int | None) -> str:
    whole = case.program.n_layers
    return f"all {whole} layers" if layers is None or layers >= whole else f"the first {layers} of {whole} layers"


def _three_eighths(counts: list[int]) -> int:
    """The possible count nearest to three eighths, the paper's share for Qwen3-30B-A3B."""
    return min(counts, key=lambda count: abs(count - counts[-1] * 3 // 8))


def _choice(name: str, options: list[tuple[str, str]], value: str) -> widgets.Dropdown:
    made = widgets.Dropdown(options=options, value=value, description=name, style={"description_width": "initial"})
    made.layout.width, made.layout.max_width = "max-content", "calc(100% - 4px)"  # its margins
    return made


def _tick(name: str, value: bool) -> widgets.Checkbox:
    return widgets.Checkbox(value=value, description=name, indent=False, layout=widgets.Layout(width="auto"))
