"""A live figure that is as wide as its cell.

plotly.js follows the window when it is told to, not the cell: a figure drawn before its cell is laid out takes 700
pixels, and keeps them when the side bar opens. So a small widget watches the cell and tells plotly.js to look again.
"""

from __future__ import annotations

from typing import Any

import anywidget
import ipywidgets as widgets

_ESM = """
function render({ el }) {
  let width = 0, due = 0;
  el.style.width = "100%";
  const watcher = new ResizeObserver(entries => {
    const now = Math.round(entries[entries.length - 1].contentRect.width);
    if (!now || now === width) return;
    width = now;
    cancelAnimationFrame(due);
    due = requestAnimationFrame(() => window.dispatchEvent(new Event("resize")));
  });
  watcher.observe(el);
  return () => { watcher.disconnect(); cancelAnimationFrame(due); };
}
export default { render };
"""


class CellWidth(anywidget.AnyWidget):
    """An empty line as wide as its cell, which lets plotly.js know whenever that width changes."""

    _esm = _ESM


def fitted(figure: Any, least_px: int) -> widgets.VBox:
    """Return a box in which a figure without a width of its own is as wide as the cell, but not below `least_px`.

    In a narrower cell the box scrolls.
    """
    figure._config = {**figure._config, "responsive": True}
    inside = widgets.VBox([CellWidth(), figure], layout=widgets.Layout(min_width=f"{least_px}px", overflow="hidden"))
    return widgets.VBox([inside], layout=widgets.Layout(width="100%", overflow="auto"))
