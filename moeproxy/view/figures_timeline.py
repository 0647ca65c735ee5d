"""The figure of a timeline: one row for each attempt and alarm, one for the actions, steps along the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from moeproxy.view.actions import KINDS
from moeproxy.view.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ON_PAGE,
    ORANGE,
    PURPLE,
    VERMILLION,
    counted,
    finish,
    legend_px,
    literal,
)
from moeproxy.view.timeline import ACTIONS, ATTEMPT, DOWN, FAILED, NOT_FINITE, ONSET, RESUMED, UP, Moment, Timeline

ROW_PX = 27
_TOP_PX, _AXIS_PX = 66, 74
_BAR = {ATTEMPT: (BLUE, 9)}
_MARKS = {
    ONSET: ("line-ns", BLACK),
    RESUMED: ("triangle-right", PURPLE),
    FAILED: ("x", BLACK),
    UP: ("triangle-up", VERMILLION),
    DOWN: ("triangle-down", VERMILLION),
    NOT_FINITE: ("cross", VERMILLION),
    KINDS["noted"]: ("circle", GREEN),
    KINDS["restored"]: ("triangle-left", GREEN),
    KINDS["changed"]: ("diamond", ORANGE),
    KINDS["rerun"]: ("star", GREEN),
    KINDS["stopped"]: ("square", GREY),
}
"""Symbol and colour of everything that is marked; the symbols alone tell them apart."""


def timeline_figure(timeline: Timeline, name: str) -> go.Figure:
    """Draw when an incident began, which signals alarmed, and what was done, by step.

    Bars are attempts, lines alarms (to the end, or to the recovery, which has a bar across), numbers actions; dotted
    uprights are the onsets.

    Args:
        timeline: of `timeline.timeline`.
        name: of the run, for the title.
    """
    figure = go.Figure()
    for moment in timeline.moments:
        if moment.until is not None:
            figure.add_trace(_line(moment))
    for kind, (symbol, colour) in _MARKS.items():
        marks = [moment for moment in timeline.moments if moment.kind == kind]
        if marks:
            figure.add_trace(_symbols(kind, marks, symbol, colour))
    ends = [m for m in timeline.moments if m.kind in (UP, DOWN, NOT_FINITE) and not m.open_end]
    if ends:
        figure.add_trace(_ends(ends))
    _uprights(figure, timeline)
    return _finished(figure, timeline, name)


def _line(moment: Moment) -> go.Scatter:
    colour, width = _BAR.get(moment.kind, (VERMILLION, 1.8))
    return go.Scatter(
        x=[moment.step, moment.until],
        y=[literal(moment.row)] * 2,
        mode="lines",
        line={"color": colour, "width": width},
        showlegend=False,
        hoverinfo="skip",
    )


def _symbols(kind: str, marks: Sequence[Moment], symbol: str, colour: str) -> go.Scatter:
    numbered = marks[0].number is not None
    thin = symbol == "line-ns"
    return go.Scatter(
        x=[moment.step for moment in marks],
        y=[literal(moment.row) for moment in marks],
        mode="markers+text" if numbered else "markers",
        text=[str(moment.number or "") for moment in marks],
        textposition="middle right",
        textfont={"size": 12},
        marker={"symbol": symbol, "size": 16 if thin else 11, "color": colour, "line": _edge(thin, colour)},
        name=kind,
        customdata=[literal(moment.text) for moment in marks],
        hovertemplate="step %{x}: %{customdata}<extra></extra>",
        cliponaxis=False,
    )


def _edge(thin: bool, colour: str) -> dict[str, object]:
    return {"width": 2.5, "color": colour} if thin else {"width": 0.8, "color": "white"}


def _ends(ends: Sequence[Moment]) -> go.Scatter:
    return go.Scatter(
        x=[moment.until for moment in ends],
        y=[literal(moment.row) for moment in ends],
        mode="markers",
        marker={"symbol": "line-ns", "size": 12, "line": {"width": 2, "color": VERMILLION}},
        name="recovered",
        hovertemplate="recovered at step %{x}<extra></extra>",
    )


def _uprights(figure: go.Figure, timeline: Timeline) -> None:
    onsets = [moment for moment in timeline.moments if moment.kind == ONSET]
    for moment in onsets:
        figure.add_vline(x=moment.step, line={"color": BLACK, "width": 1, "dash": "dot"})
    for step in dict.fromkeys(moment.step for moment in onsets):
        words = {"text": f"onset, step {step}", "showarrow": False, "font": {"size": 13}}
        figure.add_annotation(x=step, y=1, xref="x", yref="paper", yanchor="bottom", **words)


def _finished(figure: go.Figure, timeline: Timeline, name: str) -> go.Figure:
    rows = timeline.rows
    plot_px = ROW_PX * max(len(rows), 1)
    entries = sum(bool(trace.showlegend is not False) for trace in figure.data)  # pyright: ignore
    bottom_px = _AXIS_PX + legend_px(entries, ON_PAGE)
    first, last = timeline.span
    room = max(1, last - first) * 0.03
    order = [literal(row) for row in rows[::-1]]
    figure.update_yaxes(categoryorder="array", categoryarray=order, range=[-0.6, len(rows) - 0.4])
    figure.update_xaxes(title={"text": "step", "font": {"size": 14}}, range=[first - room, last + room])
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -64 / plot_px, "yanchor": "top"})
    title, height = f"What happened when: {literal(name)}", _TOP_PX + plot_px + bottom_px
    finish(figure, title=title, alt=_alt(timeline, name), table=timeline.table(), height=height, top=_TOP_PX)
    meta: Any = figure.layout.meta  # pyright: ignore[reportAttributeAccessIssue]
    return figure.update_layout(margin_b=bottom_px, meta={**meta, "entries": entries})


def _alt(timeline: Timeline, name: str) -> str:
    parts = [f"Timeline of {name}, steps {timeline.span[0]} to {timeline.span[1]}"]
    onsets = [str(moment.step) for moment in timeline.moments if moment.kind == ONSET]
    parts.append(f"onset at step {' and '.join(onsets)}" if onsets else "no onset")
    alarms = [moment for moment in timeline.moments if moment.kind in (UP, DOWN, NOT_FINITE)]
    parts.append(
        counted(len(alarms) + timeline.beyond, "alarm") + (", the last ones not drawn" if timeline.beyond else "")
    )
    done = [f"{m.number} {m.kind} at step {m.step}" for m in timeline.moments if m.row.startswith(ACTIONS)]
    parts += [f"actions: {', '.join(done)}"] if done else []
    aside = counted(len(timeline.aside), "action")
    parts += [f"{aside} at no step of the run only in the table"] if timeline.aside else []
    return "; ".join(parts) + "."
