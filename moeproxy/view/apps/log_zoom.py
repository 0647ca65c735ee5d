"""A live figure of a log: after every zoom it is given the points that the screen can show, from all that there are."""

from __future__ import annotations

import threading
from typing import Any

from moeproxy.view.apps.live_figure import LiveFigure
from moeproxy.view.apps.ui import Debouncer, Status
from moeproxy.view.figures_log import LogView, layout_values, values, whole_figure

_WAIT_S = 0.08  # a zoom by the wheel comes as many small ones


class ZoomFigure(LiveFigure):
    """A figure that holds what is seen, and the view that holds everything.

    Args:
        view: what is shown at first.
        status: told when drawing fails.
    """

    def __init__(self, view: LogView, status: Status) -> None:
        super().__init__(whole_figure(view))
        self.view, self._status = view, status
        self.seen: tuple[float, float] | None = None
        self.refills = 0
        self._place = threading.Lock()
        self._refill = Debouncer(status.guard(self._fill), _WAIT_S)
        layout: Any = self.widget.layout
        layout.on_change(status.guard(self._zoomed), "xaxis.range")
        layout.on_change(status.guard(self._reset), "xaxis.autorange")

    def show(self, view: LogView, *, keep_zoom: bool = False) -> None:
        """Draw another view.

        Args:
            view: the new one.
            keep_zoom: whether the part seen stays, as it should when only new steps have come.
        """
        with self._place:
            self.view = view
            if not keep_zoom:
                self.seen = None
        with self.change() as figure:
            tall = figure.layout.height
            self._put(figure, values(view, self.seen))
            figure.update_layout(layout_values(view))
            if not keep_zoom:
                for axis in ("xaxis", "yaxis", *(f"yaxis{n}" for n in range(2, len(view.signals) + 1))):
                    figure.layout[axis].autorange = True
        drawn: Any = self.widget.layout
        if drawn.height != tall:
            self._follow_cell()

    def _follow_cell(self) -> None:
        """Let the page choose the width again: plotly.js fixes it whenever it is told another height."""
        with self._lock:
            self.widget._send_relayout_msg({"width": None, "autosize": True})

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until the last zoom is drawn; return whether it is."""
        return self._refill.settle(timeout_s)

    def _zoomed(self, _: Any, edges: Any) -> None:
        if edges is None or len(edges) != 2 or any(edge is None for edge in edges):
            return
        self._look((float(min(edges)), float(max(edges))))

    def _reset(self, _: Any, automatic: Any) -> None:
        if automatic:
            self._look(None)

    def _look(self, seen: tuple[float, float] | None) -> None:
        with self._place:
            if seen == self.seen:
                return
            self.seen = seen
        self._refill()

    def _fill(self) -> None:
        with self._place:
            view, seen = self.view, self.seen
        new = values(view, seen)
        with self.change() as figure:
            self._put(figure, new)
            # A page that attaches later must find the same part, and plotly's own note of a zoom leaves this as it was.
            figure.layout.xaxis.autorange = seen is None
            if seen is None:
                # Plotly keeps the range of the last zoom, and would take the same zoom again for no change.
                figure._layout["xaxis"].pop("range", None)
        self.refills += 1

    @staticmethod
    def _put(figure: Any, new: list[dict[str, Any]]) -> None:
        for trace, properties in zip(figure.data, new, strict=True):
            trace.update(properties, overwrite=False)
