"""Signals of a log over its steps, at any length: what the screen can show is drawn, and nothing odd is lost.

Pure functions from a `LogView` to a figure and to new values for its traces. Number and order of the traces never
change, so a live figure is updated in place; `values` takes the part of the steps that is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.signals import signal_of
from moeproxy.traces.trace import Trace
from moeproxy.view.log_events import Event
from moeproxy.view.log_series import KINDS, Series
from moeproxy.view.log_view import MAX_RUNS, MAX_SIGNALS, LogView, log_view
from moeproxy.view.sampling import MAX_POINTS
from moeproxy.view.style import BLACK, FONT, GREEN, GREY, GRID, INK, ORIGINAL, PROXY, PURPLE, finish, literal

LEAST_WIDTH_PX = 560
_PANEL_PX, _GAP_PX, _TOP_PX, _BOTTOM_PX = 165, 38, 112, 118
_FEW = 60  # points of a line below which each has a marker
_COLOURS, _DASHES = (ORIGINAL, PROXY), ("solid", "dot")
_STRIP = 10  # number of the first axis that marks stand on, whose height is that of its panel and never zoomed
_ASIDE = 0.07  # by which the second run's marks stand farther inside, so as not to hide the first one's

Properties = dict[str, Any]


def log_figure(runs: Sequence[LogTrace | Trace], signals: Sequence[str] | None = None) -> go.Figure:
    """Draw signals of a run over its steps, or of two runs laid over each other.

    The first run is blue and solid, the second vermillion and dotted. A line is interrupted where a value is no
    number; what stood there is marked at the edge of the panel. A panel whose signal the two runs define differently
    says so. Of long runs the extremes of every column of pixels are drawn.

    Args:
        runs: one or two, with metrics.
        signals: of the first run, at most six; by default the usual ones.

    Raises:
        MoeproxyError: too many runs or signals, or the first run lacks one.
        TraceError: a log has no metric.

    Example:
        >>> theirs, = read("trainer_state.json")
        >>> log_figure([theirs, proxy_trace], ["grad_norm"])
    """
    view = log_view(runs, signals)
    figure = whole_figure(view)
    height = int(figure.layout.height)  # pyright: ignore[reportAttributeAccessIssue]
    finish(figure, title=title(view), alt=_alt(view), table=view.table(), height=height, top=_TOP_PX)
    return figure.update_layout(margin_b=_BOTTOM_PX)


def whole_figure(view: LogView) -> go.Figure:
    """Return the complete figure of a view, all steps seen."""
    properties = values(view)
    figure = go.Figure([go.Scatter(fixed).update(new) for fixed, new in zip(_styles(), properties, strict=True)])
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "color": INK},
        margin={"l": 70, "r": 15, "t": _TOP_PX, "b": _BOTTOM_PX},
        hovermode="x unified",
        xaxis={"gridcolor": GRID, "zeroline": False, "title": {"text": "step"}, "autorange": True},
        annotations=[{"text": "", "showarrow": False} for _ in range(MAX_SIGNALS)],
    )
    for row in range(MAX_SIGNALS):
        main, strip = _axes(row)
        marks = {"overlaying": main, "range": [0, 1], "fixedrange": True, "visible": False}
        figure.update_layout({_long(main): {"gridcolor": GRID, "zeroline": False}, _long(strip): marks})
    return figure.update_layout(layout_values(view))


def layout_values(view: LogView) -> Properties:
    """Return the parts of the layout that depend on the view."""
    words, n = title(view), max(len(view.signals), 1)
    above = 24 if "<br>" in words else 12  # plotly sets the first of two lines higher than a lone one
    plot_px = n * _PANEL_PX + (n - 1) * _GAP_PX
    layout: Properties = {
        "height": plot_px + _TOP_PX + _BOTTOM_PX,
        "title": {"text": words, "x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"t": above}},
        "legend": {"orientation": "h", "x": 0, "y": 1 + 22 / plot_px, "yanchor": "bottom"},
        "legend2": {"orientation": "h", "x": 0, "y": -58 / plot_px, "yanchor": "top", "itemclick": False},
        "annotations": [],
    }
    layout["legend2"]["itemdoubleclick"] = False
    for row in range(MAX_SIGNALS):
        layout |= _panel(view, row, plot_px)
        layout["annotations"].append(_heading(view, row, plot_px))
    layout["xaxis"] = {"anchor": _axes(n - 1)[0]}
    return layout


def title(view: LogView) -> str:
    """Return the figure's title."""
    if not view.signals:
        return "No signal is chosen" if view.runs else "Nothing is read yet"
    one = len(view.signals) == 1
    words = f"{len(view.signals)} signal{'' if one else 's'}, steps {view.span[0]:,} to {view.span[1]:,}"
    if not any(series.finite_S.size > MAX_POINTS for name in view.signals for series in view.drawn(name)):
        return words
    return f"{words}<br><sup>of long lines the extremes of every column of pixels are drawn; zoom in to see all</sup>"


def values(view: LogView, seen: tuple[float, float] | None = None) -> list[Properties]:
    """Return, per trace of `whole_figure`, the properties that depend on the view and on the part seen.

    Args:
        view: what is looked at.
        seen: first and last step of the part, None for all.
    """
    low, high = seen or view.span
    ends = [float(step) for step in view.span]
    found: list[Properties] = [{"x": ends, "y": [0.5, 0.5]}, *_legend(view)]
    for row in range(MAX_SIGNALS):
        name = view.signals[row] if row < len(view.signals) else ""
        for slot in range(MAX_RUNS):
            run = view.runs[slot] if slot < len(view.runs) else None
            series = run.series.get(name) if run else None
            new = _parts(series, literal(run.label) if run else "", _COLOURS[slot], row == 0, low, high)
            if slot and series is not None:
                new[-1]["y"] = [y + _ASIDE if y < 0.5 else y - _ASIDE for y in new[-1]["y"]]
            found += new
        for what in ("resumes", "failures"):
            events = [event for run in view.runs for event in getattr(run, what)] if name else []
            found.append(_lines(what, events, row == 0))
        found.append(_lines("onsets", view.onsets.get(name, ()), row == 0))
    return found


def _parts(series: Series | None, label: str, colour: str, first: bool, low: float, high: float) -> list[Properties]:
    """Return line, single points, replaced values and marks of one signal of one run."""
    if series is None:
        hidden = {"x": [None], "y": [None], "name": label, "showlegend": first and bool(label)}
        none: Properties = {"x": [], "y": [], "text": []}
        return [hidden, {"x": [], "y": []}, none, none | {"marker": {"symbol": [], "color": []}}]
    x, y = series.drawn(low, high)
    single = _singles(y) if np.count_nonzero(np.isfinite(y)) > _FEW else np.isfinite(y)
    old_x, old_y, why = series.replaced(low, high)
    said = [f"{value:.6g}, {words}" for value, words in zip(old_y, why, strict=True)]
    return [
        {"x": x, "y": y, "name": label, "showlegend": first},
        {"x": x[single], "y": y[single]},
        {"x": old_x, "y": old_y, "text": said},
        _marks(series, low, high, colour),
    ]


def _singles(y: np.ndarray) -> np.ndarray:
    """Return which points stand between two interruptions, where a line draws nothing."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    return finite[1:-1] & ~finite[:-2] & ~finite[2:]


def _marks(series: Series, low: float, high: float, colour: str) -> Properties:
    """Return marks for what is no number, grey where another value took its place."""
    x, y, text, symbols, colours = [], [], [], [], []
    for kind in KINDS:
        now, old = series.marks(kind, low, high), series.replaced_marks(kind, low, high)
        for marks, shade, words in ((old, GREY, ", replaced"), (now, colour, "")):
            n = len(marks.first_M)
            x.append(marks.first_M)
            for first, last, count in zip(marks.first_M, marks.last_M, marks.count_M, strict=True):
                of = "" if count == 1 else f": {count:,} of the steps {first} to {last}"
                text.append(f"{kind.name}{words}{of}")
            y += [kind.height] * n
            symbols += [kind.symbol] * n
            colours += [shade] * n
    marker = {"symbol": symbols, "color": colours}
    return {"x": np.concatenate(x), "y": y, "text": text, "marker": marker}


def _lines(what: str, events: Sequence[Event], first: bool) -> Properties:
    """Return upright lines where something happened."""
    x = [value for event in events for value in (event.step, event.step, None)]
    text = [part for event in events for part in (literal(event.text), literal(event.text), "")]
    name = {"resumes": "resumed here", "failures": "failure or early end", "onsets": "departs from here on"}[what]
    count = "" if what == "onsets" else f" ({len(events)})"  # the panels have different ones
    entry = {"name": f"{name}{count}", "showlegend": first and bool(events)}
    return {"x": x, "y": [0.0, 1.0, None] * len(events), "text": text, **entry}


def _legend(view: LogView) -> list[Properties]:
    """Return the entries of marks and replaced values, of which there is one for all panels and runs."""
    drawn = [series for name in view.signals for series in view.drawn(name)]
    counts = {kind.name: sum(_count(series, kind.name) for series in drawn) for kind in KINDS}
    counts["earlier value, replaced"] = sum(series.replaced_steps_R.size for series in drawn)
    return [{"name": f"{name} ({count:,})", "showlegend": count > 0} for name, count in counts.items()]


def _count(series: Series, kind: str) -> int:
    return series.counts().get(kind, 0) + len(series.replaced_places.get(kind, ()))


def _styles() -> list[Properties]:
    """Return what never changes of each trace."""
    ends = {"yaxis": _axes(0)[1], "mode": "markers", "opacity": 0.0, "hoverinfo": "skip", "showlegend": False}
    found: list[Properties] = [ends]
    entry = {"x": [None], "y": [None], "mode": "markers", "legend": "legend2", "hoverinfo": "skip"}
    symbols = [{"symbol": kind.symbol, "size": 8, "color": INK, "line": {"width": 1.5}} for kind in KINDS]
    found += [entry | {"marker": marker} for marker in (*symbols, _old_marker(GREY))]
    for row in range(MAX_SIGNALS):
        main, strip = _axes(row)
        for slot in range(MAX_RUNS):
            found += _run_styles(main, strip, f"run {slot}", _COLOURS[slot], _DASHES[slot])
        for colour, dash in ((PURPLE, "dash"), (BLACK, "dashdot"), (GREEN, "solid")):
            line = {"color": colour, "width": 1.6, "dash": dash}
            upright = {"yaxis": strip, "mode": "lines", "line": line, "legend": "legend2", "legendgroup": dash}
            found.append(upright | {"hovertemplate": "%{text}<extra></extra>"})
    return found


def _run_styles(main: str, strip: str, group: str, colour: str, dash: str) -> list[Properties]:
    common = {"yaxis": main, "legendgroup": group}
    text = "%{text}<extra></extra>"
    quiet = {"mode": "markers", "showlegend": False}
    line = {"color": colour, "width": 1.7, "dash": dash}
    mark = {"size": 10, "line": {"width": 1.5, "color": "white"}}  # a mark upon a line of its own colour is seen too
    return [
        common | {"mode": "lines", "line": line, "hovertemplate": "%{y:.6g}"},
        common | quiet | {"marker": {"color": colour, "size": 4}, "hoverinfo": "skip"},
        common | quiet | {"marker": _old_marker(colour), "opacity": 0.55, "hovertemplate": text},
        common | quiet | {"yaxis": strip, "marker": mark, "hovertemplate": text, "cliponaxis": False},
    ]


def _old_marker(colour: str) -> Properties:
    return {"symbol": "circle-open", "size": 6, "color": colour, "line": {"width": 1}}


def _panel(view: LogView, row: int, plot_px: int) -> Properties:
    """Return the axes of a panel; those that are not used have no height worth speaking of and are not seen."""
    main, strip = _axes(row)
    if row >= max(len(view.signals), 1):
        flat = [0.0, 0.001]
        return {_long(main): {"domain": flat, "visible": False}, _long(strip): {"domain": flat}}
    top = 1 - row * (_PANEL_PX + _GAP_PX) / plot_px
    domain = [max(top - _PANEL_PX / plot_px, 0.0), top]
    name = view.signals[row] if row < len(view.signals) else ""
    kind = "log" if name and view.is_log(name) else "linear"
    unit = signal_of(name).unit if name else ""
    axis = {"domain": domain, "visible": True, "type": kind, "title": {"text": unit}}
    return {_long(main): axis, _long(strip): {"domain": domain}}


def _heading(view: LogView, row: int, plot_px: int) -> Properties:
    """Return what stands above a panel: the signal, the keys it was read from, and whether definitions differ."""
    top = 1 - row * (_PANEL_PX + _GAP_PX) / plot_px
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": max(top, 0.0), "yref": "paper", "yanchor": "bottom"}
    fixed = {"showarrow": False, "font": {"size": 13}, **place}
    if row >= len(view.signals):
        return {"text": "", **fixed}
    name = view.signals[row]
    keys = dict.fromkeys(literal(series.key) for series in view.drawn(name) if series.key != name)
    lost = [literal(run.label) for run in view.runs if name not in run.series]
    parts = [f"<b>{name.replace('_', ' ')}</b>", *keys]
    parts += ["≠ defined differently in the two runs"] * (name in view.notes)
    parts += [f"{label} has none" for label in lost]
    return {"text": "  ·  ".join(parts), **fixed}


def _alt(view: LogView) -> str:
    notes = [f"Defined differently: {name}: {text}." for name, text in view.notes.items()]
    return " ".join([view.describe(), *notes])


def _axes(row: int) -> tuple[str, str]:
    """Return the names of a panel's axis and of the one its marks stand on."""
    return "y" if row == 0 else f"y{row + 1}", f"y{_STRIP + row}"


def _long(axis: str) -> str:
    return f"yaxis{axis[1:]}"
