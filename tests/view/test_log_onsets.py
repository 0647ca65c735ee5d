"""Onsets of a verdict as marks: the run's in every panel, a signal's own in its panel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeproxy.places import data_dir
from moeproxy.traces.reading import read
from moeproxy.triage.diagnose import Diagnosis, diagnose
from moeproxy.view.figures_log import values, whole_figure
from moeproxy.view.log_onsets import onsets, with_onsets
from moeproxy.view.log_view import LogView, log_view
from tests.view.test_figures_log import FIRST_PANEL, PER_PANEL

ONSET = 10  # the part of a panel after lines, marks, resumes and failures


@pytest.fixture(scope="module")
def judged() -> tuple[LogView, Diagnosis]:
    (log,) = read(data_dir() / "logs" / "trainer_state.json")
    return log_view([log], ["grad_norm", "reward_mean"]), diagnose(log)


def test_every_panel_has_the_onset_and_a_departing_signal_its_own(judged: tuple[LogView, Diagnosis]) -> None:
    view, verdict = judged
    marked = with_onsets(view, verdict.detection)
    own = "reward mean down from step 15 on, 4.3 times what healthy runs reach"
    assert [event.text for event in marked.onsets["reward_mean"]] == ["the run departs from step 15 on", own]
    assert marked.onsets["grad_norm"][1].text == "grad norm is not finite from step 15 on"
    assert [event.step for event in marked.departures] == [15, 15, 15]
    told = f"The run departs from step 15 on. Grad norm is not finite from step 15 on. {own.capitalize()}."
    assert marked.describe().endswith(told)


def test_a_departure_says_how_far(judged: tuple[LogView, Diagnosis]) -> None:
    detection = judged[1].detection
    alarm = replace(detection.alarms[0], signal="kl", direction="up", onset=17, excess=3.25)
    marks = onsets(replace(detection, alarms=(alarm,)), ("kl",))
    assert marks["kl"][1].text == "kl up from step 17 on, 3.2 times what healthy runs reach"


def test_without_an_alarm_there_is_no_mark(judged: tuple[LogView, Diagnosis]) -> None:
    view, verdict = judged
    healthy = replace(verdict.detection, verdict="healthy", onset=None, alarms=())
    assert with_onsets(view, healthy).departures == ()
    line = whole_figure(view).data[FIRST_PANEL + ONSET]
    assert list(line.x) == []
    assert not line.showlegend


def test_the_figure_draws_them(judged: tuple[LogView, Diagnosis]) -> None:
    view, verdict = judged
    first, second = (values(with_onsets(view, verdict.detection))[FIRST_PANEL + ONSET + n * PER_PANEL] for n in (0, 1))
    assert first["x"] == [15, 15, None, 15, 15, None]
    assert second["x"] == [15, 15, None, 15, 15, None]
    assert (first["name"], first["showlegend"], second["showlegend"]) == ("departs from here on", True, False)
    assert first["text"][3] == "grad norm is not finite from step 15 on"
