"""The figure of notebook 01: map of the experts, their distances in cluster order, predicted damage by layer.

Pure functions from a `MapState` to a figure, to new values for its traces, and to a sentence. The number and order
of traces never change, so a live figure is updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from moeproxy.experts.profile import ExpertProfile
from moeproxy.proxy.damage import Damage
from moeproxy.proxy.plan import KeepPlan
from moeproxy.view.style import BLUE, FONT, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE, SKY, VERMILLION

WIDTH_PX, HEIGHT_PX = 950, 700
EXPERTS = 3  # the trace that is clicked and box-selected
# Okabe and Ito's eight (yellow darkened, black lightened to carry a number), then eight of Paul Tol's muted set.
_FIRST = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, "#F0E442", "#4D4D4D")
_MORE = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#882255", "#AA4499")
PALETTE = _FIRST + _MORE
_DARK = {BLUE, GREEN, VERMILLION, "#4D4D4D", "#332288", "#117733", "#882255", "#AA4499"}
# Beyond sixteen clusters colours repeat with another symbol: circle, square, diamond, pentagon, hexagon, star.
_SYMBOLS = (0, 1, 2, 13, 14, 17)
# What is selected is told by a square of its own; plotly would fade everything else, the bars included.
_UNFADED = {"selected": {"marker": {"opacity": 1.0}}, "unselected": {"marker": {"opacity": 1.0}}}
_MOST_SHAPED = 512  # experts whose symbols can be told apart
_MOST_NAMED = 64  # experts whose numbers can be read on the map and along the heat map


@dataclass(frozen=True)
class MapState:
    """What the panel shows.

    Attributes:
        profile: the calibration profile.
        plan: clusters and representatives with the weights chosen.
        damage: what the plan is predicted to cost.
        fused_EE: fused distance of the chosen layer.
        layer: decoder layer number.
        all_layers: the map holds the experts of all layers, else of `layer`.
        xy_N2: place of every expert on the map, layer by layer.
        layout: how the places were found, for the title ("UMAP", "PCA").
        selected, kept_always, dropped_always: (layer, expert) pairs.
    """

    profile: ExpertProfile
    plan: KeepPlan
    damage: Damage
    fused_EE: Float[np.ndarray, "E E"]
    layer: int
    all_layers: bool
    xy_N2: Float[np.ndarray, "N 2"]
    layout: str
    selected: frozenset[tuple[int, int]] = frozenset()
    kept_always: frozenset[tuple[int, int]] = frozenset()
    dropped_always: frozenset[tuple[int, int]] = frozenset()

    @property
    def row(self) -> int:
        """Index of the chosen layer on the L axis."""
        return self.profile.moe_layers.index(self.layer)

    @cached_property
    def rows(self) -> list[int]:
        """Indices on the L axis of the layers on the map."""
        return list(range(len(self.profile.moe_layers))) if self.all_layers else [self.row]

    @cached_property
    def label_N(self) -> Int[np.ndarray, " N"]:
        """Cluster of every expert on the map, counted within its layer."""
        return self.plan.label_LE[self.rows].reshape(-1)

    @cached_property
    def keeper_N(self) -> Int[np.ndarray, " N"]:
        """Place on the map of the expert that stands for each one (itself if kept)."""
        n_experts = self.profile.n_experts
        keep_LC = np.array([self.plan.keep[self.profile.moe_layers[row]] for row in self.rows])
        label_RE = self.plan.label_LE[self.rows]
        own_RE = np.arange(n_experts * len(self.rows)).reshape(label_RE.shape)
        found_RE = np.take_along_axis(keep_LC, np.maximum(label_RE, 0), axis=1) + own_RE[:, :1]
        return np.where(label_RE >= 0, found_RE, own_RE).reshape(-1)

    @cached_property
    def share_N(self) -> Float[np.ndarray, " N"]:
        """Percent of its layer's routed tokens that each expert on the map receives."""
        load_RE = self.profile.load_LE[self.rows]
        return (100.0 * load_RE / np.maximum(load_RE.sum(axis=1, keepdims=True), 1)).reshape(-1)

    @cached_property
    def order_E(self) -> Int[np.ndarray, " E"]:
        """Experts of the chosen layer, members of a cluster side by side."""
        label_E = self.plan.label_LE[self.row]
        return np.lexsort((np.arange(len(label_E)), label_E))

    def places(self, pairs: frozenset[tuple[int, int]]) -> Int[np.ndarray, " X"]:
        """Positions on the map of (layer, expert) pairs; those not on it are left out."""
        layers = [self.profile.moe_layers[row] for row in self.rows]
        return np.array(
            sorted(layers.index(la) * self.profile.n_experts + e for la, e in pairs if la in layers), dtype=np.int64
        )

    def pair(self, place: int) -> tuple[int, int]:
        """The (layer, expert) at a position on the map."""
        row, expert = divmod(place, self.profile.n_experts)
        return self.profile.moe_layers[self.rows[row]], expert


def map_figure(state: MapState) -> go.Figure:
    """Return the complete figure for `state`."""
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        column_widths=[0.53, 0.47],
        row_heights=[0.73, 0.27],
        vertical_spacing=0.17,
        horizontal_spacing=0.08,
        subplot_titles=titles(state),
    )
    cells = ((1, 1),) * 6 + ((1, 2),) * 2 + ((2, 1),) * 2
    for trace, (row, col) in zip(_traces(state), cells, strict=True):
        figure.add_trace(trace, row=row, col=col)
    _label_axes(figure)
    figure.update_layout(
        width=WIDTH_PX,
        height=HEIGHT_PX,
        template="plotly_white",
        font={"family": FONT, "color": INK},
        margin={"l": 60, "r": 20, "t": 40, "b": 80},
        legend={"orientation": "h", "x": 0.0, "y": -0.12, "yanchor": "top", "title": {"text": ""}},
        dragmode="select",
        hovermode="closest",
        barmode="overlay",
    )
    figure.update_annotations(font_size=14)
    figure.update_layout(layout_values(state))
    return figure


def titles(state: MapState) -> tuple[str, str, str]:
    """Return the titles of the three parts."""
    what = "All layers" if state.all_layers else f"Layer {state.layer}"
    return (
        f"{what}: {state.plan.n_keep} of {state.profile.n_experts} experts kept ({state.layout})",
        f"Layer {state.layer}: fused distance, cluster by cluster",
        "Predicted damage in every layer",
    )


def layout_values(state: MapState) -> dict[str, Any]:
    """Return the properties of the layout that depend on the state."""
    names, n_experts = [str(e) for e in state.order_E], state.profile.n_experts
    # The hover text of a cell takes an expert's number from here, so every position has its name.
    ticks = {"tickvals": list(range(n_experts)), "ticktext": names, "showticklabels": n_experts <= _MOST_NAMED}
    # Another map is another place: the reader's zoom is kept while only colours change.
    place = f"{state.layout}-{'all' if state.all_layers else state.layer}"
    return {"xaxis2": ticks, "yaxis2": ticks, "uirevision": place}


def values(state: MapState) -> list[dict[str, Any]]:
    """Return, per trace of `map_figure`, the properties that depend on the state."""
    x_N, y_N = state.xy_N2.T
    size_N = _sizes(state)
    kept_N = np.flatnonzero(state.keeper_N == np.arange(len(x_N)))

    def ring(places: np.ndarray, wider: float) -> dict[str, Any]:
        return {"x": x_N[places], "y": y_N[places], "marker": {"size": size_N[places] + wider}}

    frame_x, frame_y = _frames(state)
    damage = state.damage
    return [
        _links(state),
        ring(state.places(state.selected), 14),
        ring(kept_N, 5 if len(x_N) <= _MOST_SHAPED else 2),
        _experts(state, size_N),
        ring(state.places(state.kept_always), 20),
        ring(state.places(state.dropped_always), 9),
        # Three digits are enough for a colour and make the message a third as long.
        {"z": np.round(state.fused_EE[np.ix_(state.order_E, state.order_E)].astype(np.float64), 3)},
        {"x": frame_x, "y": frame_y},
        {"y": 100.0 * damage.gate_lost_L, "marker": {"color": _bar_colours(state)}},
        {"y": [] if damage.tokens_whole_L is None else 100.0 * damage.tokens_whole_L},
    ]


def changes(old: Any, new: Any) -> Any:
    """Return what of the properties `new` differs from `old`, nested; an empty dict if nothing does."""
    if not isinstance(new, dict):
        return new
    found = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := changes(before, value):
                found[key] = inner
        elif not _same(before, value):
            found[key] = value
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")
    return type(a) is type(b) and a == b


def describe(state: MapState) -> str:
    """Return what the figure shows for the chosen layer, in words."""
    plan, row = state.plan, state.row
    label_E = plan.label_LE[row]
    same = (label_E[:, None] == label_E) & ~np.eye(len(label_E), dtype=bool)
    other = label_E[:, None] != label_E
    text = f"Layer {state.layer} keeps {plan.n_keep} of {state.profile.n_experts} experts."
    if same.any() and other.any():
        within, between = state.fused_EE[same].mean(), state.fused_EE[other].mean()
        text += f" Experts of one cluster lie {within:.2f} apart on average, of different clusters {between:.2f}."
    lost_L, whole_L = 100.0 * state.damage.gate_lost_L, state.damage.tokens_whole_L
    text += f" {lost_L[row]:.0f} % of the layer's gate mass loses its expert"
    text += f" (all layers: {lost_L.min():.0f} to {lost_L.max():.0f} %)"
    return text + ("." if whole_L is None else f", and {100 * whole_L[row]:.0f} % of the tokens keep all theirs.")


def _traces(state: MapState) -> list[go.Scatter | go.Heatmap | go.Bar]:
    made = values(state)
    quiet = {"hoverinfo": "skip", "mode": "markers"}
    layers = [str(layer) for layer in state.profile.moe_layers]

    def mark(values: dict[str, Any], name: str, symbol: str, colour: str) -> go.Scatter:
        marker = values["marker"] | {"symbol": symbol, "color": colour, "line": {"width": 2}}
        return go.Scatter(**quiet, x=values["x"], y=values["y"], name=name, marker=marker, showlegend=True, **_UNFADED)

    return [
        go.Scatter(**made[0], mode="lines", line={"color": LIGHT, "width": 1}, hoverinfo="skip", showlegend=False),
        mark(made[1], "selected", "square-open", INK),
        mark(made[2], "kept", "circle-open", INK),
        _expert_trace(made[3]),
        mark(made[4], "always kept", "triangle-up-open", GREEN),
        mark(made[5], "always dropped", "x-thin-open", VERMILLION),
        _heat_trace(made[6]),
        go.Scatter(
            **made[7], mode="lines", line={"color": VERMILLION, "width": 1.5}, hoverinfo="skip", showlegend=False
        ),
        go.Bar(
            **made[8],
            x=layers,
            name="gate mass that loses its expert",
            hovertemplate="layer %{x}: %{y:.1f} % of the gate mass<extra></extra>",
            **_UNFADED,
        ),
        go.Scatter(
            **made[9],
            x=layers,
            mode="markers",
            name="tokens that keep all their experts",
            cliponaxis=False,
            marker={"symbol": "diamond", "size": 9, "color": BLUE, "line": {"width": 1, "color": "white"}},
            hovertemplate="layer %{x}: %{y:.1f} % of the tokens<extra></extra>",
            **_UNFADED,
        ),
    ]


def _expert_trace(values: dict[str, Any]) -> go.Scatter:
    stops = len(PALETTE)
    scale = [[end / (stops + 1), colour] for i, colour in enumerate((GREY, *PALETTE)) for end in (i, i + 1)]
    steady = {"colorscale": scale, "cmin": -1.5, "cmax": stops - 0.5, "showscale": False, "opacity": 1.0}
    return go.Scatter(
        **(values | {"marker": values["marker"] | steady | {"line": {"width": 0.5, "color": "white"}}}),
        mode="markers+text",
        hovertemplate="%{hovertext}, represented by %{customdata}<extra></extra>",
        showlegend=False,
        **_UNFADED,
    )


def _heat_trace(values: dict[str, Any]) -> go.Heatmap:
    return go.Heatmap(
        **values,
        colorscale="Cividis",
        reversescale=True,
        colorbar={"title": {"text": "distance"}, "thickness": 12, "len": 0.62, "y": 1.0, "yanchor": "top"},
        hovertemplate="experts %{y} and %{x}: distance %{z:.2f}<extra></extra>",
    )


def _label_axes(figure: go.Figure) -> None:
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "title_text": ""}
    figure.update_xaxes(**bare, showline=True, mirror=True, linecolor=LIGHT, row=1, col=1)
    figure.update_yaxes(**bare, showline=True, mirror=True, linecolor=LIGHT, row=1, col=1)
    heat = {"tickmode": "array", "showgrid": False, "zeroline": False, "title_text": "expert", "title_standoff": 6}
    figure.update_xaxes(**heat, tickfont_size=9, tickangle=-90, row=1, col=2)
    figure.update_yaxes(**heat, tickfont_size=9, autorange="reversed", row=1, col=2)
    figure.update_xaxes(title_text="layer", type="category", nticks=25, tickangle=0, row=2, col=1)
    figure.update_yaxes(title_text="%", rangemode="tozero", row=2, col=1)


def _sizes(state: MapState) -> Float[np.ndarray, " N"]:
    """Marker diameters in pixels; the area above the smallest grows with use."""
    n = len(state.xy_N2)
    smallest, grown = (15, 18) if n <= _MOST_NAMED else (7, 11) if n <= _MOST_SHAPED else (3, 5)
    return smallest + grown * np.sqrt(state.share_N / max(float(state.share_N.max()), 1e-9))


def _experts(state: MapState, size_N: np.ndarray) -> dict[str, Any]:
    x_N, y_N = state.xy_N2.T
    colour_N = np.where(state.label_N >= 0, state.label_N % len(PALETTE), -1).astype(np.int32)
    symbol_N: Any = np.asarray(_SYMBOLS, np.int32)[np.maximum(state.label_N, 0) // len(PALETTE) % len(_SYMBOLS)]
    if len(x_N) > _MOST_SHAPED:
        symbol_N = _SYMBOLS[0]  # shapes of a few pixels cannot be told apart, and plotly checks each one slowly
    named = len(x_N) <= _MOST_NAMED
    ink = ["white" if c < 0 or PALETTE[c] in _DARK else "black" for c in colour_N] if named else "black"
    return {
        "x": x_N,
        "y": y_N,
        "hovertext": _hover(state),
        "customdata": (state.keeper_N % state.profile.n_experts).astype(np.int32),
        "text": [str(i % state.profile.n_experts) for i in range(len(x_N))] if named else "",
        "textfont": {"size": 10, "color": ink},
        "marker": {"size": size_N, "color": colour_N, "symbol": symbol_N},
    }


def _hover(state: MapState) -> list[str]:
    """What does not change with the clusters, so that a slider need not send thousands of texts."""
    n_experts, share_N = state.profile.n_experts, state.share_N.tolist()
    layers = [state.profile.moe_layers[row] for row in state.rows]
    return [
        f"layer {layers[i // n_experts]}, expert {i % n_experts}: {share:.1f} % of tokens"
        for i, share in enumerate(share_N)
    ]


def _links(state: MapState) -> dict[str, Any]:
    """Lines from every dropped expert to the one that stands for it."""
    dropped = np.flatnonzero(state.keeper_N != np.arange(len(state.keeper_N)))
    path_X3 = np.stack([dropped, state.keeper_N[dropped], dropped], axis=1)
    xy_X32 = state.xy_N2[path_X3].astype(np.float64)
    xy_X32[:, 2] = np.nan  # the pen is lifted between two lines
    return {"x": xy_X32[..., 0].reshape(-1), "y": xy_X32[..., 1].reshape(-1)}


def _frames(state: MapState) -> tuple[np.ndarray, np.ndarray]:
    """Squares around the clusters of two or more along the heat map's diagonal."""
    label_E = state.plan.label_LE[state.row][state.order_E]
    edges = np.concatenate([[0], np.flatnonzero(np.diff(label_E)) + 1, [len(label_E)]]) - 0.5
    low, high = edges[:-1], edges[1:]
    low, high = low[high - low > 1], high[high - low > 1]
    gap = np.full(len(low), np.nan)
    x = np.stack([low, high, high, low, low, gap], axis=1).reshape(-1)
    y = np.stack([low, low, high, high, low, gap], axis=1).reshape(-1)
    return x, y


def _bar_colours(state: MapState) -> Sequence[str]:
    return [ORANGE if layer == state.layer else "#F5DCA6" for layer in state.profile.moe_layers]
