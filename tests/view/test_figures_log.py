"""Figures of logs: what is drawn where, in one panel a signal, for one run or two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.view.figures_log import log_figure, values, whole_figure
from moeproxy.view.log_series import KINDS
from moeproxy.view.log_view import LogView, log_view, usual
from moeproxy.view.style import data_table, describe
from tests.view.made_logs import jsonl, log_of, trace, verl

FIRST_PANEL, PER_PANEL, PER_RUN = 8, 11, 4
LINE, SINGLE, OLD, MARKS = range(4)
RESUMES, FAILURES = 8, 9


def _part(figure: go.Figure, panel: int, part: int, run: int = 0) -> Any:
    return figure.data[FIRST_PANEL + panel * PER_PANEL + run * PER_RUN + part]


def _entries(figure: go.Figure, legend: str = "legend2") -> list[str]:
    shown = [one for one in figure.data if one.showlegend is not False and one.name]
    return [one.name for one in shown if (one.legend or "legend") == legend]


def test_marks_lines_and_legend_of_one_run() -> None:
    run = trace(kl=[0.5, 0.25, math.nan, 0.125, math.nan], grad_norm=[1.0, 2.0, math.inf, 4.0, 5.0])
    figure = whole_figure(log_view([run], ["grad_norm", "kl"]))
    assert list(_part(figure, 0, LINE).x[:2]) == [0, 1]
    assert list(_part(figure, 1, MARKS).x) == [2, 4]
    assert list(_part(figure, 1, MARKS).text) == ["NaN", "NaN"]
    assert list(_part(figure, 0, MARKS).marker.symbol) == ["triangle-up"]
    assert _part(figure, 0, MARKS).yaxis == "y10"
    assert (_part(figure, 1, LINE).yaxis, _part(figure, 1, MARKS).yaxis) == ("y2", "y11")
    assert _entries(figure) == ["NaN (2)", "+Inf (1)"]
    assert _entries(figure, "legend") == ["cluster-16, healthy, seed 0, recorded"]
    assert figure.layout.yaxis.type == "log"
    assert [note.text for note in figure.layout.annotations] == ["<b>grad norm</b>", "<b>kl</b>", *[""] * 4]
    assert figure.layout.xaxis.anchor == "y2", "steps stand below the lowest panel"
    assert figure.layout.yaxis3.visible is False


def test_a_value_between_two_gaps_is_seen_as_a_point() -> None:
    values_S = np.ones(500)
    values_S[[200, 202]] = np.nan
    figure = whole_figure(log_view([trace(reward_mean=list(values_S))]))
    assert list(_part(figure, 0, SINGLE).x) == [201]
    few = whole_figure(log_view([trace(reward_mean=[1.0, 2.0, 3.0])]))
    assert list(_part(few, 0, SINGLE).x) == [0, 1, 2], "a handful of points is drawn as points too"


def test_resumes_failures_and_replaced_values_are_drawn_and_named(tmp_path: Path) -> None:
    crash = "Traceback (most recent call last):\n  File 'x'\nValueError: <b>bad</b>\n"
    again = verl(range(3, 6), critic__score__mean=0.75)
    log = log_of(tmp_path, verl(range(1, 5), critic__score__mean=0.5) + crash + again)
    figure = whole_figure(log_view([log], ["reward_mean"]))
    assert list(_part(figure, 0, OLD).x) == [3, 4]
    assert list(_part(figure, 0, OLD).text) == ["0.5, replaced after a resume"] * 2
    assert list(_part(figure, 0, RESUMES).x[:2]) == [3, 3]
    assert "resumed at step 3 after step 4" in _part(figure, 0, RESUMES).text[0]
    assert "&lt;b&gt;bad" in _part(figure, 0, FAILURES).text[0], "text of a log is shown, not taken for marks"
    assert _entries(figure) == ["earlier value, replaced (2)", "resumed here (1)", "failure or early end (1)"]


def test_two_runs_with_different_definitions_say_so_in_the_panel_and_in_words(tmp_path: Path) -> None:
    log = log_of(tmp_path, verl(range(1, 5), critic__score__mean=0.5, actor__pg_loss=0.25))
    proxy = trace(policy_loss=[0.1] * 4, reward_mean=[0.25] * 4)
    view = log_view([log, proxy])
    assert view.signals == ("policy_loss", "reward_mean", "grad_norm"), "what both have goes before"
    assert set(view.notes) == {"policy_loss"}
    figure = log_figure([log, proxy])
    headings = [note.text for note in figure.layout.annotations]  # pyright: ignore[reportAttributeAccessIssue]
    assert "≠ defined differently in the two runs" in headings[0]
    assert "≠" not in headings[1]
    assert "cluster-16, healthy, seed 0, recorded has none" in headings[2]
    assert "Defined differently: policy_loss: verl, mean over the update's micro-batches" in describe(figure)
    assert list(_part(figure, 1, LINE, run=1).y) == [0.25] * 4
    assert (_part(figure, 0, LINE).line.dash, _part(figure, 0, LINE, run=1).line.dash) == ("solid", "dot")
    table = data_table(figure)
    assert table[["signal", "key"]].values.tolist()[0] == ["policy loss", "actor/pg_loss"]
    assert len(table) == 5


def test_marks_of_the_second_run_do_not_hide_those_of_the_first() -> None:
    runs = [trace("a", kl=[math.nan] * 3), trace("b", kl=[math.nan] * 3)]
    figure = whole_figure(log_view(runs))
    assert set(_part(figure, 0, MARKS).y).isdisjoint(_part(figure, 0, MARKS, run=1).y)


def test_a_million_points_are_drawn_as_a_few_thousand_and_a_part_exactly() -> None:
    n = 1_000_000
    values_S = np.random.default_rng(0).normal(size=n)
    values_S[123_456], values_S[700_000:700_400] = 99.0, np.nan
    view = log_view([trace(reward_mean=values_S)])
    whole = values(view)
    line, marks = whole[FIRST_PANEL], whole[FIRST_PANEL + MARKS]
    assert len(line["x"]) < 2100
    assert 99.0 in line["y"]
    assert 123_456.0 in line["x"]
    assert marks["text"] == ["NaN: 400 of the steps 700000 to 700399"]
    assert sum(len(part.get("x", ())) for part in whole) < 3000
    part = values(view, (700_380.0, 700_420.0))
    inside = part[FIRST_PANEL]["x"][~np.isnan(part[FIRST_PANEL]["x"])]
    assert inside[-22:].tolist() == [float(step) for step in range(700_400, 700_422)]
    assert part[FIRST_PANEL + MARKS]["x"].tolist() == list(range(700_380, 700_400))
    assert whole[0]["x"] == part[0]["x"] == [0.0, n - 1.0], "so that a double click shows all again"
    assert "zoom in to see all" in str(whole_figure(view).layout.title.text)  # pyright: ignore[reportAttributeAccessIssue]


def test_number_and_kind_of_traces_never_change() -> None:
    shapes = []
    for view in (LogView(), log_view([trace(kl=[1.0])]), log_view([trace(kl=[1.0]), trace("b", kl=[2.0])])):
        shapes.append([(one.mode, one.yaxis, one.legend) for one in whole_figure(view).data])
    assert shapes[0] == shapes[1] == shapes[2]
    assert len(shapes[0]) == FIRST_PANEL + 6 * PER_PANEL


def test_a_view_says_in_words_what_it_shows(tmp_path: Path) -> None:
    rows = [{"step": 1, "actor/grad_norm": 1.0}, {"step": 2, "actor/grad_norm": math.nan}]
    log = log_of(tmp_path, jsonl(*rows, {"step": 3, "actor/grad_norm": 2.5}))
    assert log_view([log]).describe() == "x (verl), steps 1 to 3: grad norm 1 to 2.5 (1 NaN)."
    assert LogView().describe() == "There is nothing to draw."
    never = log_view([trace(kl=[math.nan] * 2), trace("b", reward_mean=[1.0])])
    assert "kl never finite (2 NaN) and not logged" in never.describe()


def test_usual_signals_come_first() -> None:
    run = trace(seconds_per_step=[1.0], kl=[1.0], grad_norm=[1.0], aux_loss=[1.0], entropy=[1.0])
    assert usual([run]) == ("grad_norm", "kl", "entropy", "seconds_per_step")
    assert usual([]) == ()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    run = trace(kl=[1.0], grad_norm=[1.0])
    with pytest.raises(MoeproxyError, match="3 runs for one figure"):
        log_figure([run] * 3)
    with pytest.raises(MoeproxyError, match="no signal 'entropy'"):
        log_figure([run], ["entropy"])
    with pytest.raises(MoeproxyError, match="7 signals for one figure"):
        log_figure([run], ["kl"] * 7)
    with pytest.raises(TraceError, match=r"it contains .*ValueError: x"):
        log_figure([log_of(tmp_path, "Traceback (most recent call last):\n  a\nValueError: x\n")])


def test_two_runs_of_one_name_have_two_entries() -> None:
    figure = whole_figure(log_view([trace(kl=[1.0]), trace(kl=[2.0])]))
    first, second = _entries(figure, "legend")
    assert second == f"{first}, the other"


def test_a_mark_upon_the_line_is_seen() -> None:
    """Marks have the colour of their run, and a rim of another one; thin and open symbols would have none."""
    run = trace(kl=[0.5, math.nan, 0.25])
    mark = _part(whole_figure(log_view([run], ["kl"])), 0, MARKS)
    assert mark.marker.line.color == "white"
    assert mark.marker.line.width > 1
    assert all("open" not in kind.symbol for kind in KINDS if kind.breaks)
    assert mark.cliponaxis is False
