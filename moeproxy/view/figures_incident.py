"""Figure of an incident: the signals that departed beside what was to be expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.traces.trace import Trace
from moeproxy.triage.alarms import Alarm, judged_number
from moeproxy.triage.attempted import JudgedAttempt
from moeproxy.triage.judged import Judged, original_value, signal_name, unit_of
from moeproxy.view.actions import Action
from moeproxy.view.incident import Incident
from moeproxy.view.log_view import usual
from moeproxy.view.style import BLACK, BLUE, GREEN, GREY, VERMILLION, counted, finish, literal
from moeproxy.view.timeline import among

MOST_PANELS = 4
"""Panels of one figure: in a single column they fill two thirds of a page."""

_PANEL_PX, _TOP_PX, _BOTTOM_PX = 170, 84, 106
_DRAWN = 1e300
"""Largest value that is drawn: plotly takes larger ones, from 1.8e304 on, for none."""

_BAND = "rgba(118,118,118,0.25)"


@dataclass(frozen=True, eq=False)
class _Panel:
    """One signal of a run: its values, what healthy runs do, and its alarm."""

    row: str
    steps_S: np.ndarray
    values_S: np.ndarray
    broken_S: np.ndarray
    low_S: np.ndarray
    high_S: np.ndarray
    alarm: Alarm | None

    @property
    def is_log(self) -> bool:
        """Whether it is drawn on a logarithmic axis: it spans more than a factor of thirty and is positive."""
        seen = np.concatenate([self.values_S, self.low_S, self.high_S])
        seen = seen[np.isfinite(seen)]
        return bool(seen.size and seen.min() > 0 and seen.max() > 30 * seen.min())


def signals_figure(incident: Incident, judged: JudgedAttempt, *, actions: Sequence[Action] = ()) -> go.Figure:
    """Draw the signals that alarmed, over the steps, beside the range of the healthy runs.

    Without an alarm the usual signals are drawn. Crosses at the upper edge are values that are not finite; a dashed
    line is what was to be expected over the steps of which the alarm speaks; uprights are the onset (black, dotted)
    and actions (green, with their numbers).

    Args:
        incident: the run.
        judged: the attempt of it to draw.
        actions: in their order; of those at a step of the run the step is marked.
    """
    panels = _panels(judged, incident.healthy)
    titles = [_heading(panel) for panel in panels]
    figure = make_subplots(
        rows=len(panels), shared_xaxes=True, subplot_titles=titles, vertical_spacing=_gap(len(panels))
    )
    for row, panel in enumerate(panels, start=1):
        for trace in _traces(panel, row == 1):
            figure.add_trace(trace, row=row, col=1)
        kind = "log" if panel.is_log else "linear"
        title = {"text": unit_of(panel.row), "font": {"size": 13}}
        figure.update_yaxes(type=kind, title=title, nticks=5, row=row, col=1)
    figure.update_xaxes(title={"text": "step", "font": {"size": 14}}, row=len(panels), col=1)
    _mark(figure, judged, actions)
    return _finished(figure, incident, judged, panels)


def _panels(judged: JudgedAttempt, healthy: Sequence[Any]) -> list[_Panel]:
    table = Judged.of(judged.trace)
    alarms = _chosen(judged.diagnosis.detection.alarms, table)
    rows = list(alarms) or [name for name in usual([judged.trace]) if name in table.rows] or list(table.rows[:4])
    others = [Judged.of(one) for one in healthy]
    return [_panel(row, table, others, alarms.get(row), judged.trace) for row in rows]


def _chosen(alarms: Sequence[Alarm], table: Judged) -> dict[str, Alarm]:
    """Return the alarms to draw, one a signal: the largest of those that came first, in the order of their onsets."""
    found: dict[str, Alarm] = {}
    known: set[str] = set()
    for alarm in alarms:
        if alarm.signal in table.rows and signal_name(alarm.signal) not in known:
            known.add(signal_name(alarm.signal))
            found[alarm.signal] = alarm
    return dict(list(found.items())[:MOST_PANELS])


def _panel(row: str, table: Judged, others: Sequence[Judged], alarm: Alarm | None, trace: Trace) -> _Panel:
    place = table.rows.index(row)
    steps_S = table.steps_S
    theirs_RS = np.array([_plain(row, one.at((row,), steps_S)[0]) for one in others]).reshape(len(others), len(steps_S))
    seen_RS = np.ma.masked_invalid(theirs_RS)
    low_S, high_S = (
        np.ma.filled(bound, np.nan) if others else np.full(len(steps_S), np.nan)
        for bound in ((seen_RS.min(0), seen_RS.max(0)) if others else (np.nan, np.nan))
    )
    return _Panel(row, steps_S, _own(row, table, trace), table.broken_RS[place], low_S, high_S, alarm)


def _own(row: str, table: Judged, trace: Trace) -> np.ndarray:
    """Return the values of the run as it logged them: those it is judged by are bounded, 1e308 as 1e60."""
    judged_S = _plain(row, table.finite_RS[table.rows.index(row)])
    if row not in trace.signals:
        return judged_S
    values_S = trace.steps[row].reindex(table.steps_S).to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isfinite(judged_S) & np.isfinite(values_S), values_S, judged_S)


def _plain(row: str, values_S: np.ndarray) -> np.ndarray:
    """Return transformed values in the signal's own unit, NaN where there is none or it is not finite."""
    found = [original_value(row, value) if np.isfinite(value) else np.nan for value in values_S.tolist()]
    return np.array(found, np.float64)


def _heading(panel: _Panel) -> str:
    alarm = panel.alarm
    if alarm is None:
        return literal(panel.row)
    went = "not finite" if alarm.direction == "not finite" else alarm.direction
    return f"<b>{literal(panel.row)}</b>: {went} from step {alarm.onset}"


def _traces(panel: _Panel, first: bool) -> list[go.Scatter]:
    found = []
    if np.isfinite(panel.low_S).any():
        found += _band(panel, first)
    line = {"color": BLUE, "width": 2}
    found.append(
        go.Scatter(
            x=panel.steps_S,
            y=np.clip(panel.values_S, -_DRAWN, _DRAWN),
            customdata=panel.values_S,
            mode="lines+markers" if np.isfinite(panel.values_S).sum() <= 60 else "lines",
            line=line,
            marker={"size": 4},
            name="this run",
            legendgroup="run",
            showlegend=first,
            hovertemplate="step %{x}: %{customdata:.4g}<extra></extra>",
        )
    )
    alarm = panel.alarm
    if alarm is not None and np.isfinite(alarm.expected):
        found.append(
            go.Scatter(
                x=list(alarm.shown),
                y=[alarm.expected] * 2,
                mode="lines",
                line={"color": BLACK, "width": 2, "dash": "dash"},
                name="expected there",
                legendgroup="expected",
                showlegend=False,
                hovertemplate=f"expected {alarm.expected:.3g}<extra></extra>",
            )
        )
    if panel.broken_S.any():
        found.append(_crosses(panel))
    return found


def _band(panel: _Panel, first: bool) -> list[go.Scatter]:
    inside = np.isfinite(panel.low_S) & np.isfinite(panel.high_S)
    steps = panel.steps_S[inside]
    return [
        go.Scatter(
            x=np.concatenate([steps, steps[::-1]]),
            y=np.concatenate([panel.high_S[inside], panel.low_S[inside][::-1]]),
            fill="toself",
            fillcolor=_BAND,
            mode="lines",
            line={"width": 0.8, "color": GREY, "dash": "dot"},
            name="range of the healthy runs",
            legendgroup="healthy",
            showlegend=first,
            hoverinfo="skip",
        )
    ]


def _crosses(panel: _Panel) -> go.Scatter:
    seen = np.concatenate([panel.values_S, panel.high_S])
    seen = seen[np.isfinite(seen)]
    top = float(seen.max()) if seen.size else 1.0
    steps = panel.steps_S[panel.broken_S]
    return go.Scatter(
        x=steps,
        y=np.full(len(steps), top),
        mode="markers",
        marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.6, "color": VERMILLION}},
        name="not finite",
        legendgroup="not finite",
        showlegend=False,
        hovertemplate="step %{x}: not finite<extra></extra>",
    )


def _mark(figure: go.Figure, judged: JudgedAttempt, actions: Sequence[Action]) -> None:
    index = judged.trace.steps.index
    here = [(a.step, number) for number, a in enumerate(actions, 1) if among(a.step, int(index[0]), int(index[-1]))]
    steps = [(step, number) for step, number in here if step is not None]
    for step in dict.fromkeys(step for step, _ in steps):
        _upright(figure, step, "actions", GREEN, "dashdot", 3.0)
        words = ", ".join(str(number) for other, number in steps if other == step)
        place = {"x": step, "y": 0, "xref": "x", "yref": "paper", "yanchor": "bottom", "xanchor": "left"}
        figure.add_annotation(text=words, showarrow=False, font={"size": 12, "color": GREEN}, **place)
    onset = judged.diagnosis.detection.onset
    if onset is not None:  # last and thinner: an action at the same step must not hide it
        _upright(figure, onset, f"onset, step {onset}", BLACK, "dot", 1.4)


def _upright(figure: go.Figure, step: int, name: str, colour: str, dash: str, width: float) -> None:
    line = {"color": colour, "width": width, "dash": dash}
    figure.add_vline(x=step, line=line)
    entry = {"x": [None], "y": [None], "mode": "lines", "name": name, "legendgroup": name, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(entry, line=line), row=1, col=1)


def _gap(n_rows: int) -> float:
    return 0.0 if n_rows == 1 else 34 / (n_rows * _PANEL_PX)


def _finished(figure: go.Figure, incident: Incident, judged: JudgedAttempt, panels: list[_Panel]) -> go.Figure:
    plot_px = len(panels) * _PANEL_PX
    _legend_for_rare(figure)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -58 / plot_px, "yanchor": "top"})
    figure.update_annotations(selector={"yref": "paper", "xanchor": "center"}, xanchor="left", x=0, font_size=14)
    label = f", {judged.label}" if judged.label else ""
    alarmed = [panel for panel in panels if panel.alarm is not None]
    what = counted(len(alarmed), "signal") + " that departed" if alarmed else "The usual signals"
    finish(
        figure,
        title=f"{what}: {literal(incident.name)}{label}",
        alt=_alt(incident, judged, panels),
        table=_table(panels),
        height=plot_px + _TOP_PX + _BOTTOM_PX,
        top=_TOP_PX,
    )
    return figure.update_layout(margin_b=_BOTTOM_PX)


def _legend_for_rare(figure: go.Figure) -> None:
    """Give the first of each kind of mark its entry: it may be absent in the first panel."""
    shown: set[str] = set()
    for trace in figure.data:
        group = str(trace.legendgroup)  # pyright: ignore[reportAttributeAccessIssue]
        trace.update(showlegend=group not in shown)  # pyright: ignore[reportAttributeAccessIssue]
        shown.add(group)


def departed_signals(alarms: Iterable[Alarm]) -> int:
    """Return how many signals alarm, those of several layers counted once."""
    return len({signal_name(alarm.signal) for alarm in alarms})


def _alt(incident: Incident, judged: JudgedAttempt, panels: list[_Panel]) -> str:
    detection = judged.diagnosis.detection
    start = "no onset" if detection.onset is None else f"onset at step {detection.onset}"
    steps = judged.trace.steps.index
    beside = f"beside {counted(len(incident.healthy), 'healthy run')}" if incident.healthy else "without healthy runs"
    departed = departed_signals(detection.alarms)
    told = [_told(panel) for panel in panels]
    more = departed > sum(panel.alarm is not None for panel in panels)
    rest = f" {counted(departed, 'signal')} departed in all." if more else ""
    return f"{incident.name}, steps {steps[0]} to {steps[-1]}, {beside}, {start}. {'; '.join(told)}.{rest}"


def _told(panel: _Panel) -> str:
    alarm = panel.alarm
    seen = panel.values_S[np.isfinite(panel.values_S)]
    if alarm is None:
        return f"{panel.row} {seen.min():.3g} to {seen.max():.3g}" if seen.size else f"{panel.row} never finite"
    if not np.isfinite(alarm.after):
        was = "" if np.isnan(alarm.before) else f", {alarm.before:.3g} before"
        return f"{panel.row} not finite from step {alarm.onset}{was}"
    first, last = alarm.shown
    change = f"{judged_number(alarm.after)} instead of {judged_number(alarm.expected)}"
    return f"{panel.row} {change} from step {alarm.onset} (over steps {first} to {last})"


def _table(panels: list[_Panel]) -> pd.DataFrame:
    columns: dict[str, Any] = {"step": panels[0].steps_S.tolist()}
    for panel in panels:
        pairs = zip(panel.values_S.tolist(), panel.broken_S.tolist(), strict=True)
        columns[panel.row] = [_number(*pair) for pair in pairs]
        if np.isfinite(panel.low_S).any():
            columns[f"{panel.row}, healthy low"] = [_number(value, False) for value in panel.low_S.tolist()]
            columns[f"{panel.row}, healthy high"] = [_number(value, False) for value in panel.high_S.tolist()]
    return pd.DataFrame(columns)


def _number(value: float, broken: bool) -> object:
    return "not finite" if broken else float(f"{value:.4g}") if np.isfinite(value) else None
