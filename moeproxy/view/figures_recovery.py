"""Figure of a job in roles: a signal that runs on, and below it who was away, when, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.recovery.events import FAULT, MANAGER, ROLLOUT, STEP_BEGIN, STEP_COMMIT, TRAINER, Event
from moeproxy.recovery.timeline import Outage, outages
from moeproxy.view.style import BLUE, GREY, LIGHT, ORANGE, PURPLE, VERMILLION, counted, finish

_ROLES = (TRAINER, ROLLOUT, MANAGER)
_PARTS = (("detect", VERMILLION, "x"), ("restart", ORANGE, "/"), ("reconnect", PURPLE, "."))
_NAMES = {"policy_loss": "policy loss", "reward_mean": "mean reward", "grad_norm": "gradient norm"}


def job_figure(events: Sequence[Event], signal: str = "policy_loss") -> go.Figure:
    """Draw a signal over the wall clock, step by step, and every member's outages below it.

    Args:
        events: of a job, finished or not.
        signal: one that finished steps carry (`moeproxy.recovery.trainer_role.SHOWN`).
    """
    begins = [e.t for e in events if e.event == STEP_BEGIN]
    start = min(begins, default=events[0].t if events else 0.0)  # setting up is no part of it
    commits = [e for e in events if e.event == STEP_COMMIT and e.role == TRAINER]
    members = list(dict.fromkeys(e.member for role in _ROLES for e in events if e.role == role)) or ["trainer"]
    away = [item for item in outages(events) if item.role in _ROLES or item.whole_task] if events else []
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.55, 0.45], vertical_spacing=0.08)
    figure.add_trace(_signal(commits, signal, start), row=1, col=1)
    end = (events[-1].t - start) if events else 1.0
    figure.add_trace(
        go.Bar(
            y=members, x=[end] * len(members), base=0, orientation="h", name="up", marker={"color": LIGHT}, width=0.5,
            hoverinfo="skip",
        ),
        row=2, col=1,
    )  # fmt: skip
    for part in _PARTS:
        figure.add_trace(_bars(away, members, part, start), row=2, col=1)
    for fault in [e for e in events if e.event == FAULT and e.role in _ROLES]:
        place: Any = {"row": 1, "col": 1}
        figure.add_vline(x=fault.t - start, line={"color": GREY, "width": 1, "dash": "dot"}, **place)
    figure.update_layout(barmode="overlay", legend={"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom"})
    figure.update_yaxes(title_text=_NAMES.get(signal, signal), row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=1)
    figure.update_xaxes(title_text="seconds since the first step", row=2, col=1)
    table = outage_table(away, start)
    alt = (
        f"{_NAMES.get(signal, signal).capitalize()} of {len(commits)} finished steps over {end:.0f} seconds, "
        f"and {counted(len(away), 'outage')} of {len(members)} members{_worst(away)}."
    )
    title = "A job in roles: training runs on"
    return finish(figure, title=title, alt=alt, table=table, height=520, width=680, top=110)


def outage_table(away: Sequence[Outage], start: float = 0.0) -> pd.DataFrame:
    """Return one row for each outage, times in seconds."""
    return pd.DataFrame(
        [
            {
                "member": "whole task" if item.whole_task else item.member,
                "what": item.kind,
                "step": item.step,
                "at (s)": round(item.fault - start, 2),
                "detect (s)": round(item.detect - item.fault, 2),
                "restart (s)": round(item.ready - item.detect, 2),
                "reconnect (s)": round(item.end - item.ready, 2),
            }
            for item in away
        ],
        columns=["member", "what", "step", "at (s)", "detect (s)", "restart (s)", "reconnect (s)"],
    )


def _signal(commits: Sequence[Event], signal: str, start: float) -> go.Scatter:
    return go.Scatter(
        x=[e.t - start for e in commits],
        y=[e.info.get(signal) for e in commits],
        customdata=[e.step for e in commits],
        mode="lines+markers",
        name=_NAMES.get(signal, signal),
        showlegend=False,  # its axis has the name; one entry fewer leaves a narrow legend clear of the title
        line={"color": BLUE},
        marker={"size": 5},
        hovertemplate="step %{customdata}, %{x:.1f} s: %{y:.3g}<extra></extra>",
    )


def _bars(away: Sequence[Outage], members: Sequence[str], part: tuple[str, str, str], start: float) -> go.Bar:
    name, colour, shape = part
    rows, begins, lengths = [], [], []
    for item in away:
        begin, end = {
            "detect": (item.fault, item.detect),
            "restart": (item.detect, item.ready),
            "reconnect": (item.ready, item.end),
        }[name]
        for member in members if item.whole_task else [item.member]:
            rows.append(member)
            begins.append(begin - start)
            lengths.append(max(0.0, end - begin))
    return go.Bar(
        y=rows,
        x=lengths,
        base=begins,
        orientation="h",
        name=name,
        width=0.5,
        marker={"color": colour, "pattern": {"shape": shape}},
        hovertemplate="%{y}: " + name + " %{x:.2f} s<extra></extra>",
    )


def _worst(away: Sequence[Outage]) -> str:
    if not away:
        return ""
    longest = max(away, key=lambda item: item.seconds)
    name = "the whole task" if longest.whole_task else longest.member
    return f", the longest of {name} with {longest.seconds:.1f} seconds"
