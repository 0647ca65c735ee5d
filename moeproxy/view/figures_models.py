"""Figures of models: what they cost, and how well they still answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.errors import MoeproxyError
from moeproxy.view.style import GREY, ORIGINAL, PROXY, finish, method_colour, method_symbol

MEASURES = {
    "params": "parameters",
    "nbytes": "weights, MB",
    "seconds_per_step": "seconds a step",
    "peak_mb": "process memory, MB",
}
"""What a cost table may hold beside `model`, and how it is called."""


def method_comparison(table: pd.DataFrame, *, original: float | None = None, chance: float | None = None) -> go.Figure:
    """Draw accuracy by way of choosing experts and number kept, with error bars.

    Args:
        table: columns `method`, `n_experts`, `accuracy`, and optionally `low` and `high`, the ends of the
            interval.
        original: accuracy of the original, drawn as a line.
        chance: accuracy of guessing, drawn as a line.

    Raises:
        MoeproxyError: a column or every row is missing.
    """
    need(table, ("method", "n_experts", "accuracy"))
    rows: list[dict[str, Any]] = table.to_dict("records")
    sizes = sorted({row["n_experts"] for row in rows}, reverse=True)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = go.Figure()
    for i, method in enumerate(methods):
        # Side by side, so that error bars do not lie on each other.
        shift = 0.11 * (i - (len(methods) - 1) / 2)
        figure.add_trace(_method_dots(method, [row for row in rows if row["method"] == method], sizes, shift))
    _level(figure, original, "original", ORIGINAL, "solid")
    _level(figure, chance, "chance", GREY, "dot")
    figure.update_xaxes(
        tickvals=list(range(len(sizes))),
        ticktext=[f"{n} experts" for n in sizes],
        range=[-0.6, len(sizes) - 0.4],
        showgrid=False,
    )
    figure.update_yaxes(title_text="accuracy", rangemode="tozero")
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"})
    title = "Accuracy left after pruning, by way of choosing experts"
    return finish(figure, title=title, alt=_method_alt(rows, sizes, original), table=table, height=470)


def cost_bars(table: pd.DataFrame) -> go.Figure:
    """Draw what original and proxies cost.

    Args:
        table: column `model` and any of `MEASURES`; the first row is the original.

    Raises:
        MoeproxyError: `model`, every measure or every row is missing.
    """
    need(table, ("model",))
    measures = [name for name in MEASURES if name in table.columns and not table[name].isna().to_numpy().all()]
    if not measures:
        raise MoeproxyError("the cost table holds no measure", expected=f"a column of {', '.join(MEASURES)}")
    titles = [MEASURES[name] for name in measures]
    figure = make_subplots(cols=len(measures), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.06)
    for column, name in enumerate(measures, start=1):
        values = table[name].to_numpy(float) / (1e6 if name == "nbytes" else 1)
        figure.add_trace(_bars(list(table["model"]), values), row=1, col=column)
        figure.update_xaxes(range=[0, float(np.nanmax(values)) * 1.35], nticks=4, row=1, col=column)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    alt = _cost_alt(table.to_dict("records"), measures)
    height, width = 90 + 44 * len(table), 200 + 190 * len(measures)
    return finish(figure, title="", alt=alt, table=table, height=height, width=width, top=36)


def need(table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise MoeproxyError when a table lacks a column or has no row."""
    lost = [name for name in columns if name not in table.columns]
    if lost or table.empty:
        found = f"the table lacks {', '.join(lost) or 'rows'}"
        raise MoeproxyError(found, expected=f"rows with the columns {', '.join(columns)}")


def _method_dots(method: str, rows: list[dict[str, Any]], sizes: list[int], shift: float) -> go.Scatter:
    marker = {"symbol": method_symbol(method), "size": 11, "color": method_colour(method)}
    return go.Scatter(
        x=[sizes.index(row["n_experts"]) + shift for row in rows],
        y=[row["accuracy"] for row in rows],
        name=method,
        mode="markers",
        marker=marker | {"line": {"width": 2}},
        error_y=_error(rows),
        customdata=[row["n_experts"] for row in rows],
        hovertemplate=f"{method}, %{{customdata}} experts: %{{y:.3f}}<extra></extra>",
    )


def _error(rows: list[dict[str, Any]]) -> dict[str, object] | None:
    if not {"low", "high"} <= set(rows[0]):
        return None
    up = [row["high"] - row["accuracy"] for row in rows]
    down = [row["accuracy"] - row["low"] for row in rows]
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.5, "width": 5}


def _level(figure: go.Figure, value: float | None, name: str, colour: str, dash: str) -> None:
    if value is None:
        return
    figure.add_hline(
        y=value,
        line={"color": colour, "dash": dash, "width": 1.5},
        annotation={"text": f"{name} {value:.2f}", "font": {"color": colour}, "yanchor": "bottom"},
        annotation_position="top right",
    )


def _method_alt(rows: list[dict[str, Any]], sizes: list[int], original: float | None) -> str:
    parts = []
    for size in sizes:
        here = [row for row in rows if row["n_experts"] == size]
        methods = dict.fromkeys(row["method"] for row in here)
        mean = {m: float(np.mean([row["accuracy"] for row in here if row["method"] == m])) for m in methods}
        best, worst = max(mean, key=lambda m: mean[m]), min(mean, key=lambda m: mean[m])
        parts.append(f"at {size} experts {best} is best with {mean[best]:.2f}, {worst} worst with {mean[worst]:.2f}")
    tail = "" if original is None else f"; the original has {original:.2f}"
    return f"Accuracy after pruning: {'; '.join(parts)}{tail}."


def _bars(models: list[str], values: np.ndarray) -> go.Bar:
    return go.Bar(
        x=values,
        y=models,
        orientation="h",
        marker={"color": [ORIGINAL] + [PROXY] * (len(models) - 1)},
        text=[_short(value) for value in values],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        hovertemplate="%{y}: %{x:,.4g}<extra></extra>",
    )


def _cost_alt(rows: list[dict[str, Any]], measures: list[str]) -> str:
    first = rows[0]
    others = [f"{row['model']}: {_ratios(row, first, measures)}" for row in rows[1:]]
    told = "; ".join(others) or "no proxy"
    return f"Cost as a share of {first['model']}. {told}."


def _ratios(row: dict[str, Any], first: dict[str, Any], measures: list[str]) -> str:
    known = [name for name in measures if np.isfinite(row[name]) and np.isfinite(first[name]) and first[name]]
    return ", ".join(f"{MEASURES[name].split(',')[0]} {row[name] / first[name]:.0%}" for name in known) or "unknown"


def _short(value: float) -> str:
    if np.isnan(value):
        return "not measured"
    if value >= 1e5:
        return f"{value / 1e6:.2f} M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
