"""Figures without their colours: what lightness is, what looks alike then, and that no figure of ours does."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.view import figures
from moeproxy.view.figures_evidence import evidence_figure
from moeproxy.view.figures_incident import signals_figure
from moeproxy.view.figures_outcome import match_figure, severity_figure
from moeproxy.view.figures_timeline import timeline_figure
from moeproxy.view.grey import confusable, lightness, told_apart
from moeproxy.view.style import BLUE, VERMILLION
from moeproxy.view.timeline import timeline
from tests.view import postmortems, shared


def _lines(*styles: dict[str, object], mode: str = "lines") -> go.Figure:
    return go.Figure([go.Scatter(x=[0, 1], y=[0, 1], mode=mode, name=f"n{i}", line=s) for i, s in enumerate(styles)])


def test_lightness_is_that_of_cie() -> None:
    # Published values of L* for sRGB: white 100, black 0, mid grey 53.585, red 53.24, green 87.73, blue 32.30.
    known = {"#ffffff": 100, "#000000": 0, "#808080": 53.585, "#ff0000": 53.24, "#00ff00": 87.73, "#0000ff": 32.30}
    for colour, value in known.items():
        assert lightness(colour) == pytest.approx(value, abs=0.02)
    assert lightness("rgba(255,255,255,0.1)") == pytest.approx(100)
    with pytest.raises(MoeproxyError, match="colour 'red'"):
        lightness("red")


def test_lines_are_told_apart_by_lightness_dash_or_marks() -> None:
    blue, other = {"color": BLUE}, {"color": VERMILLION}
    assert confusable(_lines(blue, other)) == [("n0", "n1")]
    assert confusable(_lines(blue, {"color": VERMILLION, "dash": "dash"})) == []
    assert confusable(_lines(blue, {"color": "#E69F00"})) == []
    assert confusable(_lines(blue, {"color": VERMILLION, "width": 0})) == []
    helped = told_apart(_lines(blue, other))
    assert confusable(helped) == []
    assert [trace.marker.symbol for trace in helped.data] == ["circle", "square"]
    assert all(trace.marker.maxdisplayed for trace in helped.data), "a few marks, not one for every step"
    assert helped.data[0].line.color == BLUE


def test_lines_of_one_group_and_of_other_panels_are_no_pair() -> None:
    figure = _lines({"color": BLUE}, {"color": VERMILLION})
    figure.data[1].update(yaxis="y2")
    assert confusable(figure) == []
    figure.data[1].update(yaxis="y", legendgroup="one")
    figure.data[0].update(legendgroup="one")
    assert confusable(figure) == []


def test_no_figure_of_a_report_needs_colour() -> None:
    traces = shared.traces()
    resumed, poisoned, beside = postmortems.resumed(), postmortems.poisoned(), postmortems.beside()
    drawn = [
        timeline_figure(timeline(resumed, postmortems.ACTIONS), "x"),
        timeline_figure(timeline(beside, postmortems.ACTIONS), "x"),
        signals_figure(poisoned, poisoned.judgements[0]),
        signals_figure(beside, beside.judgements[0], actions=postmortems.ACTIONS),
        evidence_figure(poisoned.judgements[0].diagnosis),
        match_figure(postmortems.reproduction()),
        severity_figure(postmortems.remedy()),
    ]
    assert [confusable(figure) for figure in drawn] == [[]] * len(drawn)
    # Those that were there before rely on colour beside the dash; in print they get marks.
    older = [
        figures.overlay(traces, "quiet_update"),
        figures.method_comparison(shared.accuracy(), original=0.9, chance=0.1),
    ]
    assert confusable(older[0]) != []
    assert [confusable(told_apart(figure)) for figure in older] == [[]] * len(older)
