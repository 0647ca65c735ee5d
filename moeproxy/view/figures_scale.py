"""The figure of scale: what ranks hold at their peak against a device's memory, and where in the step the peak arises.

Pure functions from a `ScaleView` to a figure and to new values for its traces. Number and order of traces never change,
so a live figure is updated in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moeproxy.scale.emulation import CATEGORIES, Emulation
from moeproxy.view.style import BLACK, GREEN, GREY, INK, LIGHT, ORANGE, ORIGINAL, PROXY, PURPLE, SKY, finish

GIB = 2**30
COURSES = 4
"""Traces of memory over the step: chosen and hottest rank of original and proxy."""
WHAT = {
    "parameters": "weights of this rank",
    "gathered": "gathered weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations and logits",
    "communication": "communication buffers",
}
_FILLS = {
    "parameters": (GREY, ""),
    "gathered": (SKY, "/"),
    "gradients": (GREEN, "x"),
    "optimizer": (ORANGE, "."),
    "activations": (PURPLE, ""),
    "communication": (LIGHT, "\\"),
}
_PHASES = ("old log-probs", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Bar:
    """What one rank holds at its peak.

    Args:
        label: name of the rank.
        peak: bytes by category of `CATEGORIES`.
        emulated: op by op, rather than by the planner's sum.
        model: "original" or "proxy".
        hottest: whether no rank holds more.
    """

    label: str
    peak: Mapping[str, float]
    emulated: bool
    model: str
    hottest: bool

    @property
    def nbytes(self) -> float:
        """Bytes in all."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Course:
    """The memory of one rank along its step.

    Args:
        label: name of the rank.
        model: "original" or "proxy"; decides the colour.
        hottest: drawn solid; others dotted.
        emulation: of the step.
    """

    label: str
    model: str
    hottest: bool
    emulation: Emulation


@dataclass(frozen=True)
class ScaleView:
    """What the figure shows.

    Args:
        bars: whole depth, original first.
        courses: emulated steps, at most `COURSES`; may be of fewer layers.
        device: name of the device type.
        room_gib: its memory.
        usable: share of it that tensors may take.
        depth: what the courses are of ("the first 4 of 48 layers").
        stale: the courses are of earlier settings.
        refused: the bars too, since what the controls say is impossible.
    """

    bars: Sequence[Bar] = ()
    courses: Sequence[Course] = ()
    device: str = ""
    room_gib: float = 0.0
    usable: float = 0.9
    depth: str = ""
    stale: bool = False
    refused: bool = False

    @property
    def too_large(self) -> list[Bar]:
        """The ranks that do not fit."""
        return [bar for bar in self.bars if bar.nbytes > self.room_gib * self.usable * GIB]

    def describe(self) -> str:
        """Return in one sentence what fits and where the peak of the hottest rank arises."""
        words = [f"{bar.label}: {bar.nbytes / GIB:,.1f} GiB" for bar in self.bars]
        verdict = (
            f"{', '.join(bar.label for bar in self.too_large)} does not fit into"
            if self.too_large
            else "all of them fit into"
        )
        sentence = (
            f"{'; '.join(words)}: {verdict} {_percent(self.usable)} of the {self.room_gib:g} GiB of {self.device}."
        )
        if ratios := self.hotter:
            told = ", ".join(f"{ratio:.2f} times in {depth}" for depth, ratio in ratios.items())
            sentence += f" The original's hottest rank over the chosen one: {told}."
        hot = next((one for one in self.courses if one.hottest and not self.stale), None)
        if hot is None:
            return sentence
        found = hot.emulation
        place = f"{found.peak_phase}, {found.peak_module or 'outside any module'}"
        return f"{sentence} In {self.depth}, {hot.label} peaks at {found.peak_bytes / GIB:,.2f} GiB in: {place}."

    @property
    def hotter(self) -> dict[str, float]:
        """The peak of the original's hottest rank over the chosen one's, by depth; empty where that is the hottest."""
        bars = {bar.hottest: bar.nbytes for bar in self.bars if bar.model == "original"}
        found = {"whole depth": round(bars[True] / bars[False], 2)} if len(bars) == 2 else {}
        courses = {one.hottest: one.emulation.peak_bytes for one in self.courses if one.model == "original"}
        if found and len(courses) == 2 and not self.stale:
            found[self.depth] = round(courses[True] / courses[False], 2)
        return found


def scale_figure(view: ScaleView) -> go.Figure:
    """Return the complete figure for `view`."""
    figure = make_subplots(
        rows=2, row_heights=[0.42, 0.58], vertical_spacing=0.2, subplot_titles=(bars_title(view), courses_title(view))
    )
    for place, trace in enumerate(_traces(view)):
        figure.add_trace(trace, row=1 if place < len(CATEGORIES) else 2, col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=14)
    figure.update_xaxes(title_text="GiB", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_yaxes(title_text="GiB", rangemode="tozero", row=2, col=1)
    ticks = {"tickmode": "array", "tickvals": [place + 0.5 for place in range(5)], "ticktext": list(_PHASES)}
    figure.update_xaxes(range=[0, 5], showgrid=False, row=2, col=1, **ticks)
    finish(figure, title="", alt=view.describe(), table=view_table(view), height=640, top=50)
    figure.update_layout(
        barmode="stack",
        bargap=0.3,
        shapes=shapes(view),
        legend={"orientation": "h", "x": 0, "y": -0.1, "yanchor": "top", "traceorder": "normal"},
        margin={"l": 70, "r": 40, "t": 50, "b": 110},
        uirevision="scale",
    )
    return figure


def bars_title(view: ScaleView) -> str:
    """Return the title of the upper part."""
    ways = {bar.emulated for bar in view.bars}
    how = {frozenset({True}): "emulated op by op", frozenset({False}): "by the planner's sum"}
    told = how.get(frozenset(ways), "partly emulated")
    line = f"line: {_percent(view.usable)} of {view.device}'s {view.room_gib:g} GiB"
    return f"Peak of a rank, whole depth, {told}{' for EARLIER SETTINGS' if view.refused else ''}; {line}"


def courses_title(view: ScaleView) -> str:
    """Return the title of the lower part."""
    if not view.courses:
        return "Memory over the step: not emulated yet"
    return f"Memory over the step, {view.depth}, emulated{' for EARLIER SETTINGS' if view.stale else ''}"


def shapes(view: ScaleView) -> list[dict[str, Any]]:
    """Return the device's limit, and the lines between the phases."""
    limit = view.room_gib * view.usable
    lines = [{"x0": limit, "x1": limit, "xref": "x", "yref": "y domain", "line": {"color": INK, "dash": "dash"}}]
    lines += [
        {"x0": place, "x1": place, "xref": "x2", "yref": "y2 domain", "line": {"color": GREY, "width": 0.5}}
        for place in range(1, 5)
    ]
    return [{"type": "line", "y0": 0, "y1": 1} | line for line in lines]


def values(view: ScaleView) -> list[dict[str, Any]]:
    """Return, per trace of `scale_figure`, the properties that depend on the view."""
    labels = [bar.label for bar in view.bars]
    found: list[dict[str, Any]] = [
        {"y": labels, "x": [bar.peak.get(name, 0.0) / GIB for bar in view.bars]} for name in CATEGORIES
    ]
    found += [_course(view, place) for place in range(COURSES)]
    return [*found, _peaks(view)]


def _course(view: ScaleView, place: int) -> dict[str, Any]:
    if place >= len(view.courses):
        return {"x": [], "y": [], "name": "", "showlegend": False}
    course = view.courses[place]
    line = {
        "color": ORIGINAL if course.model == "original" else PROXY,
        "dash": "solid" if course.hottest else "dot",
        "width": 4 if course.model == "original" else 2,  # where both are equal, both are seen
    }
    total_P = course.emulation.timeline_PC.sum(axis=1) / GIB
    return {
        "x": positions(course.emulation),
        "y": total_P,
        "name": course.label,
        "showlegend": True,
        "line": line,
        "opacity": 0.35 if view.stale else 1.0,
    }


def _peaks(view: ScaleView) -> dict[str, Any]:
    x, y, text = [], [], []
    for course in view.courses:
        total_P = course.emulation.timeline_PC.sum(axis=1)
        place = int(np.argmax(total_P))
        x.append(float(positions(course.emulation)[place]))
        y.append(float(total_P[place] / GIB))
        text.append(f"{course.label}: peak in {course.emulation.peak_module or 'no module'}")
    return {"x": x, "y": y, "text": text, "showlegend": bool(x)}


def positions(emulation: Emulation) -> np.ndarray:
    """Return the place of every point of the timeline on an axis on which each phase is one wide.

    Micro-batches repeat phases: their points share the width of the phase, in order.
    """
    names = [emulation.phases[phase] for phase in emulation.phase_P]
    places = np.array([_PHASES.index(name) if name in _PHASES else -1 for name in names], float)
    for phase in np.unique(places):
        within = np.flatnonzero(places == phase)
        places[within] += (np.arange(len(within)) + 0.5) / len(within)
    return np.maximum(places, 0.0)  # what lives before the step stands at its beginning


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def view_table(view: ScaleView) -> pd.DataFrame:
    """Return the bars as numbers, in GiB."""
    rows = [
        {"rank": bar.label, **{WHAT[name]: round(bar.peak.get(name, 0.0) / GIB, 2) for name in CATEGORIES}}
        | {"peak, GiB": round(bar.nbytes / GIB, 2), "how": "emulated" if bar.emulated else "planner's sum"}
        for bar in view.bars
    ]
    return pd.DataFrame(rows, columns=["rank", *WHAT.values(), "peak, GiB", "how"])


def _traces(view: ScaleView) -> list[go.Bar | go.Scatter]:
    drawn = values(view)
    bars: list[go.Bar | go.Scatter] = [
        go.Bar(
            **drawn[place],
            name=WHAT[name],
            orientation="h",
            marker={"color": _FILLS[name][0], "pattern": {"shape": _FILLS[name][1], "size": 5, "solidity": 0.25}},
            hovertemplate=f"%{{y}}: %{{x:.2f}} GiB of {WHAT[name]}<extra></extra>",
        )
        for place, name in enumerate(CATEGORIES)
    ]
    lines = [go.Scatter(**drawn[len(CATEGORIES) + place], mode="lines", hoverinfo="y+name") for place in range(COURSES)]
    marker = {"symbol": "star", "size": 12, "color": BLACK}
    peaks = go.Scatter(**drawn[-1], mode="markers", name="peak", marker=marker, hovertemplate="%{text}<extra></extra>")
    return [*bars, *lines, peaks]
