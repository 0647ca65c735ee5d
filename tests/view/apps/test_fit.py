"""A figure as wide as its cell: what reaches the page. Whether it is, a browser says (tests/browser)."""

from __future__ import annotations

import plotly.graph_objects as go

from moeproxy.view.apps.fit import CellWidth, fitted


def test_the_figure_is_told_to_follow_and_a_watcher_stands_beside_it() -> None:
    figure = go.FigureWidget(go.Figure(go.Scatter(y=[1])))
    box = fitted(figure, 500)
    [inside] = box.children
    watcher, inner = inside.children
    assert isinstance(watcher, CellWidth)
    assert inner is figure
    assert figure.get_state()["_config"]["responsive"] is True
    assert (inside.layout.min_width, box.layout.overflow) == ("500px", "auto")
    assert "ResizeObserver" in CellWidth._esm
