"""The figure of the fault panel: six signals over the steps, original and proxies, healthy and broken.

Pure functions from a `FaultState` to a figure, to new values for its traces, and to a table. Number and order of the
traces never change, so a live figure is updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.lab.faults import fault
from moeproxy.traces.signals import SIGNALS
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.fault_lines import Lines, lines
from moeproxy.view.apps.fault_runs import Asked, ModelRuns
from moeproxy.view.style import BLACK, dress_panels, faint, model_colours

SLOTS = 3
"""Models that can be drawn at once: the original and two others."""

FIXED = ("policy_loss", "grad_norm", "reward_mean", "logprob_diff_mean")
_SPARE = ("update_norm", "entropy")
_ROWS, _COLUMNS = 3, 2
_PARTS = 4  # traces of one model in one panel: band, healthy, broken, end
LEAST_WIDTH_PX, HEIGHT_PX = 560, 780
_CROSS = {"symbol": "x", "size": 9}  # where values stop being finite


@dataclass(frozen=True)
class FaultState:
    """What the panel shows: the question, and the runs of up to `SLOTS` models."""

    asked: Asked
    runs: tuple[ModelRuns, ...]

    @property
    def signals(self) -> tuple[str, ...]:
        """The six signals drawn: four always, then the first tell-tales of the fault that are not among them."""
        tales = dict.fromkeys(tale.signal for tale in fault(self.asked.fault).tell_tales)
        more = [name for name in (*tales, *_SPARE) if name not in FIXED]
        return (*FIXED, *list(dict.fromkeys(more))[: _ROWS * _COLUMNS - len(FIXED)])

    @cached_property
    def lines(self) -> dict[tuple[str, str], Lines]:
        """The lines by signal and model."""
        return {(name, runs.label): lines(self.asked, runs, name) for name in self.signals for runs in self.runs}

    @property
    def onset(self) -> int:
        """Where the line of the onset stands: at 0 when runs are aligned by it."""
        return 0 if self.asked.aligned else next(iter(self.asked.onsets.values()))


def fault_figure(state: FaultState) -> go.Figure:
    """Return the complete figure for `state`."""
    figure = make_subplots(
        rows=_ROWS,
        cols=_COLUMNS,
        subplot_titles=panel_titles(state),
        vertical_spacing=0.1,
        horizontal_spacing=0.1,
    )
    for index, properties in enumerate(values(state)):
        panel, part = divmod(index, SLOTS * _PARTS)
        row, column = divmod(panel, _COLUMNS)
        figure.add_trace(go.Scatter(**_style(part % _PARTS), **properties), row=row + 1, col=column + 1)
    dress_panels(figure, HEIGHT_PX, 100, "x unified")
    figure.update_layout(layout_values(state))
    return figure


def panel_titles(state: FaultState) -> list[str]:
    """Return what stands above each panel: the signal, its unit, and whether it is a tell-tale of the fault."""
    tales = {tale.signal: tale.direction for tale in fault(state.asked.fault).tell_tales}
    word = {1: "should rise", -1: "should fall", 0: "becomes NaN"}
    titles = []
    for name in state.signals:
        unit = SIGNALS[name].unit
        text = (
            name.replace("_", " ")
            + (f", {unit}" if unit and unit not in name else "")
            + (", layer mean" if SIGNALS[name].per_layer else "")
        )
        titles.append(f"{text} ({word[tales[name]]})" if name in tales else text)
    return titles


def layout_values(state: FaultState) -> dict[str, Any]:
    """Return the parts of the layout that depend on the state."""
    asked = state.asked
    axis = "steps since the onset" if asked.aligned else "step"
    layout: dict[str, Any] = {
        "title": {"text": title(state), "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top"}
    }
    shapes = []
    for place, name in enumerate(state.signals):
        number = "" if place == 0 else str(place + 1)
        last_row = place >= (_ROWS - 1) * _COLUMNS
        layout[f"xaxis{number}"] = {"title": {"text": axis if last_row else ""}}
        layout[f"yaxis{number}"] = {"type": "log" if _is_log(state, name) else "linear"}
        line = {"color": BLACK, "width": 1, "dash": "dot"}
        at = {"x0": state.onset, "x1": state.onset, "y0": 0, "y1": 1}
        shapes.append({"type": "line", **at, "xref": f"x{number}", "yref": f"y{number} domain", "line": line})
    # Another fault must not keep the reader's zoom; another step of the same runs must.
    kept = f"{asked.fault} {asked.strength} {sorted(asked.onsets.items())}"
    return {**layout, "shapes": shapes, "uirevision": kept}


def title(state: FaultState) -> str:
    """Return the figure's title."""
    asked = state.asked
    onsets = sorted(set(asked.onsets.values()))
    when = f"from step {onsets[0]}" if len(onsets) == 1 else f"from steps {', '.join(map(str, onsets))}"
    seeds = ", ".join(map(str, asked.seeds))
    plural = "s" if len(asked.seeds) > 1 else ""
    second = "solid: healthy; dashed: broken; bands: range of all healthy runs; dotted: onset"
    return f"{asked.fault}, strength {asked.strength:g}, {when}, seed{plural} {seeds}<br><sup>{second}</sup>"


def values(state: FaultState) -> list[dict[str, Any]]:
    """Return, per trace of `fault_figure`, the properties that depend on the state."""
    colours = model_colours([runs.label for runs in state.runs])
    found = []
    for place, name in enumerate(state.signals):
        for slot in range(SLOTS):
            runs = state.runs[slot] if slot < len(state.runs) else None
            if runs is None:
                found += [{"x": [], "y": [], "name": "", "showlegend": False}] * _PARTS
            else:
                found += _parts(runs.label, state.lines[name, runs.label], colours[runs.label], place == 0)
    return found


def signal_table(state: FaultState) -> pd.DataFrame:
    """Return means from the onset on: a row a signal, healthy and broken of every model drawn."""
    rows = []
    for name in state.signals:
        row: dict[str, str] = {"signal": name.replace("_", " ")}
        for runs in state.runs:
            found = state.lines[name, runs.label]
            after_S = found.steps_S >= state.onset
            row[f"{runs.label}, healthy"] = _mean(found.healthy_S[after_S])
            # What was not run is a gap in the lines, and no value that ceased to be finite.
            broken_S = found.broken_S[after_S] if any(map(_has_begun, runs.broken.values())) else np.empty(0)
            row[f"{runs.label}, broken"] = _mean(broken_S)
        rows.append(row)
    return pd.DataFrame(rows)


def describe(state: FaultState) -> str:
    """Return what is drawn, in words."""
    parts = []
    for runs in state.runs:
        if not runs.broken:
            parts.append(f"{runs.label}: no run with this fault")
            continue
        growing = f", {runs.n_growing} not finished" if runs.n_growing else ""
        parts.append(f"{runs.label}: {_count(runs.broken)} broken ({runs.source}{growing}), band of {len(runs.band)}")
    aligned = " Their onsets differ, so runs are laid over each other by the onset." if state.asked.aligned else ""
    return f"{'; '.join(parts)}.{aligned}"


def _count(runs: Any) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


def _has_begun(broken: Trace) -> bool:
    """Whether a run, which may still be growing, has reached the step from which its fault acts."""
    steps, onset = broken.steps.index, broken.provenance.onset
    return len(steps) > 0 and onset is not None and int(steps[-1]) >= onset


def _mean(values_S: np.ndarray) -> str:
    if not values_S.size:
        return "–"
    finite_S = values_S[np.isfinite(values_S)]
    return f"{finite_S.mean():.3g}" if finite_S.size else "not finite"


def _is_log(state: FaultState, name: str) -> bool:
    if SIGNALS[name].scale != "log":
        return False
    found = [state.lines[name, runs.label] for runs in state.runs]
    drawn = np.concatenate(
        [part for one in found for part in (one.low_S, one.healthy_S, one.broken_S)] or [np.empty(0)]
    )
    drawn = drawn[np.isfinite(drawn)]
    return bool(drawn.size and drawn.min() > 0)


def _parts(label: str, lines: Lines, colour: str, first: bool) -> list[dict[str, Any]]:
    outline = np.concatenate([lines.high_S, lines.low_S[::-1]])
    inside = np.isfinite(outline)
    axis = np.concatenate([lines.steps_S, lines.steps_S[::-1]])
    at = [] if lines.ends is None else [lines.ends]
    hidden = {"name": label, "showlegend": False}
    parts = [
        {"x": axis[inside], "y": outline[inside], "fillcolor": faint(colour), "line": {"width": 0}, **hidden},
        _line(lines.steps_S, lines.healthy_S, {"color": colour}, f"{label}, healthy", first),
        _line(lines.steps_S, lines.broken_S, {"color": colour, "dash": "dash"}, f"{label}, broken", first),
        {"x": lines.steps_S[at], "y": lines.broken_S[at], "marker": {**_CROSS, "color": colour}, **hidden},
    ]
    return [{**part, "legendgroup": label} for part in parts]


def _line(steps_S: np.ndarray, values_S: np.ndarray, line: dict[str, Any], name: str, first: bool) -> dict[str, Any]:
    there_S = np.isfinite(values_S)
    return {
        "x": steps_S,
        "y": [
            float(value) if there else None for value, there in zip(values_S, there_S, strict=True)
        ],  # no NaN in JSON
        "line": {"width": 2.0, **line},
        "name": name,
        "showlegend": first and bool(there_S.any()),
    }


def _style(part: int) -> dict[str, Any]:
    """Return what never changes of a trace."""
    shown = {"mode": "lines", "hovertemplate": "%{y:.4g}"}
    return (
        {"mode": "lines", "fill": "toself", "hoverinfo": "skip"},
        shown,
        shown,
        {"mode": "markers", "hoverinfo": "skip"},
    )[part]
