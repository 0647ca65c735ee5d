"""The figure of the proxy panel: what is kept in every layer, in one layer, what that breaks, and what it saves.

Pure functions from a `PanelState` to a figure, to new values for its traces, and to a sentence. The number
and order of traces never change, so a live figure is updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots

from moeproxy.experts.profile import ExpertProfile
from moeproxy.proxy.cost import Cost, devices
from moeproxy.proxy.damage import Damage
from moeproxy.proxy.plan import KeepPlan
from moeproxy.view.apps.selection import runs
from moeproxy.view.style import BLUE, FONT, GREEN, GREY, INK, ORANGE, ORIGINAL, PROXY

# A width is set because a figure that is drawn before its cell is laid out takes 700 pixels for good.
WIDTH_PX, HEIGHT_PX = 950, 760
_GREYS = [[0.0, "#f2f2f2"], [1.0, "#7d7d7d"]]


@dataclass(frozen=True)
class PanelState:
    """What the panel shows: a plan on a profile, one chosen layer, and the cost before and after.

    Attributes:
        profile: the calibration profile that the plan was made from.
        plan: which experts are kept.
        layer: decoder layer number of the lower left part, one of `profile.moe_layers`.
        original: cost of the original model.
        predicted: cost of the proxy that the plan would give.
        damage: what the plan is predicted to cost in each layer.
    """

    profile: ExpertProfile
    plan: KeepPlan
    layer: int
    original: Cost
    predicted: Cost
    damage: Damage

    @cached_property
    def share_LE(self) -> Float[np.ndarray, "L E"]:
        """Percent of a layer's routed tokens that each expert receives."""
        load_LE = self.profile.load_LE
        return 100.0 * load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1)

    @cached_property
    def kept_LE(self) -> Bool[np.ndarray, "L E"]:
        """Whether an expert is kept."""
        kept_LE = np.zeros(self.profile.load_LE.shape, dtype=bool)
        for row, layer in enumerate(self.profile.moe_layers):
            kept_LE[row, list(self.plan.keep[layer])] = True
        return kept_LE

    @property
    def row(self) -> int:
        """Index of the chosen layer on the L axis."""
        return self.profile.moe_layers.index(self.layer)


def proxy_figure(state: PanelState) -> go.Figure:
    """Return the complete figure for `state`."""
    figure = make_subplots(
        rows=3,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}], [{"colspan": 2}, None]],
        row_heights=[0.36, 0.46, 0.18],
        vertical_spacing=0.14,
        horizontal_spacing=0.1,
        subplot_titles=(
            "Experts kept in every layer (grey: dropped)",
            layer_title(state),
            "Predicted damage in every layer",
            "Predicted size",
        ),
    )
    cells = ((1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (2, 2), (2, 2))
    for trace, (row, col) in zip(_traces(state), cells, strict=True):
        figure.add_trace(trace, row=row, col=col)
    figure.update_annotations(font_size=14)
    _label_axes(figure, state)
    figure.update_layout(
        width=WIDTH_PX,
        height=HEIGHT_PX,
        template="plotly_white",
        font={"family": FONT, "color": INK},
        title={"text": title(state), "x": 0.01, "xanchor": "left"},
        barmode="overlay",
        bargap=0.15,
        margin={"l": 70, "r": 30, "t": 90, "b": 60},
        legend={"orientation": "h", "x": 0.0, "y": -0.09, "yanchor": "top", "title": {"text": ""}},
        coloraxis=_colours(state),
        uirevision="panel",  # a redraw keeps the reader's zoom
    )
    return figure


def title(state: PanelState) -> str:
    """Return the figure's title: the choice and what it costs."""
    plan, share = state.plan, state.predicted.nbytes / state.original.nbytes
    choice = f"{plan.n_keep} of {state.profile.n_experts} experts per layer, method {plan.method}"
    return f"{choice}: {100 * share:.0f} % of the bytes"


def layer_title(state: PanelState) -> str:
    """Return the title of the lower left part."""
    return f"Layer {state.layer}: share of tokens"


def describe(state: PanelState) -> str:
    """Return what the figure shows for the chosen layer, in words."""
    share_E, kept_E = state.share_LE[state.row], state.kept_LE[state.row]
    kept = "all experts" if kept_E.all() else f"experts {runs(np.flatnonzero(kept_E).tolist())}"
    sentence = f"Layer {state.layer} keeps {kept}; they received {share_E[kept_E].sum():.0f} % of its tokens."
    if not kept_E.all():
        lost = int(np.where(kept_E, -1.0, share_E).argmax())
        sentence += f" The most used expert dropped is {lost} ({share_E[lost]:.1f} %)."
    lost_L, whole_L = 100.0 * state.damage.gate_lost_L, state.damage.tokens_whole_L
    sentence += f" {lost_L[state.row]:.0f} % of its gate mass loses its expert"
    sentence += "." if whole_L is None else f"; {100 * whole_L[state.row]:.0f} % of its tokens keep all theirs."
    sizes = f"{_megabytes(state.original):,.2f} to {_megabytes(state.predicted):,.2f} MB"
    return f"{sentence} The weights shrink from {sizes}."


def size_table(state: PanelState) -> pd.DataFrame:
    """Return the size of original and proxy, and the devices that training their weights takes."""
    rows = [
        {
            "model": name,
            "experts per layer": item.n_experts,
            "parameters": f"{item.params:,}",
            "used by a token": f"{item.params_active:,}",
            "weights": f"{_megabytes(item):,.2f} MB",
            "share of the original": f"{item.nbytes / state.original.nbytes:.0%}",
            "80 GiB devices for training": devices(item),
        }
        for name, item in (("original", state.original), ("proxy", state.predicted))
    ]
    return pd.DataFrame(rows)


def values(state: PanelState) -> list[dict[str, Any]]:
    """Return, per trace of `proxy_figure`, the properties that depend on the state."""
    share_LE, kept_LE = state.share_LE, state.kept_LE
    share_E, kept_E = share_LE[state.row], kept_LE[state.row]
    sizes = [_megabytes(state.original), _megabytes(state.predicted)]
    whole_L = state.damage.tokens_whole_L
    return [
        {"z": _only(share_LE, kept_LE)},
        {"z": _only(share_LE, ~kept_LE)},
        {"y": np.where(kept_E, share_E, 0.0)},
        {"y": np.where(kept_E, 0.0, share_E)},
        {"x": sizes, "text": [f"{size:,.2f} MB" for size in sizes]},
        {"y": 100.0 * state.damage.gate_lost_L},
        {"y": [] if whole_L is None else 100.0 * whole_L},
    ]


def _traces(state: PanelState) -> list[go.Heatmap | go.Bar | go.Scatter]:
    kept, dropped, bars_kept, bars_dropped, sizes, lost, whole = values(state)
    layers = [str(layer) for layer in state.profile.moe_layers]
    experts = np.arange(state.profile.n_experts)
    gap = 1 if state.profile.n_experts <= 64 else 0  # between many small cells nothing but gaps would be seen
    grid = {"x": experts, "y": [str(layer) for layer in state.profile.moe_layers], "xgap": gap, "ygap": gap}
    hover = "layer %{y}, expert %{x}: %{z:.2f} % of tokens"
    greys = {"colorscale": _GREYS, "zmin": 0, "zmax": _top(state), "showscale": False}
    bar_hover = "expert %{x}: %{y:.2f} % of tokens<extra></extra>"
    stripes = {"color": GREY, "pattern": {"shape": "/", "size": 5, "solidity": 0.35}}
    return [
        go.Heatmap(**kept, **grid, coloraxis="coloraxis", hovertemplate=hover + "<extra>kept</extra>"),
        go.Heatmap(**dropped, **grid, **greys, hovertemplate=hover + "<extra>dropped</extra>"),
        go.Bar(**bars_kept, x=experts, name="kept", marker={"color": GREEN}, hovertemplate=bar_hover),
        go.Bar(**bars_dropped, x=experts, name="dropped", marker=stripes, hovertemplate=bar_hover),
        go.Bar(
            **sizes,
            y=["original", "proxy"],
            orientation="h",
            showlegend=False,
            marker={"color": [ORIGINAL, PROXY]},
            hovertemplate="%{y}: %{x:.2f} MB<extra></extra>",
        ),
        go.Bar(
            **lost,
            x=layers,
            name="gate mass that loses its expert",
            marker={"color": ORANGE},
            hovertemplate="layer %{x}: %{y:.1f} % of the gate mass<extra></extra>",
        ),
        go.Scatter(
            **whole,
            x=layers,
            name="tokens that keep all their experts",
            cliponaxis=False,
            mode="markers",
            marker={"symbol": "diamond", "size": 9, "color": BLUE, "line": {"width": 1, "color": "white"}},
            hovertemplate="layer %{x}: %{y:.1f} % of the tokens<extra></extra>",
        ),
    ]


def _label_axes(figure: go.Figure, state: PanelState) -> None:
    figure.update_xaxes(title_text="expert", row=1, col=1)
    figure.update_yaxes(title_text="layer", type="category", autorange="reversed", row=1, col=1)
    figure.update_xaxes(title_text="expert", row=2, col=1)
    figure.update_yaxes(title_text="% of tokens", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="MB", range=[0, 1.05 * _megabytes(state.original)], row=3, col=1)
    figure.update_yaxes(autorange="reversed", row=3, col=1)
    figure.update_xaxes(title_text="layer", type="category", nticks=13, tickangle=0, row=2, col=2)
    figure.update_yaxes(title_text="%", rangemode="tozero", row=2, col=2)


def _colours(state: PanelState) -> dict[str, Any]:
    # Beside the upper row only: the default bar spans the figure and meets the legend.
    bar = {
        "title": {"text": "kept:<br>% of tokens"},
        "len": 0.36,
        "y": 1.0,
        "yanchor": "top",
        "thickness": 14,
    }
    return {"colorscale": "Cividis", "cmin": 0, "cmax": _top(state), "colorbar": bar}


def _only(share_LE: np.ndarray, shown_LE: np.ndarray) -> list[list[float | None]]:
    """Return the shares as rows with None elsewhere; NaN would not be JSON."""
    return [
        [float(x) if yes else None for x, yes in zip(*row, strict=True)] for row in zip(share_LE, shown_LE, strict=True)
    ]


def _top(state: PanelState) -> float:
    return max(float(state.share_LE.max()), 1e-9)


def _megabytes(cost: Cost) -> float:
    return cost.nbytes / 1e6
