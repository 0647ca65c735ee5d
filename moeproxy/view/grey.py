"""What is left of a figure without its colours: which lines and marks could then be taken for one another.

Lightness is L* of CIE 1976, 0 black to 100 white, from sRGB (IEC 61966-2-1); a grey print keeps nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from moeproxy.errors import MoeproxyError

APART = 20.0
"""Difference of L* from which two lines are told apart by their grey alone."""

_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "star", "x")
_MARKS_SHOWN = 8
_HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})\Z")
_RGB = re.compile(r"rgba?\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*([\d.]+)")


@dataclass(frozen=True)
class Look:
    """What a line or its marks look like without colour.

    Args:
        name: of the trace, or of the group of the legend that it belongs to.
        lightness: L* of its colour.
        dash: of its line; "" without one.
        symbol: of its marks; "" without any.
    """

    name: str
    lightness: float
    dash: str
    symbol: str

    def alike(self, other: Look) -> bool:
        """Whether a reader of a grey print could take one for the other."""
        same = (self.dash, self.symbol) == (other.dash, other.symbol)
        return same and abs(self.lightness - other.lightness) < APART


def lightness(colour: str) -> float:
    """Return L* of a colour, "#RRGGBB" or "rgb(...)".

    Raises:
        MoeproxyError: it is another notation.

    Example:
        >>> round(lightness("#777777"))
        50
    """
    parts = _HEX.match(colour)
    found = [int(part, 16) for part in parts.groups()] if parts else []
    if not found and (numbers := _RGB.match(colour)):
        found = [float(part) for part in numbers.groups()]
    if not found:
        raise MoeproxyError(f"the colour {colour!r}", expected="#RRGGBB or rgb(red,green,blue)")
    red, green, blue = (_linear(value / 255) for value in found)
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * y ** (1 / 3) - 16 if y > (6 / 29) ** 3 else y * (29 / 3) ** 3


def confusable(figure: go.Figure) -> list[tuple[str, str]]:
    """Return the pairs of names whose lines or marks look alike in grey and stand in one panel.

    Lines and marks without a name, or with one for both, are meant to look alike.
    """
    pairs: dict[tuple[str, str], None] = {}
    for looks in _panels(figure).values():
        for one, other in itertools.combinations(looks, 2):
            if one.name != other.name and one.alike(other):
                pairs[one.name, other.name] = None
    return list(pairs)


def told_apart(figure: go.Figure) -> go.Figure:
    """Return a copy in which lines that look alike in grey have marks of their own, a few along each line."""
    copy = go.Figure(figure)
    taken: dict[str, str] = {}
    for names in confusable(figure):
        for name in names:
            taken.setdefault(name, _SYMBOLS[len(taken) % len(_SYMBOLS)])
    for trace in _scatters(copy):
        name = _name(trace)
        if name in taken and "lines" in str(trace.mode) and "markers" not in str(trace.mode):
            marker = {"symbol": taken[name], "size": 8, "maxdisplayed": _MARKS_SHOWN, "color": trace.line.color}
            trace.update(mode="lines+markers", marker=marker)
    return copy


def _panels(figure: go.Figure) -> dict[tuple[str, str], list[Look]]:
    found: dict[tuple[str, str], list[Look]] = {}
    for trace in _scatters(figure):
        look = _look(trace)
        if look is not None:
            found.setdefault((trace.xaxis or "x", trace.yaxis or "y"), []).append(look)
    return found


def _scatters(figure: go.Figure) -> Sequence[Any]:
    return [trace for trace in figure.data if trace.type in ("scatter", "scattergl")]  # pyright: ignore


def _name(trace: Any) -> str:
    return str(trace.legendgroup or trace.name or "")


def _look(trace: Any) -> Look | None:
    """Return the look of a trace; None for bands, invisible ones and those without a name."""
    mode = str(trace.mode or "lines")
    drawn = "lines" in mode and trace.line.width != 0 and trace.fill in (None, "none")
    marked = "markers" in mode
    colour = trace.line.color if drawn and trace.line.color else trace.marker.color or trace.marker.line.color
    if not _name(trace) or not (drawn or marked) or not isinstance(colour, str):
        return None
    dash = str(trace.line.dash or "solid") if drawn else ""
    symbol = trace.marker.symbol if isinstance(trace.marker.symbol, str) else "circle"
    # Marks smaller than a line is thick in print do not tell it from another.
    seen = marked and not (drawn and isinstance(trace.marker.size, int | float) and trace.marker.size < 6)
    return Look(_name(trace), lightness(colour), dash, symbol if seen else "")


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
