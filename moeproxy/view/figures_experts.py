"""Figures of experts: how much they are used, how alike they are, which are kept."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moeproxy.errors import MoeproxyError
from moeproxy.view.style import PROXY, finish

if TYPE_CHECKING:  # these rooms import torch
    from moeproxy.experts.statistics import ExpertProfile
    from moeproxy.proxy.plan import KeepPlan


def expert_load(profile: ExpertProfile) -> go.Figure:
    """Draw how many tokens each expert gets: layers x experts, 1 being an equal share."""
    load_LE = profile.load_LE / np.maximum(profile.load_LE.mean(1, keepdims=True), 1e-12)
    layers = [f"layer {layer}" for layer in profile.moe_layers]
    figure = go.Figure(
        go.Heatmap(
            z=load_LE,
            x=list(range(load_LE.shape[1])),
            y=layers,
            colorscale="Cividis",
            zmin=0,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "× equal share"}, "thickness": 14},
            hovertemplate="%{y}, expert %{x}: %{z:.2f} × equal share<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="expert")
    unused = int((profile.load_LE == 0).sum())
    unused_text = f"{unused or 'no'} expert{'' if unused == 1 else 's'} never used"
    alt = (
        f"Load of {load_LE.shape[1]} experts in {len(layers)} layers over {profile.n_tokens:,} tokens: the "
        f"busiest expert gets {load_LE.max():.1f} times an equal share, {unused_text}."
    )
    table = pd.DataFrame(profile.load_LE, columns=[f"expert {e}" for e in range(load_LE.shape[1])])
    table.insert(0, "layer", list(profile.moe_layers))
    title = "Tokens routed to each expert"
    return finish(figure, title=title, alt=alt, table=table, height=_grid_height(len(layers)), top=48)


def similarity_heatmap(distance_EE: np.ndarray, plan: KeepPlan | None = None, layer: int | None = None) -> go.Figure:
    """Draw the distances of one layer's experts, members of a cluster side by side.

    Args:
        distance_EE: distances of that layer, e.g. `distances(profile, layer).fuse()[0]`.
        plan: kept experts are marked on the diagonal and clusters framed; None keeps the experts' order.
        layer: decoder layer number; by default the plan's first.
    """
    order, label_E, kept = _order(distance_EE, plan, layer)
    names = [str(e) for e in order]
    figure = go.Figure(
        go.Heatmap(
            z=distance_EE[np.ix_(order, order)],
            x=names,
            y=names,
            colorscale="Cividis",
            reversescale=True,
            colorbar={"title": {"text": "distance"}, "thickness": 14},
            hovertemplate="experts %{y} and %{x}: distance %{z:.2f}<extra></extra>",
        )
    )
    if kept:
        figure.add_trace(_kept_dots([str(e) for e in order if e in kept]))
    for start, stop in _runs(label_E[order]):
        frame = {"x0": start - 0.5, "x1": stop - 0.5, "y0": start - 0.5, "y1": stop - 0.5}
        figure.add_shape(type="rect", line={"color": PROXY, "width": 1.5}, **frame)
    ends = [-0.5, len(order) - 0.5]
    axis = {"type": "category", "title_text": "expert", "showgrid": False, "constrain": "domain"}
    figure.update_xaxes(**axis, range=ends, tickangle=0)
    figure.update_yaxes(**axis, range=ends[::-1], scaleanchor="x")
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"})
    alt = _similarity_alt(distance_EE, label_E, kept, layer)
    table = pd.DataFrame(
        {
            "expert": order,
            "cluster": label_E[order],
            "kept": [e in kept for e in order],
            "nearest": [_nearest(distance_EE, int(e)) for e in order],
        }
    )
    where = "" if layer is None else f", layer {layer}"
    return finish(figure, title=f"Distance between experts{where}", alt=alt, table=table, height=640)


def keep_map(plan: KeepPlan, profile: ExpertProfile | None = None) -> go.Figure:
    """Draw which experts of each layer the proxy keeps, and with a profile how much each was used."""
    n_experts = plan.label_LE.shape[1]
    places = [(row, layer, e) for row, layer in enumerate(sorted(plan.keep)) for e in range(n_experts)]
    rows = [_keep_row(plan, profile, *place) for place in places]
    table = pd.DataFrame(rows)
    size = float(np.clip(760 / n_experts, 4, 17))
    figure = go.Figure()
    for kept, name, symbol, colour in (
        (True, "kept", "square", PROXY),
        (False, "dropped", "square-open", "#9AA4AE"),
    ):
        part = table[table["kept"] == kept]
        figure.add_trace(
            go.Scatter(
                x=part["expert"],
                y=[f"layer {layer}" for layer in part["layer"]],
                mode="markers",
                name=name,
                marker={"symbol": symbol, "size": size, "color": colour},
                customdata=list(zip(part["says"], strict=True)),
                hovertemplate="%{y}, expert %{x}: %{customdata[0]}<extra></extra>",
            )
        )
    layers = [f"layer {layer}" for layer in sorted(plan.keep)]
    figure.update_yaxes(categoryorder="array", categoryarray=layers[::-1], showgrid=False)
    figure.update_xaxes(title_text="expert", range=[-1, n_experts], showgrid=False)
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"})
    held = "" if profile is None else f", which took {_held_share(plan, profile):.0%} of the routed tokens"
    count = f"{plan.n_keep} of {n_experts} experts"
    alt = f"{count} are kept in each of {len(layers)} layers, chosen by {plan.method}{held}."
    title = f"Experts kept ({plan.method}, {plan.n_keep} of {n_experts})"
    rest = table.drop(columns="says")
    return finish(figure, title=title, alt=alt, table=rest, height=_grid_height(len(layers)), top=60)


def _order(
    distance_EE: np.ndarray, plan: KeepPlan | None, layer: int | None
) -> tuple[np.ndarray, np.ndarray, set[int]]:
    experts = np.arange(len(distance_EE))
    if plan is None:
        return experts, np.full(len(experts), -1), set()
    layers = sorted(plan.keep)
    chosen = layers[0] if layer is None else layer
    if chosen not in plan.keep:
        raise MoeproxyError(f"the plan has no layer {chosen}", expected=f"one of {layers}")
    label_E = np.asarray(plan.label_LE[layers.index(chosen)])
    return np.lexsort((experts, label_E)), label_E, set(plan.keep[chosen])


def _kept_dots(experts: list[str]) -> go.Scatter:
    return go.Scatter(
        x=experts,
        y=experts,
        mode="markers",
        name="kept",
        marker={"symbol": "circle", "size": 9, "color": PROXY, "line": {"width": 1.5, "color": "white"}},
        showlegend=True,
        hovertemplate="expert %{x} is kept<extra></extra>",
    )


def _runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, stop) of runs of equal labels that are clusters of two or more."""
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    return [(a, b) for a, b in pairwise(edges) if b - a > 1 and labels[a] >= 0]


def _nearest(distance_EE: np.ndarray, expert: int) -> int:
    others = distance_EE[expert].astype(float).copy()
    others[expert] = np.inf
    return int(others.argmin())


def _similarity_alt(distance_EE: np.ndarray, label_E: np.ndarray, kept: set[int], layer: int | None) -> str:
    same = (label_E[:, None] == label_E) & ~np.eye(len(label_E), dtype=bool)
    where = "" if layer is None else f" of layer {layer}"
    head = f"Distances between {len(label_E)} experts{where}"
    if not kept or not same.any() or (label_E < 0).any():
        return f"{head}, mean {distance_EE[~np.eye(len(label_E), dtype=bool)].mean():.2f}."
    other = ~same & ~np.eye(len(label_E), dtype=bool)
    within, between = distance_EE[same].mean(), distance_EE[other].mean()
    return f"{head}: mean {within:.2f} within clusters, {between:.2f} between; {len(kept)} experts are kept."


def _keep_row(plan: KeepPlan, profile: ExpertProfile | None, row: int, layer: int, expert: int) -> dict[str, object]:
    ids, label = plan.keep[layer], int(plan.label_LE[row, expert])
    kept = expert in ids
    stands_for = None if kept or label < 0 else int(ids[label])
    says = "kept" if kept else "dropped" if stands_for is None else f"dropped, represented by {stands_for}"
    cells = {"layer": layer, "expert": expert, "kept": kept, "represented by": stands_for, "says": says}
    if profile is not None:
        share = float(profile.load_LE[row, expert] / max(profile.load_LE[row].sum(), 1))
        cells |= {"share of tokens": round(share, 4), "says": f"{says}, {share:.1%} of the tokens"}
    return cells


def _held_share(plan: KeepPlan, profile: ExpertProfile) -> float:
    held = sum(profile.load_LE[row, list(plan.keep[layer])].sum() for row, layer in enumerate(sorted(plan.keep)))
    return float(held / max(profile.load_LE.sum(), 1))


def _grid_height(n_layers: int) -> int:
    return int(np.clip(130 + 34 * n_layers, 230, 1100))
