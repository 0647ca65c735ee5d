"""What all figures share: colours of fixed meaning, layout, a text alternative and the data as a table.

Colours are Okabe and Ito's, told apart with every common colour blindness; dash or symbol repeats what the
colour says. The original is blue and the proxy vermillion everywhere.
"""

from __future__ import annotations

import html
import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from moeproxy.errors import MoeproxyError

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, GREY, BLACK, LIGHT = "#CC79A7", "#56B4E9", "#767676", "#000000", "#E6E6E6"
ORIGINAL, PROXY = BLUE, VERMILLION

METHOD_COLOURS = {
    "original": ORIGINAL,
    "cluster": PROXY,
    "frequency": GREEN,
    "gate": PURPLE,
    "reap": SKY,
    "random": ORANGE,
    "first": GREY,
    "merge": BLACK,
}
METHOD_SYMBOLS = {
    "original": "star",
    "cluster": "circle",
    "frequency": "diamond",
    "gate": "triangle-up",
    "reap": "triangle-down",
    "random": "square-open",
    "first": "x-thin-open",
    "merge": "cross-open",
}
_VARIANT_SYMBOLS = {"router": "circle-open", "co-activation": "circle-open-dot", "context": "circle-cross-open"}
_SPARE = (GREEN, PURPLE, SKY, ORANGE, GREY, BLACK)

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, GRID = "#222222", "#E3E7EB"
ENTRY_PX, ON_PAGE = 21, 5
"""Height of an entry of a legend, and how many stand beside each other on the page."""


def method_colour(method: str) -> str:
    """Return the colour of a way to choose experts; a variant ("cluster: router") has its method's, others black."""
    return METHOD_COLOURS.get(method.partition(":")[0], BLACK)


def method_symbol(method: str) -> str:
    """Return the marker of a way to choose experts; each single view of the clustering has its own."""
    variant = method.partition(":")[2].strip()
    return _VARIANT_SYMBOLS.get(variant) or METHOD_SYMBOLS.get(method, "hexagon")


def model_colours(models: list[str], original: str = "original") -> dict[str, str]:
    """Return a colour for each model: original blue, first proxy vermillion, others from the palette."""
    others = [model for model in models if model != original]
    spare = [PROXY, *(_SPARE[i % len(_SPARE)] for i in range(len(others)))]
    return {original: ORIGINAL} | dict(zip(others, spare, strict=False))


def faint(colour: str, opacity: float = 0.13) -> str:
    """Return a hex colour as rgba with low opacity, for bands."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def literal(text: str) -> str:
    """Return text as plotly shows it letter by letter: it reads a few tags and entities in what it draws."""
    return html.escape(text, quote=False)


def legend_px(entries: int, beside: int) -> int:
    """Return the height of a legend below a figure, by its entries and how many of them stand beside each other."""
    return ENTRY_PX * math.ceil(entries / beside)


def counted(number: int, what: str) -> str:
    """Return "1 step" or "2 steps"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def finish(
    figure: go.Figure,
    *,
    title: str,
    alt: str,
    table: pd.DataFrame,
    height: int,
    width: int = 560,
    top: int = 84,
) -> go.Figure:
    """Return the figure with the common layout, its text alternative and its data.

    Args:
        figure: a figure with traces; it is changed in place and returned.
        title: short title, drawn at the left.
        alt: one sentence that says what the figure shows, numbers included.
        table: the data behind it.
        height: height in pixels.
        width: least width in pixels; beyond it the width follows the page.
        top: pixels above the axes, for the title and what else stands there.
    """
    cells = table.astype(object).to_numpy().tolist()
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.985, "yanchor": "top"},
        title_font={"size": 17},
        font={"family": FONT, "size": 14, "color": INK},
        height=height,
        margin={"l": 70, "r": 30, "t": top, "b": 60},
        hoverlabel={"font": {"family": FONT}},
        meta={"alt": alt, "columns": [str(c) for c in table], "rows": cells, "min_width": width},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, linecolor="#9AA4AE", ticks="outside", automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, linecolor="#9AA4AE", automargin=True)
    return figure


def dress_panels(figure: go.Figure, height: int, below: int, hovermode: str) -> None:
    """Give a live figure of several panels its look: legend below, grid, room for a title.

    Args:
        figure: changed in place.
        height, below: of the figure, and of the space for axis and legend, in pixels.
        hovermode: plotly's.
    """
    figure.update_annotations(font_size=14)
    figure.update_layout(
        height=height,
        template="plotly_white",
        font={"family": FONT, "color": INK},
        margin={"l": 60, "r": 15, "t": 85, "b": below},
        legend={"orientation": "h", "x": 0.0, "y": -0.09, "yanchor": "top"},
        hovermode=hovermode,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False)


def describe(figure: go.Figure) -> str:
    """Return the one-sentence text alternative of a figure of this room.

    Raises:
        MoeproxyError: the figure was not made here.
    """
    return str(_meta(figure)["alt"])


def data_table(figure: go.Figure) -> pd.DataFrame:
    """Return the numbers behind a figure of this room.

    Raises:
        MoeproxyError: the figure was not made here.
    """
    meta = _meta(figure)
    return pd.DataFrame(list(meta["rows"]), columns=pd.Index(meta["columns"]))


def _meta(figure: go.Figure) -> dict[str, Any]:
    meta = figure.layout.meta  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(meta, dict) or "alt" not in meta:
        raise MoeproxyError("the figure carries no text alternative", expected="a figure of moeproxy.view.figures")
    return meta
