"""Figures of what was done about a failure: how well the proxy reproduces it, and what remedies did to its severity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from moeproxy.triage.remedy_result import Remedy, Trial
from moeproxy.triage.reproduction import Candidate, Reproduction
from moeproxy.view.style import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILLION, finish, literal

KEPT, ROLLED_BACK, HARMFUL = "kept", "rolled back", "harmful, rolled back"
_ENDS = {KEPT: ("circle", GREEN), ROLLED_BACK: ("circle-open", BLUE), HARMFUL: ("x", VERMILLION)}
_TOP_PX, _BOTTOM_PX, _ROW_PX = 60, 112, 32


def match_figure(result: Reproduction) -> go.Figure:
    """Draw how well the proxy's runs with each candidate match the failing run, beside what other faults reach.

    Args:
        result: a failure laid over the proxy's runs.
    """
    matched = [one for one in result.candidates if not math.isnan(one.match)]
    labels = [literal(one.fault) for one in result.candidates]
    figure = go.Figure()
    by_match = [(one, one.match) for one in matched]
    by_trace = [(one, one.confidence) for one in result.candidates]
    figure.add_trace(_dots(by_match, f"match with runs of {result.model}", "circle", BLUE))
    figure.add_trace(_dots(by_trace, "confidence from the trace alone", "diamond-open", ORANGE))
    if not math.isnan(result.background):
        name = "95% of the proxy's runs with other faults stay left of this"
        line = {"color": GREY, "width": 2, "dash": "dash"}
        ends = {"x": [result.background] * 2, "y": [labels[0], labels[-1]], "mode": "lines", "line": line}
        figure.add_trace(go.Scatter(ends, name=name, hovertemplate="others below %{x:.2f}<extra></extra>"))
    lowest = min(
        [0.0, result.background, *(one.match for one in matched)], key=lambda v: math.inf if math.isnan(v) else v
    )
    title = {"text": "match (cosine), confidence", "font": {"size": 14}}
    figure.update_xaxes(title=title, range=[lowest - 0.05, 1.06])
    _rows(figure, labels)
    height = _height(len(labels))
    finish(
        figure,
        title=f"Which fault makes {literal(result.model)} fail alike",
        alt=_match_alt(result),
        table=pd.DataFrame([_candidate(one) for one in result.candidates]),
        height=height,
        top=_TOP_PX,
    )
    return figure.update_layout(margin_b=_BOTTOM_PX)


def severity_figure(remedy: Remedy) -> go.Figure:
    """Draw the severity of a failure before and after each remedy that was tried.

    Args:
        remedy: what was tried; at least one trial ended.
    """
    ended = [trial for trial in remedy.trials if trial.after is not None]
    labels = [literal(trial.remedy) for trial in ended]
    figure = go.Figure()
    for trial, label in zip(ended, labels, strict=True):
        ends = [trial.before.value, _after(trial)]
        line = {"color": GREY, "width": 1.5}
        figure.add_trace(go.Scatter(x=ends, y=[label] * 2, mode="lines", line=line, showlegend=False, hoverinfo="skip"))
    before = {"x": [trial.before.value for trial in ended], "y": labels, "mode": "markers", "name": "before"}
    mark = {"symbol": "line-ns", "size": 15, "line": {"width": 2.5, "color": BLACK}}
    figure.add_trace(go.Scatter(before, marker=mark, hovertemplate="before: %{x:.3f}<extra></extra>"))
    for said, (symbol, colour) in _ENDS.items():
        here = [trial for trial in ended if outcome(trial) == said]
        if here:
            figure.add_trace(_ends(here, said, symbol, colour))
    ends = {"x": [remedy.margin] * 2, "y": [labels[0], labels[-1]], "mode": "lines"}
    line = {"color": GREY, "width": 2, "dash": "dash"}
    figure.add_trace(go.Scatter(ends, line=line, name="healthy runs stay left of this", hoverinfo="x"))
    largest = max([remedy.margin, *(max(trial.before.value, _after(trial)) for trial in ended)])
    title = {"text": "severity (0: as healthy runs, 1: as bad as can be)", "font": {"size": 14}}
    figure.update_xaxes(title=title, range=[-0.02 * largest, 1.06 * largest])
    _rows(figure, labels)
    finish(
        figure,
        title=f"Remedies for {literal(remedy.cause)} on {literal(remedy.model)}",
        alt=_severity_alt(remedy, ended),
        table=severity_table(remedy),
        height=_height(len(labels)),
        top=_TOP_PX,
    )
    return figure.update_layout(margin_b=_BOTTOM_PX)


def outcome(trial: Trial) -> str:
    """Return what became of a trial, in a word or two."""
    if trial.accepted:
        return KEPT
    return HARMFUL if trial.harmful else ROLLED_BACK if trial.after is not None else "did not end"


def severity_table(remedy: Remedy) -> pd.DataFrame:
    """Return one row a trial: severity before and after with its parts, and what became of it."""
    rows = []
    for trial in remedy.trials:
        parts = ("reward_loss", "departure", "not_finite")
        after = {f"{name}, after": getattr(trial.after, name, None) for name in parts}
        severity = {"before": trial.before.value, "after": None if trial.after is None else trial.after.value}
        named = {"remedy": trial.remedy, "kind": trial.kind, **severity, "outcome": outcome(trial)}
        rows.append({**named, **{name.replace("_", " "): value for name, value in after.items()}})
    return pd.DataFrame(rows).round(3)


def _candidate(one: Candidate) -> dict[str, object]:
    return {
        "fault": one.fault,
        "match": None if math.isnan(one.match) else round(one.match, 3),
        "confidence": round(one.confidence, 3),
        "strength": one.strength,
        "recorded runs": one.n_recorded,
        "new runs": one.n_live,
        "alike": ", ".join(one.agree),
        "unlike": ", ".join(one.differ),
    }


def _dots(points: Sequence[tuple[Candidate, float]], name: str, symbol: str, colour: str) -> go.Scatter:
    return go.Scatter(
        x=[value for _, value in points],
        y=[literal(one.fault) for one, _ in points],
        mode="markers",
        marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2 if "open" in symbol else 0}},
        name=literal(name),
        hovertemplate="%{y}: %{x:.2f}<extra></extra>",
    )


def _ends(trials: Sequence[Trial], name: str, symbol: str, colour: str) -> go.Scatter:
    return go.Scatter(
        x=[_after(trial) for trial in trials],
        y=[literal(trial.remedy) for trial in trials],
        mode="markers",
        marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2 if "open" in symbol else 0}},
        name=f"after, {name}",
        hovertemplate="after: %{x:.3f}<extra></extra>",
    )


def _after(trial: Trial) -> float:
    return math.nan if trial.after is None else trial.after.value


def _rows(figure: go.Figure, labels: Sequence[str]) -> None:
    figure.update_yaxes(categoryorder="array", categoryarray=list(labels)[::-1], range=[-0.6, len(labels) - 0.4])
    legend = {"orientation": "h", "x": 0, "y": -64 / (_ROW_PX * len(labels)), "yanchor": "top"}
    figure.update_layout(legend=legend)


def _height(n_rows: int) -> int:
    return _TOP_PX + _BOTTOM_PX + _ROW_PX * n_rows


def _match_alt(result: Reproduction) -> str:
    told = [f"{c.fault} {'no run' if math.isnan(c.match) else f'{c.match:.2f}'}" for c in result.candidates]
    limit = "" if math.isnan(result.background) else f"; {result.level}"
    return f"Match of the failing run with runs of {result.model}: {', '.join(told)}{limit}."


def _severity_alt(remedy: Remedy, ended: Sequence[Trial]) -> str:
    told = [f"{trial.remedy} {trial.before.value:.3f} to {_after(trial):.3f} ({outcome(trial)})" for trial in ended]
    head = f"Severity of {remedy.cause} on {remedy.model} before and after each remedy"
    return f"{head}: {', '.join(told)}; healthy runs stay below {remedy.margin:.3f}."
