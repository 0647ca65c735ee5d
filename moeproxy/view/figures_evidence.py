"""Figure of the evidence for and against a cause: each change as it is, and as it is in recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moeproxy.triage.diagnose import Cause, Diagnosis, Evidence
from moeproxy.triage.jsonable import sure
from moeproxy.view.style import BLACK, BLUE, GREY, ORANGE, finish, literal

_MOST_TICKS = 5


def evidence_figure(diagnosis: Diagnosis) -> go.Figure:
    """Draw what speaks for and against the likeliest cause: each change as it is, and as it is in recorded runs.

    Args:
        diagnosis: with at least one cause, for or against which a change speaks; signals that are not finite have no
            place on the axis and are told in the text of the figure.
    """
    cause = diagnosis.causes[0]
    rows = [(one, which) for one, which in _evidence(cause) if not one.broken]
    labels = [f"{one.signal} {one.window}" for one, _ in rows]
    figure = go.Figure()
    for label, (one, _) in zip(labels, rows, strict=True):
        ends = [_squash(one.seen), _squash(one.expected)]
        line = {"color": GREY, "width": 1.2}
        figure.add_trace(go.Scatter(x=ends, y=[label] * 2, mode="lines", line=line, showlegend=False, hoverinfo="skip"))
    for name, symbol, colour, values in (
        ("this run", "circle", BLUE, [one.seen for one, _ in rows]),
        (f"recorded runs of {cause.fault}", "diamond-open", ORANGE, [one.expected for one, _ in rows]),
    ):
        figure.add_trace(_dots(name, symbol, colour, values, labels))
    figure.add_vline(x=0, line={"color": BLACK, "width": 1})
    figure.update_xaxes(_axis([value for one, _ in rows for value in (one.seen, one.expected)]))
    figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1], range=[-0.6, len(labels) - 0.4])
    height = 170 + 27 * len(labels)
    legend = {"orientation": "h", "x": 0, "y": -62 / (height - 60 - 106), "yanchor": "top"}
    figure.update_layout(legend=legend)
    words = {"signal": [one.signal for one, _ in rows], "window": [one.window for one, _ in rows]}
    numbers = {"this run": [one.seen for one, _ in rows], "recorded runs": [one.expected for one, _ in rows]}
    table = pd.DataFrame({**words, **numbers, "speaks": [which for _, which in rows]}).round(2)
    finish(figure, title=f"Evidence for {cause.fault}", alt=_alt(cause), table=table, height=height, top=60)
    return figure.update_layout(margin_b=106)


def _evidence(cause: Cause) -> list[tuple[Evidence, str]]:
    return [*((one, "for") for one in cause.supports), *((one, "against") for one in cause.contradicts)]


def _dots(name: str, symbol: str, colour: str, values: list[float], labels: list[str]) -> go.Scatter:
    return go.Scatter(
        x=[_squash(value) for value in values],
        y=labels,
        mode="markers",
        marker={"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2 if "open" in symbol else 0}},
        name=literal(name),
        customdata=values,
        hovertemplate="%{y}: %{customdata:.2f}<extra></extra>",
    )


def _axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis in asinh, linear near 0 and logarithmic far from it, with ticks to beyond the outermost values."""
    seen = [0.0, *(value for value in values if np.isfinite(value))]
    above = _ticks_to(max(seen))
    below = [-tick for tick in _ticks_to(-min(seen))]
    ticks = [*below[::-1], 0.0, *above]
    low, high = (_squash(ticks[place]) for place in (0, -1))
    room = 0.04 * (high - low)
    return {
        "tickvals": [_squash(tick) for tick in ticks],
        "ticktext": [f"{tick:+g}" if tick else "0" for tick in ticks],
        "range": [low - room, high + room],
        "title": {"text": "change, in what healthy runs reach (asinh scale)", "font": {"size": 14}},
    }


def _ticks_to(end: float) -> list[float]:
    """Return ticks from 1 on, up to the first that is not below `end`: 1, 2, 5, 10, ..., or 1, 10, 100 where far."""
    if end <= 0:
        return []
    decades = int(np.ceil(np.log10(max(end, 1.0)))) + 1
    fine = [factor * 10.0**decade for decade in range(decades) for factor in (1, 2, 5)]
    coarse = [10.0**decade for decade in range(decades)]
    chosen = [_up_to(end, ticks) for ticks in (fine, coarse)]
    return chosen[0] if len(chosen[0]) <= _MOST_TICKS else chosen[1]


def _up_to(end: float, ticks: Sequence[float]) -> list[float]:
    return list(ticks[: 1 + int(np.searchsorted(ticks, end))])


def _squash(value: float) -> float:
    return float(np.arcsinh(value))


def _alt(cause: Cause) -> str:
    told = [f"{which}: {one.sentence}" for one, which in _evidence(cause)]
    head = f"Changes that speak for and against {cause.fault}, confidence {sure(cause.confidence)}"
    return f"{head}, in units of what healthy runs reach. {'; '.join(told)}."
