"""A figure of the page laid out for print: as wide as one or two columns, no title, readable type, no colour needed.

A figure is laid out at 1.5 to about 2 times the width in pixels that it has on paper and then made smaller as a whole,
so type, lines and marks keep their proportions: 14 pixels become 7 points at the factor 1.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from moeproxy.errors import MoeproxyError
from moeproxy.view.grey import told_apart
from moeproxy.view.style import ON_PAGE, describe, legend_px

PX_PER_MM = 96 / 25.4
"""Pixels of CSS in a millimetre."""

LEAST_PT = 5.0
"""Smallest type, in points: what journals ask for in figures."""

_PT_PER_PX = 0.75
_FACTOR = 1.5
_SMALLEST_LAYOUT_PT_PX = 14
_TITLE_PX = 34
_MOST_POINTS = 5000


@dataclass(frozen=True)
class Column:
    """A width that figures have in print.

    Args:
        name: what it is called.
        mm: its size in millimetres.
        beside: entries of a legend that stand beside each other.
    """

    name: str
    mm: float
    beside: int


SINGLE, DOUBLE = Column("single", 88.0, 2), Column("double", 180.0, 4)
COLUMNS = (SINGLE, DOUBLE)
"""Single and double column; journals ask for 85 to 89 and 174 to 183 mm."""


@dataclass(frozen=True, eq=False)
class Sheet:
    """A figure laid out for a column.

    Args:
        figure: ready to be drawn.
        column: what it is laid out for.
        width_px, height_px: size of the layout.
    """

    figure: go.Figure
    column: Column
    width_px: int
    height_px: int

    @property
    def factor(self) -> float:
        """By how much it is made smaller."""
        return self.width_px / (self.column.mm * PX_PER_MM)

    @property
    def height_mm(self) -> float:
        """Height on paper."""
        return self.height_px / self.factor / PX_PER_MM

    @property
    def smallest_pt(self) -> float:
        """Size of the smallest type on paper, in points."""
        return smallest_px(self.figure) / self.factor * _PT_PER_PX


def sheet(figure: go.Figure, column: Column, family: str) -> Sheet | None:
    """Lay a figure out for a column; None where its type would have to be smaller than `LEAST_PT`.

    Args:
        figure: made in this room.
        column: `SINGLE` or `DOUBLE`.
        family: font family of all text.

    Raises:
        MoeproxyError: the figure was not made here.
    """
    describe(figure)
    layout: Any = figure.layout
    if layout.height is None or layout.margin.t is None:
        raise MoeproxyError("the figure has no height", expected="a figure of moeproxy.view.figures")
    wide = column.mm * PX_PER_MM
    factor = max(_FACTOR, float(layout.meta["min_width"]) / wide)
    if smallest_px(figure) * _PT_PER_PX / factor < LEAST_PT:
        return None
    made = _opened(told_apart(figure))
    gone = _TITLE_PX if layout.title.text and layout.margin.t >= _TITLE_PX + 10 else 0
    more = _more_legend(layout.meta.get("entries", 0), column)
    height = int(layout.height) - gone + more
    made.update_layout(margin_b=(layout.margin.b or 0) + more)
    made.update_layout(title_text="", font_family=family, hoverlabel_font_family=family, meta=None)
    made.update_layout(margin_t=layout.margin.t - gone, height=height, width=round(wide * factor), autosize=False)
    return Sheet(made, column, round(wide * factor), height)


def _more_legend(entries: int, column: Column) -> int:
    """Return by how many pixels a legend is higher in a column than on the page."""
    return legend_px(entries, column.beside) - legend_px(entries, ON_PAGE)


def smallest_px(figure: go.Figure) -> float:
    """Return the size of the smallest type in a figure, in pixels of its layout; its title is left out."""
    stored = figure.to_dict()
    stored["layout"].pop("title", None)
    stored["layout"].pop("hoverlabel", None)
    stored["layout"].pop("template", None)
    return min([_SMALLEST_LAYOUT_PT_PX, *_sizes(stored, "")])


def _sizes(value: Any, key: str) -> Iterator[float]:
    """Yield sizes of fonts, wherever they stand."""
    if isinstance(value, dict):
        if key.endswith("font") and isinstance(value.get("size"), int | float):
            yield float(value["size"])
        for name, item in value.items():
            yield from _sizes(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict):
                yield from _sizes(item, key)


def _opened(figure: go.Figure) -> go.Figure:
    """Draw as vectors what the page draws by WebGL, which an image holds as pixels; very long lines stay pixels."""
    traces = []
    for trace in figure.data:
        short = len(trace.x if trace.x is not None else ()) <= _MOST_POINTS  # pyright: ignore[reportAttributeAccessIssue]
        if trace.type == "scattergl" and short:  # pyright: ignore[reportAttributeAccessIssue]
            stored = {name: value for name, value in trace.to_plotly_json().items() if name != "type"}  # pyright: ignore
            traces.append(go.Scatter(stored))
        else:
            traces.append(trace)
    return go.Figure(traces, figure.layout)
