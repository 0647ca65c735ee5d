"""Panel of notebook 07: a job in roles whose members the reader kills, and what that costs."""

from __future__ import annotations

import atexit
import html
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.places import data_dir
from moeproxy.recovery import events as ev
from moeproxy.recovery.calculator import TASK, Cluster, expected
from moeproxy.recovery.child import ChildJob, pids, start_job
from moeproxy.recovery.effective import Ettr, ettr
from moeproxy.recovery.events import Event
from moeproxy.recovery.plan import RolePlan
from moeproxy.recovery.timeline import outages
from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.recovery_calculator import Calculator
from moeproxy.view.apps.tables import html_rows
from moeproxy.view.apps.ui import Status
from moeproxy.view.figures_recovery import job_figure
from moeproxy.view.style import GREEN, GREY, ORANGE, VERMILLION, describe

_LOOK_S = 0.5
RESTART_EVERYTHING_S = 2.6
"""Seconds that a restart of everything took in data/recovery (two busy cores), until a run shows its own."""


_UP, _ABSENT, _ENDED = ("up", "●", GREEN), ("not there", "○", GREY), ("ended", "○", GREY)
_STATES = {
    ev.START: ("starting", "◐", ORANGE),
    ev.READY: _UP,
    ev.CONNECTED: _UP,
    ev.PHASE: _UP,
    ev.FAULT: ("failed", "✕", VERMILLION),
    ev.DETECT: ("away", "✕", VERMILLION),
}
"""What an event says about its member: a word, and a mark whose form repeats its colour."""


class RecoveryPanel:
    """Start a job, kill its members, watch it run on.

    Args:
        out: folder for one new folder a job.
        steps: of the job.
        plan: roles; mishaps of its own, if it shall have any.
        model: directory of a testbed checkpoint; default: the shipped one.
    """

    def __init__(
        self, out: str | Path, *, steps: int = 200, plan: RolePlan | None = None, model: Path | None = None
    ) -> None:
        self._out, self.plan = Path(out), plan or RolePlan()
        chosen = model or data_dir() / "models" / "qwen3-moe-tiny"
        self.spec = RunSpec(chosen, settings=GRPOSettings(steps=steps, prompts=8, samples=4, tasks=max(64, 8 * steps)))
        self.status = Status("Press Start: about half a minute until the first step.")
        self.job: ChildJob | None = None
        self._watching: threading.Thread | None = None
        self.start = widgets.Button(description="Start the job")
        self.stop = widgets.Button(description="Stop", disabled=True)
        names = ("trainer", *self.plan.rollout_names, "manager")
        self.kill = {name: widgets.Button(description=f"Kill {name}", disabled=True) for name in names}
        self.board, self.gauge = widgets.HTML(), widgets.HTML()
        self.figure = LiveFigure(job_figure([]))
        self.calculator = Calculator()
        self.start.on_click(self.status.guard(lambda _: self.begin()))
        self.stop.on_click(self.status.guard(lambda _: self.end()))
        for name, button in self.kill.items():
            button.on_click(self.status.guard(lambda _, member=name: self.strike(member)))
        row = widgets.HBox([self.start, self.stop, *self.kill.values()], layout={"flex_flow": "row wrap"})
        self.widget = widgets.VBox([row, self.status.widget, self.board, self.figure.widget, self.gauge])
        atexit.register(self.end)  # a kernel that shuts down in good order; one that is killed closes the pipe

    @property
    def events(self) -> list[Event]:
        """Of the job at hand."""
        return self.job.events() if self.job else []

    @property
    def effective(self) -> Ettr | None:
        """The effective training time so far; None before the first step."""
        try:
            return ettr(self.events) if self.events else None
        except RecoveryError:
            return None

    def begin(self) -> None:
        """Start a job in a new folder."""
        if self.job and self.job.running:
            raise RecoveryError("a job is running", remedy="press Stop first")
        folder = self._out / time.strftime("job-%Y%m%d-%H%M%S")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.job = start_job(self.spec, folder, self.plan)
        self._enable(running=True)
        self.status.say("Processes are starting.")
        self._watching = threading.Thread(target=self._watch, args=(self.job,), daemon=True)
        self._watching.start()

    def strike(self, member: str) -> int:
        """Kill a member and return its process number."""
        if self.job is None:
            raise RecoveryError("no job is running", remedy="press Start first")
        pid = self.job.kill(member)
        self.status.say(f"SIGKILL to {member} (process {pid}).")
        return pid

    def end(self) -> None:
        """End the job and all its processes."""
        if self.job and self.job.running:
            self.job.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the job's end; return whether it has come."""
        if self._watching:
            self._watching.join(timeout_s)
        return self._watching is None or not self._watching.is_alive()

    def wait_for(self, step: int, timeout_s: float = 120.0) -> bool:
        """Wait until a step is finished; return whether it is."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if _step(self.events) >= step:
                return True
            if self.job is None or not self.job.running:
                return False
            time.sleep(0.1)
        return False

    def _watch(self, job: ChildJob) -> None:
        shown = -1
        while True:
            running, events = job.running, job.events()
            if len(events) != shown:
                shown = len(events)
                self._draw(events)
            if not running:
                break
            time.sleep(_LOOK_S)
        self._enable(running=False)
        ends = [event for event in events if event.event == ev.JOB_END]
        if ends:
            self.status.say(f"The job has ended: {ends[-1].info['outcome']}.")
        else:
            self.status.say(f"The job broke off: {job.said}", error=True)

    def _draw(self, events: list[Event]) -> None:
        self.board.value = board(events, self.plan)
        drawn: Any = job_figure(events)
        with self.figure.change() as widget:
            widget.layout.shapes = drawn.layout.shapes  # pyright: ignore[reportAttributeAccessIssue]
            widget.layout.meta = drawn.layout.meta  # pyright: ignore[reportAttributeAccessIssue]
            mine: Any
            for mine, new in zip(widget.data, drawn.data, strict=True):
                mine.x, mine.y = new.x, new.y
                if new.type == "bar":
                    mine.base = new.base
                else:
                    mine.customdata = new.customdata
        found = self.effective
        if found:
            self.gauge.value = gauge(found)
            if found.outages:
                self.calculator.measured(_costs(found))
        if events:
            up = pids(events)
            for name, button in self.kill.items():
                button.disabled = name not in up
            self.status.say(f"Step {_step(events)} of {self.spec.settings.steps}. {describe(drawn)}")

    def _enable(self, *, running: bool) -> None:
        self.start.disabled, self.stop.disabled = running, not running
        if not running:
            for button in self.kill.values():
                button.disabled = True

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def board(events: list[Event], plan: RolePlan) -> str:
    """Return a table of members: what each is doing, and its process."""
    up, states, doing, away = pids(events), {}, {}, Counter(item.member for item in outages(events))
    for event in events:
        if event.event == ev.PHASE:
            doing[event.member] = f"{event.info['phase']}{f', step {event.step}' if event.step else ''}"
        if event.event in _STATES:
            states[event.member] = _STATES[event.event]
    names = ["trainer", *plan.rollout_names, "manager", *[name for name in up if name.startswith("standby")]]
    if any(event.event == ev.JOB_END for event in events):
        up, states = {}, dict.fromkeys(names, _ENDED)
    rows = []
    for name in names:
        state = states.get(name, _ABSENT)
        does = doing.get(name, _idle(name)) if state == _UP else ""
        rows.append([html.escape(name), _state(*state), html.escape(does), f"{up.get(name, '')}", f"{away[name]}"])
    return html_rows("Members of the job", ["member", "state", "does", "process", "outages"], rows, wrap=False)


def _state(word: str, mark: str, colour: str) -> str:
    return f"<span aria-hidden='true' style='color:{colour}'>{mark}</span> {word}"


def gauge(found: Ettr) -> str:
    """Return the effective training time as two meters: measured, and expected of a restart of everything."""
    everything = expected(_costs(found), TASK).ratio if found.outages else 1.0
    lines = (
        ("ETTR of this job", found.ratio),
        ("without credit for rollouts", found.ratio_strict),
        ("expected of restarts of everything", everything),
    )
    meter = "<meter min='0' max='1' value='{:.4f}' aria-label='{}' style='width:14em;height:1.2em'></meter>"
    rows = [[label, meter.format(value, label), f"{value:.1%}"] for label, value in lines]
    return html_rows("Effective training time", [], rows)


def _costs(found: Ettr) -> Cluster:
    """Return one trainer beside the run's rollouts, at the run's own frequency of faults and with its own costs."""
    known: dict[str, float] = {"rollouts": sum(name.startswith("rollout") for name in found.by_member)}
    if not any(item.whole_task for item in found.outages):
        known["restart_task"] = RESTART_EVERYTHING_S
    cluster = Cluster.measured(found, **known)
    # Faults of any member restart everything there, so all of them count.
    return replace(cluster, mtbf=(cluster.trainers + cluster.rollouts) * found.wall / len(found.outages))


def _idle(name: str) -> str:
    return "serves" if name == "manager" else "waits, loaded" if name.startswith("standby") else ""


def _step(events: list[Event]) -> int:
    return max((event.step or 0 for event in events if event.event == ev.STEP_COMMIT), default=0)
