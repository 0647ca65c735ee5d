"""The live figure of a log: after a zoom it holds the points of the part that is seen, all of them kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeproxy.view.apps.log_zoom import ZoomFigure
from moeproxy.view.apps.ui import Status
from moeproxy.view.log_view import LogView, log_view
from tests.view.made_logs import trace

LINE = 8  # of the first run in the first panel
N = 100_000


@pytest.fixture
def status() -> Status:
    return Status()


@pytest.fixture
def figure(status: Status) -> ZoomFigure:
    values = np.random.default_rng(0).normal(size=N)
    return ZoomFigure(log_view([trace(reward_mean=values)]), status)


def _page_says(figure: ZoomFigure, **changes: Any) -> None:
    """Hand over what the page sends after a zoom."""
    data = {name.replace("__", "."): value for name, value in changes.items()}
    figure.widget._handler_js2py_relayout({"new": {"relayout_data": data, "source_view_id": "page"}})


def _zoom(figure: ZoomFigure, low: float, high: float) -> None:
    _page_says(figure, **{"xaxis.range[0]": low, "xaxis.range[1]": high})
    assert figure.settle()


def test_a_zoom_brings_the_exact_points_and_a_reset_the_whole(figure: ZoomFigure, status: Status) -> None:
    whole = len(figure.widget.data[LINE].x)
    assert whole < 2100
    _zoom(figure, 500.5, 999)
    line = figure.widget.data[LINE]
    assert line.x.tolist() == [float(step) for step in range(500, 1001)]
    assert line.y.tolist() == figure.view.runs[0].series["reward_mean"].values_S[500:1001].tolist()
    _page_says(figure, xaxis__autorange=True)
    assert figure.settle()
    assert figure.seen is None
    assert len(figure.widget.data[LINE].x) == whole
    _zoom(figure, 500.5, 999)  # the same part again, of which plotly's own record thinks that nothing changed
    assert len(figure.widget.data[LINE].x) == 501
    assert not status.is_error


def test_a_range_that_did_not_change_is_not_drawn_again(figure: ZoomFigure) -> None:
    _zoom(figure, 10, 20)
    drawn = figure.refills
    _page_says(figure, **{"yaxis.range[0]": 0.0, "yaxis.range[1]": 1.0})
    assert figure.settle()
    assert figure.refills == drawn
    _zoom(figure, 30, 20)  # an axis dragged over itself
    assert figure.seen == (20.0, 30.0)


def test_a_page_that_attaches_later_finds_the_part_that_is_seen(figure: ZoomFigure) -> None:
    _zoom(figure, 500, 600)
    state = figure.widget.get_state()
    assert state["_widget_layout"]["xaxis"]["autorange"] is False
    assert list(state["_widget_layout"]["xaxis"]["range"]) == [500, 600]
    assert state["_widget_data"][LINE]["x"]["shape"] == (103,)


def test_more_steps_keep_the_zoom_and_another_run_resets_it(figure: ZoomFigure) -> None:
    _zoom(figure, N - 100, N + 100)
    longer = log_view([trace(reward_mean=np.zeros(N + 50))])
    figure.show(longer, keep_zoom=True)
    assert figure.widget.data[LINE].x[-1] == N + 49
    assert len(figure.widget.data[LINE].x) == 151
    figure.show(log_view([trace(kl=[1.0, 2.0])]))
    assert figure.seen is None
    assert figure.widget.layout.xaxis.autorange is True
    assert figure.widget.data[LINE].x.tolist() == [0.0, 1.0]
    assert figure.widget.layout.yaxis.type == "log"


def test_the_number_of_panels_may_change_in_place(figure: ZoomFigure) -> None:
    run = trace(**{name: [1.0, 2.0] for name in ("kl", "grad_norm", "entropy", "reward_mean", "aux_loss", "z_loss")})
    figure.show(log_view([run], list(run.signals)))
    assert figure.widget.layout.yaxis6.visible is True
    assert figure.widget.layout.xaxis.anchor == "y6"
    tall = figure.widget.layout.height
    figure.show(LogView())
    assert figure.widget.layout.yaxis6.visible is False
    assert figure.widget.layout.height < tall
    assert figure.widget.layout.title.text == "Nothing is read yet"
