"""Figures of the fidelity study: retrieval by model, confusion, responses to one fault, cost against fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.errors import MoeproxyError
from moeproxy.triage.study_frames import rows, where
from moeproxy.triage.study_measures import NONE
from moeproxy.triage.study_result import Study
from moeproxy.view.style import GREY, finish, method_colour, method_symbol, model_colours

_AXES = {"params": "parameters", "n_experts": "experts kept in each layer"}
_BESIDE = 0.7  # of models with equally many experts, in experts: far enough to see each, near enough to read as one
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")


def retrieval(study: Study, level: str) -> go.Figure:
    """Draw the share of runs whose fault is found, by model, with intervals over faults and seeds and the chance level.

    Args:
        study: the fidelity study.
        level: level of strength.

    Raises:
        MoeproxyError: the study has no such level.
    """
    table = _models(study, level)
    figure = go.Figure([_dots(row) for row in rows(table)])
    chance = study.chance(level)
    figure.add_vline(x=chance, line={"color": GREY, "dash": "dot", "width": 1.5}, annotation={"text": "chance"})
    figure.update_yaxes(categoryorder="array", categoryarray=list(table["model"])[::-1], showgrid=False)
    figure.update_xaxes(title_text="runs whose nearest fault is the right one", range=[-0.02, 1.03])
    figure.update_layout(showlegend=False)
    told = ", ".join(f"{row['model']} {row['top1']:.2f}" for row in rows(table))
    return finish(
        figure,
        title=f"Is the right fault found? Level “{level}”",
        alt=f"Share of runs whose nearest fault of the original is the right one: {told}; chance {chance:.2f}.",
        table=table.round(3),
        height=150 + 34 * len(table),
    )


def confusion(study: Study, model: str, level: str) -> go.Figure:
    """Draw which fault of the original each fault of a model is taken for, over the seeds.

    Args:
        study: the fidelity study.
        model: label of a model; the original gives the ceiling.
        level: level of strength.

    Raises:
        MoeproxyError: the model was not judged at this level.
    """
    counts = study.confusion(model, level)
    if counts.empty:
        raise MoeproxyError(f"no run of {model!r} at level {level!r}", expected=f"one of {list(study.labels)}")
    order = _by_family(study, counts.index)
    columns = [*order, NONE]
    share: Any = counts.reindex(index=order, columns=columns, fill_value=0)
    share = share.div(share.sum(axis=1), axis=0)
    figure = go.Figure(
        go.Heatmap(
            z=share.to_numpy(),
            x=columns,
            y=order,
            colorscale="Blues",
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "share of runs"}, "thickness": 14},
            hovertemplate="%{y} taken for %{x}: %{z:.0%}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="nearest fault of the original", tickangle=-55, showgrid=False)
    figure.update_yaxes(title_text=f"fault of {model}", autorange="reversed", showgrid=False)
    right = float(np.mean([share.loc[fault, fault] for fault in order]))
    size = 22 * len(order)
    return finish(
        figure,
        title=f"{model}: which fault is each taken for? Level “{level}”",
        alt=f"{right:.0%} of the runs of {model} lie on the diagonal. {_worst(share)}.",
        table=_long(share),
        height=max(420, 250 + size),
        width=330 + size,
    )


def study_responses(
    study: Study, fault: str, level: str, *, models: Sequence[str] | None = None, n_signals: int = 5
) -> go.Figure:
    """Draw the response to one fault by window: the original's strongest signals on the original and on proxies.

    Args:
        study: the fidelity study.
        fault: id of the fault.
        level: level of strength.
        models: models beside the original; by default the largest proxy of the method under test.
        n_signals: signals drawn, one panel each.

    Raises:
        MoeproxyError: the original was not run with this fault at this level.
    """
    at = where(study.responses, fault=fault, level=level)
    ours = where(at, model=study.protocol.original)
    if ours.empty:
        raise MoeproxyError(f"no run of {fault!r} at level {level!r}", expected="a fault and level of the study")
    shown = [study.protocol.original, *(_default(study, level) if models is None else models)]
    signals = _strongest(ours, n_signals)
    colours = model_colours(shown, study.protocol.original)
    titles = [name.replace("_", " ") for name in signals]
    figure = make_subplots(rows=len(signals), shared_xaxes=True, vertical_spacing=0.05, subplot_titles=titles)
    for row, signal in enumerate(signals, start=1):
        for i, model in enumerate(shown):
            part = where(at, model=model, signal=signal)
            figure.add_trace(_lines(part, model, colours[model], i, row == 1), row=row, col=1)
        for limit in (-1, 1):
            figure.add_hline(y=limit, line={"color": GREY, "dash": "dot", "width": 1}, row=row, col=1)  # pyright: ignore
    figure.update_xaxes(title_text="steps after the onset", row=len(signals), col=1)
    figure.update_yaxes(title_text="over threshold", title_font={"size": 12})
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.32 / len(signals), "yanchor": "top"})
    columns = ["model", "signal", "window", "mean", "low", "high"]
    table = where(at, model=shown, signal=signals)[columns]
    return finish(
        figure,
        title=f"Response to {fault}, level “{level}”",
        alt=_responses_alt(at, shown, signals, fault),
        table=table.round({"mean": 2, "low": 2, "high": 2}),
        height=150 + 150 * len(signals),
    )


def cost_fidelity(study: Study, level: str, *, costs: pd.DataFrame | None = None) -> go.Figure:
    """Draw cost against retrieval, one point a model.

    Args:
        study: the fidelity study.
        level: level of strength.
        costs: columns `model` and `params`, parameters of each model; by default the experts kept in each layer.
            Seconds a step of recorded runs are no measure: they depend on what else the machine did.

    Raises:
        MoeproxyError: the study has no such level.
    """
    table = _models(study, level)
    table, measure = _with_cost(table, costs)
    figure = go.Figure([_point(row, measure) for row in rows(table.assign(place=_places(table[measure], measure)))])
    figure.add_hline(
        y=study.chance(level), line={"color": GREY, "dash": "dot", "width": 1.5}, annotation={"text": "chance"}
    )
    figure.update_xaxes(title_text=_AXES[measure], rangemode="tozero")
    if measure == "n_experts":
        figure.update_xaxes(tickvals=sorted(set(table[measure])), range=[-3, max(table[measure]) + 3])
    figure.update_yaxes(title_text="right fault found", range=[-0.04, 1.06])
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.24, "yanchor": "top"})
    told = ", ".join(f"{row['model']} {row[measure]:.3g} and {row['top1']:.2f}" for row in rows(table))
    return finish(
        figure,
        title=f"Cost against fidelity, level “{level}”",
        alt=f"{_AXES[measure].capitalize()} and share of runs whose fault is found: {told}.",
        table=table.round(3),
        height=430,
    )


def _models(study: Study, level: str) -> Any:
    at = where(study.models, level=level, measure="top1")
    if at.empty:
        raise MoeproxyError(f"no level {level!r}", expected=f"one of {list(study.levels)}")
    columns = ["model", "method", "n_experts", "top1", "low", "high", "runs", "faults"]
    return at.rename(columns={"mean": "top1"})[columns].reset_index(drop=True)


def _dots(row: dict[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=[row["top1"]],
        y=[row["model"]],
        name=row["model"],
        mode="markers",
        marker=_marker(row),
        error_x=_bars(row),
        hovertemplate="%{y}: %{x:.2f}<extra></extra>",
    )


def _point(row: dict[str, Any], measure: str) -> go.Scatter:
    return go.Scatter(
        x=[row["place"]],
        y=[row["top1"]],
        name=row["model"],
        mode="markers",
        marker=_marker(row),
        error_y=_bars(row),
        hovertemplate=f"{row['model']}: {_AXES[measure]} {row[measure]:.3g}, found %{{y:.2f}}<extra></extra>",
    )


def _marker(row: dict[str, Any]) -> dict[str, object]:
    method = str(row["method"])
    return {"symbol": method_symbol(method), "size": 12, "color": method_colour(method), "line": {"width": 2}}


def _bars(row: dict[str, Any]) -> dict[str, object]:
    up, down = [row["high"] - row["top1"]], [row["top1"] - row["low"]]
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.5, "width": 5}


def _by_family(study: Study, faults: pd.Index) -> list[str]:
    family = dict(zip(study.cells["fault"], study.cells["family"], strict=True))
    return sorted(map(str, faults), key=lambda fault: (family[fault], fault))


def _worst(share: Any) -> str:
    long = _long(share)
    wrong = [row for row in rows(long.sort_values("share", ascending=False)) if row["fault"] != row["taken for"]]
    told = [f"{row['fault']} for {row['taken for']} ({row['share']:.0%})" for row in wrong[:3]]
    return f"Most often taken for another: {', '.join(told)}" if told else "None is taken for another"


def _long(share: Any) -> Any:
    named = share.rename_axis(index="fault", columns="taken for")
    long = named.stack().rename("share").reset_index()
    return long[long["share"] > 0].round(3).reset_index(drop=True)


def _default(study: Study, level: str) -> list[str]:
    at = where(study.cells, method=study.protocol.method, level=level)
    return [str(at.sort_values("n_experts", ascending=False).iloc[0]["model"])] if len(at) else []


def _strongest(ours: Any, count: int) -> list[str]:
    size = ours.assign(size=ours["mean"].abs()).groupby("signal")["size"].max()
    return [str(name) for name in size.sort_values(ascending=False, kind="stable").index[:count]]


def _lines(part: Any, model: str, colour: str, place: int, legend: bool) -> go.Scatter:
    return go.Scatter(
        x=part["window"],
        y=part["mean"],
        name=model,
        mode="lines+markers",
        legendgroup=model,
        showlegend=legend,
        line={"color": colour, "width": 1.5, "dash": "solid" if place == 0 else "dash"},
        marker={"size": 9, "symbol": _SYMBOLS[place % len(_SYMBOLS)], "color": colour},
        error_y={
            "type": "data",
            "array": part["high"] - part["mean"],
            "arrayminus": part["mean"] - part["low"],
            "thickness": 1.2,
            "width": 4,
        },
        hovertemplate=f"{model}, steps %{{x}}: %{{y:.2f}}<extra></extra>",
    )


def _responses_alt(at: Any, shown: Sequence[str], signals: Sequence[str], fault: str) -> str:
    parts = []
    for signal in signals:
        here = rows(where(at, signal=signal, model=list(shown)))
        window = max((row for row in here if row["model"] == shown[0]), key=lambda row: abs(row["mean"]))["window"]
        told = ", ".join(f"{row['model']} {row['mean']:+.1f}" for row in here if row["window"] == window)
        parts.append(f"{signal} (steps {window}): {told}")
    return f"Responses to {fault} over their thresholds, bars from lowest to highest seed. {'; '.join(parts)}."


def _places(cost: Any, measure: str) -> Any:
    """Return where to draw each model: models with equally many experts beside each other, not over each other."""
    if measure != "n_experts":
        return cost
    alike = cost.groupby(cost)
    return cost + _BESIDE * (alike.cumcount() - (alike.transform("size") - 1) / 2)


def _with_cost(table: Any, costs: pd.DataFrame | None) -> tuple[Any, str]:
    if costs is not None:
        known: Any = costs.set_index("model")["params"]
        return table.assign(params=table["model"].map(known)).dropna(subset=["params"]), "params"
    return table, "n_experts"
