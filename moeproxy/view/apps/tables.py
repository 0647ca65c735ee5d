"""Tables beside a live figure: HTML that a screen reader walks through, updated with the figure."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import ipywidgets as widgets
import pandas as pd

_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums"
_HEAD = f"{_CELL};font-weight:600;border-bottom:1px solid currentColor;white-space:nowrap"
_TABLE = "border-collapse:collapse;line-height:1.35;font-size:13px"


def html_frame(frame: pd.DataFrame, caption: str, *, wrap: bool = True) -> str:
    """Return a data frame as an HTML table with a caption and column headers; every cell is escaped."""
    cell_style = _CELL if wrap else f"{_CELL};white-space:nowrap"
    head = "".join(f"<th scope='col' style='{_HEAD}'>{html.escape(str(name))}</th>" for name in frame)
    rows = "".join(
        "<tr>" + "".join(f"<td style='{cell_style}'>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    title = f"<caption style='text-align:left;font-weight:600;padding:2px 0'>{html.escape(caption)}</caption>"
    return f"<table style='{_TABLE}'>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def html_rows(label: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, wrap: bool = True) -> str:
    """Return cells of ready HTML as a table with a name; the first cell of a row is its header.

    Args:
        label: the table's name, for screen readers.
        head: texts of the columns; empty: no line of headers.
        rows: cells, escaped where they have to be.
        wrap: break long cells.
    """
    cell_style = _CELL if wrap else f"{_CELL};white-space:nowrap"
    head_style = f"{_HEAD};white-space:normal" if wrap else _HEAD
    titles = "".join(f"<th scope='col' style='{head_style}'>{html.escape(name)}</th>" for name in head)
    lines = "".join(
        f"<tr><th scope='row' style='{cell_style};font-weight:600'>{first}</th>"
        + "".join(f"<td style='{cell_style}'>{cell}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f"<table aria-label='{html.escape(label, quote=True)}' style='{_TABLE}'>{top}<tbody>{lines}</tbody></table>"


class LiveTable:
    """A table that is replaced as a whole, scrolling within a given height.

    Args:
        height_px: height beyond which it scrolls.
        folded: show only the caption until the reader opens it (by mouse, or by the enter key).
        wrap: break long cells; otherwise a wide table scrolls sideways.
    """

    def __init__(self, height_px: int = 260, *, folded: bool = False, wrap: bool = True) -> None:
        self.widget = widgets.HTML(layout=widgets.Layout(width="100%", max_width="950px"))
        self.frame = pd.DataFrame()
        self._height_px, self._folded, self._wrap = height_px, folded, wrap

    def show(self, frame: pd.DataFrame, caption: str) -> None:
        """Show `frame`; nothing is drawn for an empty one."""
        self.frame = frame
        if frame.empty:
            self.widget.value = ""
            return
        # A scrolling region must be focusable, or the keyboard cannot scroll it. JupyterLab takes keys for its own
        # commands unless the focused element itself says no.
        keys = "data-lm-suppress-shortcuts='true'"
        box = f"max-height:{self._height_px}px;overflow:auto"
        label = html.escape(caption, quote=True)
        body = f"<div tabindex='0' role='region' aria-label='{label}' {keys} style='{box}'>"
        body += html_frame(frame, caption, wrap=self._wrap) + "</div>"
        if self._folded:
            body = f"<details><summary {keys}>{html.escape(caption)}, as a table</summary>{body}</details>"
        self.widget.value = body
