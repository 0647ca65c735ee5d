"""The figure of the remedy panel: five signals without and with a remedy, and severity before and after.

Pure functions from a `RemedyState` to a figure, to new values for its traces, and to tables. Number and order of the
traces never change, so a live figure is updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.lab.faults import fault
from moeproxy.traces.signals import SIGNALS
from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy_result import Trial
from moeproxy.triage.severity import Severity
from moeproxy.view.apps.fault_lines import signal
from moeproxy.view.style import BLACK, GREEN, GREY, ORANGE, ORIGINAL, PROXY, dress_panels

LEAST_WIDTH_PX, HEIGHT_PX = 560, 760
FIXED = ("reward_mean", "grad_norm", "kl")
_SPARE = ("entropy", "policy_loss", "response_length")
PANELS, LINES = 5, 4
"""Panels of signals, and lines of each: healthy twin, without the remedy, with it, where values stop being finite."""

KEPT, ROLLED_BACK, HARMFUL, FAILED = "kept", "rolled back", "rolled back, worse", "failed"
_COLOUR = {KEPT: GREEN, ROLLED_BACK: GREY, HARMFUL: ORANGE, FAILED: BLACK}
_SHAPE = {KEPT: "", ROLLED_BACK: "/", HARMFUL: "x", FAILED: "."}
"""Verdicts are told by pattern and words too."""


@dataclass(frozen=True, eq=False)
class RemedyState:
    """What the panel shows.

    Args:
        model, fault, seed, onset: the failure.
        twin, broken: the healthy twin and the run without a remedy.
        treated: the run with the remedy shown, whole or as far as it is; None without one.
        shown: id of that remedy.
        growing: whether it is still being made.
        before, margin: severity without a remedy, and what healthy runs stay below; None before anything was tried.
        trials: what was tried.
    """

    model: str
    fault: str
    seed: int
    onset: int
    twin: Trace
    broken: Trace
    treated: Trace | None = None
    shown: str = ""
    growing: bool = False
    before: Severity | None = None
    margin: float = 0.0
    trials: tuple[Trial, ...] = ()

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals drawn: three always, then the first tell-tales of the fault that the run logs."""
        tales = [tale.signal for tale in fault(self.fault).tell_tales]
        logged = [name for name in (*FIXED, *tales, *_SPARE) if signal(self.broken, name) is not None]
        return tuple(dict.fromkeys(logged))[:PANELS]

    @property
    def trial(self) -> Trial | None:
        """The trial that is shown."""
        return next((trial for trial in self.trials if trial.remedy == self.shown), None)


def verdict_of(trial: Trial) -> str:
    """Return what became of a trial, in a word or two."""
    if trial.after is None:
        return FAILED
    return KEPT if trial.accepted else HARMFUL if trial.harmful else ROLLED_BACK


def remedy_figure(state: RemedyState) -> go.Figure:
    """Return the complete figure for `state`."""
    figure = make_subplots(rows=3, cols=2, subplot_titles=titles(state), vertical_spacing=0.11, horizontal_spacing=0.12)
    properties = values(state)
    for index, new in enumerate(properties[:-1]):
        row, column = divmod(index // LINES, 2)
        cross = index % LINES == LINES - 1
        drawn = {"mode": "markers", "hoverinfo": "skip"} if cross else {"mode": "lines", "hovertemplate": "%{y:.4g}"}
        figure.add_trace(go.Scatter(drawn).update(new), row=row + 1, col=column + 1)
    bars = go.Bar(orientation="h", width=0.55, hovertemplate="%{customdata}<extra></extra>", showlegend=False)
    figure.add_trace(bars.update(properties[-1]), row=3, col=2)
    dress_panels(figure, HEIGHT_PX, 95, "closest")
    figure.update_layout({f"yaxis{PANELS + 1}": {"autorange": "reversed", "automargin": True}})
    return figure.update_layout(layout_values(state))


def titles(state: RemedyState) -> list[str]:
    """Return what stands above each panel."""
    names = [
        name.replace("_", " ") + (f", {unit}" if (unit := SIGNALS[name].unit) and unit not in name else "")
        for name in state.signals
    ]
    return [*names, *[""] * (PANELS - len(names)), "severity: 0 healthy, 1 worst"]


def values(state: RemedyState) -> list[dict[str, Any]]:
    """Return, per trace of `remedy_figure`, the properties that depend on the state."""
    found = []
    for place in range(PANELS):
        name = state.signals[place] if place < len(state.signals) else ""
        lines = _lines(state, name, place == 0)
        found += [line | _coloured(state, part) for part, line in enumerate(lines)]
    return [*found, _bars(state)]


def layout_values(state: RemedyState) -> dict[str, Any]:
    """Return the parts of the layout that depend on the state."""
    layout: dict[str, Any] = {
        "title": {"text": title(state), "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top"},
        "uirevision": f"{state.model} {state.fault} {state.seed}",  # another run must not keep the reader's zoom
    }
    shapes = []
    for place in range(PANELS):
        number = "" if place == 0 else str(place + 1)
        name = state.signals[place] if place < len(state.signals) else ""
        layout[f"xaxis{number}"] = {"title": {"text": "step" if place == PANELS - 1 else ""}}
        layout[f"yaxis{number}"] = {"type": "log" if name and _is_log(state, name) else "linear"}
        at = {"x0": state.onset, "x1": state.onset, "y0": 0, "y1": 1}
        line = {"color": BLACK, "width": 1, "dash": "dot"}
        shapes.append({"type": "line", **at, "xref": f"x{number}", "yref": f"y{number} domain", "line": line})
    last = PANELS + 1
    edge = {"x0": state.margin, "x1": state.margin, "y0": 0, "y1": 1, "xref": f"x{last}", "yref": f"y{last} domain"}
    # Below the words beside short bars, and paler, so that these stay readable.
    shapes.append({"type": "line", **edge, "layer": "below", "line": {"color": GREY, "width": 1, "dash": "dash"}})
    highest = max(
        [state.before.value if state.before else 0.0, *(t.after.value for t in state.trials if t.after), 0.05]
    )
    layout[f"xaxis{last}"] = {"range": [0, 1.6 * highest], "title": {"text": "dashed: healthy runs stay below"}}
    return {**layout, "shapes": shapes}


def title(state: RemedyState) -> str:
    """Return the figure's title."""
    words = f"{state.fault} on {state.model}, from step {state.onset}"
    if not state.shown:
        return f"{words}: no remedy is shown"
    made = " (growing)" if state.growing else "" if state.treated is not None else " (run not kept)"
    return f"{words}: without and with {state.shown}{made}"


def describe(state: RemedyState) -> str:
    """Return what is drawn, in words and numbers."""
    told = f"{state.fault} on {state.model}, seed {state.seed}, acts from step {state.onset}."
    if state.before is None:
        return f"{told} Nothing was tried yet: press Try live."
    told = f"{told} Severity without a remedy {state.before}; healthy runs stay below {state.margin:.3f}."
    if not state.trials and state.before.value <= state.margin:
        return f"{told} The run is not ill, so that nothing can be mended."
    trial = state.trial
    if trial is None:
        return f"{told} {len(state.trials)} remedies were tried."
    return f"{told} With {trial.remedy} {trial.after or 'the run did not end'}: {trial.words}."


def trial_table(trials: tuple[Trial, ...], elsewhere: tuple[Trial, ...] = (), where: str = "") -> pd.DataFrame:
    """Return one row a trial: severity before and after in its parts, and the verdict.

    Args:
        trials: what was tried.
        elsewhere: trials on another model, of which the verdict is shown beside.
        where: label of that model.
    """
    there = {trial.remedy: trial for trial in elsewhere}
    rows = []
    for trial in trials:
        row = {"remedy": trial.remedy, "kind": trial.kind, "before": f"{trial.before.value:.3f}"}
        row |= {"after": f"{trial.after.value:.3f}" if trial.after else "–", "verdict": verdict_of(trial)}
        for name in ("reward_loss", "departure", "not_finite"):
            after = getattr(trial.after, name) if trial.after else float("nan")
            row[name.replace("_", " ")] = f"{getattr(trial.before, name):.2f} → {after:.2f}"
        row["why"] = trial.words
        if there:
            other = there.get(trial.remedy)
            row[f"on {where}"] = _there(other) if other else "not tried"
        rows.append(row)
    return pd.DataFrame(rows)


def _there(trial: Trial) -> str:
    after = f"{trial.after.value:.3f}" if trial.after else "–"
    return f"{trial.before.value:.3f} → {after}, {verdict_of(trial)}"


def _lines(state: RemedyState, name: str, first: bool) -> list[dict[str, Any]]:
    runs = (state.twin, state.broken, state.treated)
    labels = ("healthy twin", "without remedy", f"with {state.shown}" if state.shown else "with a remedy")
    found = []
    for run, label in zip(runs, labels, strict=True):
        logged = signal(run, name) if run is not None and name else None
        x = [] if run is None or logged is None else run.steps.index.tolist()
        y = [] if logged is None else [float(value) if np.isfinite(value) else None for value in logged]
        found.append({"x": x, "y": y, "name": label, "showlegend": first and bool(x)})
    ends = [_end(line) for line in found[1:]]
    x, y = [end[0] for end in ends if end], [end[1] for end in ends if end]
    return [*found, {"x": x, "y": y, "name": "not finite from here on", "showlegend": first and bool(x)}]


def _end(line: dict[str, Any]) -> tuple[int, float] | None:
    """Return the last finite value of a line that goes on without any."""
    finite = [place for place, value in enumerate(line["y"]) if value is not None]
    if not finite or finite[-1] == len(line["y"]) - 1:
        return None
    return line["x"][finite[-1]], line["y"][finite[-1]]


def _bars(state: RemedyState) -> dict[str, Any]:
    bars: list[tuple[str, Severity | None, str, str, str]] = []
    if state.before:
        bars.append(("none", state.before, "without a remedy", BLACK, ""))
    for trial in state.trials:
        verdict = verdict_of(trial)
        bars.append((trial.remedy, trial.after, verdict, _COLOUR[verdict], _SHAPE[verdict]))
    severities = [severity.value if severity else 0.0 for _, severity, *_ in bars]
    words = [f"{severity.value:.3f}, {verdict}" if severity else verdict for _, severity, verdict, *_ in bars]
    if bars and state.before:
        words[0] = f"{state.before.value:.3f}"
    return {
        "x": severities,
        "y": [name for name, *_ in bars],
        "text": words,
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [f"{name}: {severity or 'did not end'}, {verdict}" for name, severity, verdict, *_ in bars],
        "marker": {
            "color": [colour for *_, colour, _ in bars],
            "pattern": {"shape": [shape for *_, shape in bars], "fgcolor": "white", "solidity": 0.35},
        },
    }


def _coloured(state: RemedyState, part: int) -> dict[str, Any]:
    """Return the look of a line; its colour follows the model."""
    colour = ORIGINAL if state.model == "original" else PROXY
    return (
        {"line": {"color": colour, "width": 1.6}},
        {"line": {"color": colour, "width": 1.6, "dash": "dash"}},
        {"line": {"color": GREEN, "width": 2.6, "dash": "dot"}},
        {"marker": {"symbol": "x", "size": 9, "color": colour}},
    )[part]


def _is_log(state: RemedyState, name: str) -> bool:
    if SIGNALS[name].scale != "log":
        return False
    logged = [signal(run, name) for run in (state.twin, state.broken, state.treated) if run is not None]
    drawn = np.concatenate([values_S for values_S in logged if values_S is not None] or [np.empty(0)])
    drawn = drawn[np.isfinite(drawn)]
    return bool(drawn.size and drawn.min() > 0)
