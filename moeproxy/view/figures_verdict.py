"""Figures of a comparison: responses to a fault, agreement of the proxies with controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.errors import MoeproxyError
from moeproxy.triage.result import Comparison, ProxyResult
from moeproxy.view.style import GREY, ORIGINAL, finish, method_colour, method_symbol

_TICKS = (-300, -30, -3, 0, 3, 30, 300)
_USUAL_THRESHOLD = 4.0  # the colour bar is labelled for this one; the cells hold the exact numbers


@dataclass(frozen=True)
class _Panel:
    """Responses of one model, signals x windows, strongest signal of the original first."""

    model: str
    response_XW: np.ndarray
    threshold: float


def response_heatmap(comparison: Comparison, *, models: Sequence[str] | None = None) -> go.Figure:
    """Draw the response of every compared signal, window by window, for the original and the proxies.

    Colours follow asinh(response / threshold), so that weak responses stay visible beside strong ones; the
    numbers in the cells are responses in healthy spreads.

    Args:
        comparison: one fault.
        models: proxies to draw beside the original; by default the first five.
    """
    shown = [p for p in comparison.proxies if models is None or p.model in models]
    shown = shown if models is not None else shown[:5]
    order = _by_strength(np.array(comparison.response))
    panels = [_Panel(comparison.original, np.array(comparison.response)[order], comparison.control.threshold)]
    panels += [_Panel(p.model, np.array(p.response)[order], p.control.threshold) for p in shown]
    signals = [comparison.signals[x] for x in order]
    windows = [f"{start}–{stop - 1}" for start, stop in comparison.windows]
    titles = [panel.model for panel in panels]
    figure = make_subplots(cols=len(panels), shared_yaxes=True, horizontal_spacing=0.012, subplot_titles=titles)
    for column, panel in enumerate(panels, start=1):
        figure.add_trace(_cells(panel, [name.replace("_", " ") for name in signals], windows), row=1, col=column)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False, tickangle=-45)
    figure.update_layout(coloraxis=_colours())
    figure = finish(
        figure,
        title=f"Response to {comparison.fault} in healthy spreads, by window of steps",
        alt=_response_alt(comparison, [p.model for p in shown]),
        table=_response_table(panels, signals, windows),
        height=190 + 23 * len(signals),
        width=230 + 150 * len(panels),
    )
    return figure.update_layout(margin={"b": 85})


def agreement(comparisons: Sequence[Comparison]) -> go.Figure:
    """Draw the rank correlation of every proxy with its interval, its null level and the original's ceiling.

    Args:
        comparisons: one for each fault; one panel each.

    Raises:
        MoeproxyError: no proxy was compared.
    """
    drawn = [comparison for comparison in comparisons if comparison.proxies]
    if not drawn:
        raise MoeproxyError("no proxy was compared", expected="a comparison with proxies")
    titles = [comparison.fault for comparison in drawn]
    figure = make_subplots(cols=len(drawn), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.04)
    models = list(dict.fromkeys(p.model for comparison in drawn for p in comparison.proxies))
    known: set[str] = set()
    for column, comparison in enumerate(drawn, start=1):
        for trace in _agreement_traces(comparison):
            # One entry in the legend for each name, whichever panel has it first.
            figure.add_trace(trace.update(showlegend=trace.name not in known), row=1, col=column)
            known.add(str(trace.name))
    figure.update_yaxes(categoryorder="array", categoryarray=models[::-1], range=[-0.6, len(models) - 0.4])
    figure.update_xaxes(title_text="rank correlation", range=[_lowest(drawn) - 0.08, 1.05])
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -75 / (34 * len(models)), "yanchor": "top"})
    table = pd.concat([comparison.to_frame() for comparison in drawn], ignore_index=True)
    columns = ["fault", "model", "rank", "rank_low", "rank_high", "rank_null_high", "verdict"]
    return finish(
        figure,
        title="Agreement of the proxies' responses with the original's",
        alt=_agreement_alt(drawn),
        table=pd.DataFrame(table[columns].round(3)),
        height=230 + 34 * len(models),
        width=200 + 320 * len(drawn),
    )


def _by_strength(response_XW: np.ndarray) -> np.ndarray:
    return np.argsort(-np.nan_to_num(np.abs(response_XW)).max(1), kind="stable")


def _cells(panel: _Panel, signals: list[str], windows: list[str]) -> go.Heatmap:
    return go.Heatmap(
        z=np.arcsinh(panel.response_XW / panel.threshold),
        x=windows,
        y=signals,
        coloraxis="coloraxis",
        text=[[_cell(value) for value in row] for row in panel.response_XW],
        texttemplate="%{text}",
        textfont={"size": 11},
        xgap=1,
        ygap=1,
        hovertemplate=f"{panel.model}, %{{y}}, steps %{{x}}: %{{text}} healthy spreads<extra></extra>",
    )


def _cell(value: float) -> str:
    if np.isnan(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 0.5 else "0"


def _colours() -> dict[str, object]:
    places = [float(np.arcsinh(tick / _USUAL_THRESHOLD)) for tick in _TICKS]
    bar = {
        "title": {"text": "spreads"},
        "thickness": 14,
        "tickvals": places,
        "ticktext": [str(t) for t in _TICKS],
    }
    return {"colorscale": "PuOr_r", "cmin": -6, "cmax": 6, "colorbar": bar}


def _response_table(panels: list[_Panel], signals: list[str], windows: list[str]) -> pd.DataFrame:
    data: dict[str, list[object]] = {"signal": list(signals)}
    for panel in panels:
        for w, window in enumerate(windows):
            data[f"{panel.model} {window}"] = [round(float(value), 1) for value in panel.response_XW[:, w]]
    return pd.DataFrame(data)


def _response_alt(comparison: Comparison, models: list[str]) -> str:
    moved = ", ".join(comparison.significant[:6]) or "none"
    beside = f" beside {', '.join(models)}" if models else ""
    count = f"{len(comparison.significant)} of {len(comparison.signals)} signals"
    return (
        f"Responses to {comparison.fault} of {comparison.original}{beside}: on the original {count} move "
        f"significantly, the strongest being {moved}."
    )


def _agreement_traces(comparison: Comparison) -> list[go.Scatter]:
    methods = dict.fromkeys(p.method for p in comparison.proxies)
    traces = [_dots(method, [p for p in comparison.proxies if p.method == method]) for method in methods]
    null = go.Scatter(
        x=[p.rank_null_high for p in comparison.proxies],
        y=[p.model for p in comparison.proxies],
        mode="markers",
        name="95% of proxies without response stay left of this",
        marker={"symbol": "line-ns", "size": 16, "line": {"width": 2.5, "color": GREY}},
        hovertemplate="%{y}: without response below %{x:.2f}<extra></extra>",
    )
    ceiling = comparison.rank_ceiling.mean
    best = go.Scatter(
        x=[ceiling, ceiling],
        y=[comparison.proxies[0].model, comparison.proxies[-1].model],
        mode="lines",
        name="original with itself, between seeds",
        line={"color": ORIGINAL, "width": 1.5, "dash": "dash"},
        hovertemplate="original with itself: %{x:.2f}<extra></extra>",
    )
    return [*traces, null, *([best] if np.isfinite(ceiling) else [])]


def _dots(method: str, results: list[ProxyResult]) -> go.Scatter:
    up = [p.rank.high - p.rank.mean for p in results]
    down = [p.rank.mean - p.rank.low for p in results]
    marker = {"symbol": method_symbol(method), "size": 11, "color": method_colour(method)}
    return go.Scatter(
        x=[p.rank.mean for p in results],
        y=[p.model for p in results],
        mode="markers",
        name=method,
        marker=marker | {"line": {"width": 2}},
        error_x={"type": "data", "array": up, "arrayminus": down, "thickness": 1.5, "width": 5},
        customdata=[p.verdict for p in results],
        hovertemplate="%{y}: %{x:.2f}, %{customdata}<extra></extra>",
    )


def _lowest(comparisons: list[Comparison]) -> float:
    ends = [value for c in comparisons for p in c.proxies for value in (p.rank.mean, p.rank.low, p.rank_null_high)]
    return min([0.0, *(value for value in ends if np.isfinite(value))])


def _agreement_alt(comparisons: list[Comparison]) -> str:
    parts = [f"{c.fault}: " + ", ".join(f"{p.model} {p.rank.mean:.2f}" for p in c.proxies) for c in comparisons]
    return f"Rank correlation of the responses with the original's. {'. '.join(parts)}."
