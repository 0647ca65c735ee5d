"""A report as blocks, so that HTML, Markdown and JSON say the same numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moeproxy.triage.jsonable import plain


@dataclass(frozen=True)
class Text:
    """A paragraph; `note` ones are set apart, e.g. "not run"."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table with a caption; the first column names the row.

    Args:
        caption: what the table holds.
        frame: the data.
        folded: whether it is shown only on demand.
    """

    caption: str
    frame: pd.DataFrame
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure made in `moeproxy.view.figures`, with a caption.

    Args:
        caption: what it shows; its text alternative, with the numbers, follows.
        figure: the figure.
        open: whether the table of its data is shown at once.
    """

    caption: str
    figure: go.Figure
    open: bool = False


Block = Text | Heading | Points | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        """The heading as an HTML id."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True)
class Document:
    """A report.

    Args:
        title: its title.
        lead: what came out, in a few sentences.
        sections: the rest.
        data: numbers for machines beside the blocks.
    """

    title: str
    lead: tuple[str, ...]
    sections: tuple[Section, ...]
    data: dict[str, Any] = field(default_factory=dict)


def cell(value: object) -> str:
    """Return a table cell as text: four significant digits, "–" for no value, yes and no for booleans."""
    if value is None or value is pd.NA or (isinstance(value, float | np.floating) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    if isinstance(value, float | np.floating):
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
    return str(value)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table as JSON rows."""
    return plain(frame.astype(object).to_dict("records"))
