"""Figures and tables of predicted damage, of a choice's stability, and of a built proxy's fidelity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moeproxy.view.style import BLUE, GREEN, GREY, finish

if TYPE_CHECKING:  # these rooms import torch
    from moeproxy.proxy.damage import Damage
    from moeproxy.proxy.fidelity import Fidelity
    from moeproxy.proxy.stability import Stability

_LEGEND = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "title": {"text": ""}}


def damage_table(damage: Damage) -> pd.DataFrame:
    """Return the predicted damage of every layer, in the units of the figures."""
    frame = pd.DataFrame(
        {
            "layer": list(damage.moe_layers),
            "gate mass that loses its expert": [f"{x:.1%}" for x in damage.gate_lost_L],
            "mean distance to the representative": [f"{x:.2f}" for x in damage.distance_mean_L],
            "largest distance": [f"{x:.2f}" for x in damage.distance_max_L],
        }
    )
    if damage.tokens_whole_L is not None:
        frame["tokens that keep all their experts"] = [f"{x:.1%}" for x in damage.tokens_whole_L]
    return frame


def stability_table(stability: Stability) -> pd.DataFrame:
    """Return the agreement of every layer over the resamples."""
    frame = stability.to_frame()
    return pd.DataFrame(
        {
            "layer": frame["layer"],
            "mean agreement": frame["agreement"].map("{:.2f}".format),
            "5 % quantile": frame["low"].map("{:.2f}".format),
            "95 % quantile": frame["high"].map("{:.2f}".format),
            "experts kept every time": frame["always_kept"],
        }
    )


def fidelity_table(fidelity: Fidelity) -> pd.DataFrame:
    """Return the measures of original and proxy, rounded for reading."""
    frame = fidelity.to_frame()
    for column in ("original", "proxy"):
        frame[column] = frame[column].map("{:.4g}".format)
    return frame


def stability_figure(stability: Stability) -> go.Figure:
    """Draw how far choices on resampled texts agree with the choice on all of them, layer by layer."""
    layers = [str(layer) for layer in stability.moe_layers]
    mean_L, low_L, high_L = stability.agreement_mean_L, stability.agreement_low_L, stability.agreement_high_L
    # A skewed distribution can have its mean outside of the quantiles; a bar of negative length would be drawn inwards.
    error = {"type": "data", "array": np.maximum(high_L - mean_L, 0), "arrayminus": np.maximum(mean_L - low_L, 0)}
    figure = go.Figure(
        go.Scatter(
            x=layers,
            y=mean_L,
            mode="markers",
            marker={"size": 10, "color": BLUE},
            error_y=error | {"color": GREY, "thickness": 1.5, "width": 6},
            hovertemplate="layer %{x}: %{y:.2f}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="layer", type="category")
    # The adjusted Rand index may lie a little below 0.
    figure.update_yaxes(title_text=stability.measure, range=[min(-0.02, float(low_L.min()) - 0.02), 1.05])
    worst = int(np.argmin(mean_L))
    measure = stability.measure[0].upper() + stability.measure[1:]
    alt = (
        f"{measure} over {stability.n_resamples} bootstrap resamples of the calibration texts: "
        f"{mean_L.mean():.2f} on average, lowest in layer {layers[worst]} ({mean_L[worst]:.2f}); "
        "bars span the 5 % to the 95 % quantile."
    )
    title = f"Stability of the choice ({stability.method}, {stability.n_keep} experts)"
    return finish(figure, title=title, alt=alt, table=stability.to_frame(), height=360, top=56)


def fidelity_figure(fidelity: Fidelity) -> go.Figure:
    """Draw, layer by layer, how far a proxy routes and computes as its original does."""
    table = fidelity.layers()
    layers = [str(layer) for layer in fidelity.moe_layers]
    shown = (
        ("router_agreement", "router agreement on kept experts", "circle", BLUE),
        ("hidden_cosine", "cosine of hidden states", "diamond", GREEN),
    )
    figure = go.Figure(
        [
            go.Scatter(
                x=layers,
                y=table[column],
                mode="lines+markers",
                name=name,
                line={"color": colour, "width": 1.5, "dash": "solid" if symbol == "circle" else "dash"},
                marker={"size": 10, "symbol": symbol, "color": colour},
                hovertemplate="layer %{x}: %{y:.3f}<extra>" + name + "</extra>",
            )
            for column, name, symbol, colour in shown
        ]
    )
    figure.update_xaxes(title_text="layer", type="category")
    figure.update_yaxes(title_text="agreement with the original", range=[0, 1.05])
    figure.update_layout(legend=_LEGEND)
    cosine = np.asarray(fidelity.hidden_cosine)
    alt = (
        f"The proxy makes {np.nanmean(fidelity.router_agreement):.0%} of the original's choices that fall on "
        f"experts it kept; the cosine of the hidden states is {cosine[0]:.2f} after layer {layers[0]} and "
        f"{cosine[-1]:.2f} after layer {layers[-1]}."
    )
    title = f"Fidelity by layer ({fidelity.method}, {fidelity.n_keep} of {fidelity.n_experts})"
    return finish(figure, title=title, alt=alt, table=table, height=380, top=84)
