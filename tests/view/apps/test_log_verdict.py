"""The verdict below the log panel: sentences with their numbers, healthy runs beside, and what cannot be judged."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench
from moeproxy.traces.reading import read
from moeproxy.triage.detect import ALARM, UNCLEAR
from moeproxy.triage.diagnose import Diagnosis, diagnose
from moeproxy.triage.jsonable import sure
from moeproxy.triage.reference import OWN_NOISE
from moeproxy.view.apps.log_verdict import healthy_runs
from moeproxy.view.apps.log_verdict_text import alarm_table, evidence_table, verdict_html
from moeproxy.view.apps.logs import LogPanel
from tests.view.made_logs import verl

BROKEN = data_dir() / "logs" / "trainer_state.json"


@pytest.fixture(scope="module")
def verdict() -> Diagnosis:
    return diagnose(read(BROKEN)[0])


def _text(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_every_cause_stands_with_its_numbers(verdict: Diagnosis) -> None:
    text = _text(verdict_html(verdict))
    assert "The run departs from step 15 on" in text
    for place, cause in enumerate(verdict.causes, start=1):
        assert f"{place}. {cause.fault} ({cause.title}), confidence {sure(cause.confidence)}" in text
        assert cause.check in text
        for one in (*cause.supports, *cause.contradicts):
            assert f"{one.signal.replace('_', ' ')} {one.window} {one.cells[0]} {one.cells[1]}" in text
    for alarm in verdict.detection.alarms:
        assert f"{alarm.signal.replace('_', ' ')} {alarm.onset} " in text
    assert f"compared with {verdict.n_recorded} recorded runs" in text
    assert all(note in text for note in verdict.detection.notes)


def test_tables_hold_what_alarms_and_evidence_say(verdict: Diagnosis) -> None:
    alarms = {alarm.signal: alarm for alarm in verdict.detection.alarms}
    rows = alarm_table(list(alarms.values())).set_index("signal")
    assert rows.loc["kl", "how"] == "not finite at 46 steps"
    assert rows.loc["truncated", "times what healthy runs reach"] == f"{alarms['truncated'].excess:.1f}"
    assert rows.loc["truncated", "how"] == "jump up"
    back = replace(alarms["truncated"], recovered=40, after=np.nan)
    assert alarm_table([back])["how"].tolist() == ["jump up, back from step 40 on"]
    assert alarm_table([back])["seen"].tolist() == ["–"]
    huge = replace(alarms["truncated"], after=1e60, size_in="healthy spreads")
    assert alarm_table([huge])["seen"].tolist() == ["beyond 1e+50"]
    assert "1e+60" not in huge.sentence
    assert rows.loc["truncated", "mean"] in alarms["truncated"].sentence
    beside, alone = (alarm_table([replace(back, size_in=size), huge]) for size in ("healthy spreads", OWN_NOISE))
    assert ("expected" in beside, "usual before" in beside) == (True, False)
    assert ("expected" in alone, "usual before" in alone) == (False, True), "alone nobody knows what was to be expected"
    cause = replace(verdict.causes[0], contradicts=verdict.causes[0].supports[:1])
    assert evidence_table(cause)["speaks"].tolist() == ["for"] * len(cause.supports) + ["against"]


def test_an_unknown_failure_is_called_so(verdict: Diagnosis) -> None:
    far = replace(verdict, unknown=True, distance=9.0, wrong_metrics=("kl is negative",))
    text = _text(verdict_html(far))
    assert "Unknown: it is like no recorded fault" in text
    assert "The metric itself looks wrong: kl is negative" in text
    assert "Likely causes" not in text


def test_a_wrong_metric_is_told_of_a_run_that_could_not_be_judged(verdict: Diagnosis) -> None:
    unclear = replace(verdict.detection, verdict=UNCLEAR)
    text = _text(verdict_html(replace(verdict, detection=unclear, wrong_metrics=("kl is negative",))))
    assert "The metric itself looks wrong: kl is negative" in text
    assert "Likely causes" not in text


def test_too_few_steps_are_no_verdict_and_it_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "short.log").write_text(verl(range(1, 6), critic__score__mean=0.5))
    panel = LogPanel(tmp_path / "short.log", out=tmp_path)
    assert panel.settle()
    found = panel.verdict.diagnosis
    assert found is not None
    assert found.detection.verdict == UNCLEAR
    text = _text(panel.verdict.page.value)
    assert "Could not judge." in text
    assert "The run has 5 steps with values; alone at least 15 are needed." in text
    assert panel.reproduce.widget.layout.display == "none"
    assert panel.view.departures == ()


def test_the_panel_judges_what_it_reads_and_marks_the_onset(tmp_path: Path) -> None:
    panel = LogPanel(BROKEN, out=tmp_path)
    assert panel.settle()
    found = panel.verdict.diagnosis
    assert found is not None
    assert (found.detection.verdict, found.detection.onset) == (ALARM, 15)
    assert {event.step for event in panel.view.departures} == {15}
    assert "departs from here on" in {trace.name for trace in panel.figure.widget.data}
    assert panel.reproduce.widget.layout.display == ""
    panel.example("crashed_before_step_1.log")
    assert panel.settle()
    assert (panel.verdict.page.value, panel.verdict.diagnosis) == ("", None)
    assert panel.reproduce.widget.layout.display == "none"


def test_healthy_runs_beside_it_are_used_and_refused(tmp_path: Path) -> None:
    bench = load_bench(data_dir() / "bench", models=["original"], faults=[None, "nan_poison"], trajectories=False)
    usual = [run for run in bench if run.provenance.healthy and 100 <= run.provenance.seed < 108]
    for run in usual:
        run.save(tmp_path / f"good-{run.provenance.seed}.parquet")
    panel = LogPanel(BROKEN, out=tmp_path / "out")
    assert panel.settle()
    panel.verdict.path.value = str(tmp_path / "good-*.parquet")
    panel.verdict.use.click()
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    assert "judged beside healthy runs, by 8 healthy runs" in _text(panel.verdict.page.value)
    panel.verdict.path.value = str(tmp_path / "good-100.parquet")
    panel.verdict.use.click()
    assert panel.settle()
    assert "1 healthy run" in panel.status.text
    assert panel.verdict.page.value == ""
    panel.verdict.path.value = str(tmp_path / "none-*.log")
    panel.verdict.use.click()
    assert panel.settle()
    assert "no file of this pattern" in panel.status.text


def test_healthy_runs_are_named_by_paths_and_patterns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text(verl(range(1, 4), actor__pg_loss=0.25))
    (tmp_path / "dead.log").write_text("Killed\n")
    assert len(healthy_runs(f"{tmp_path}/[ab].log; {tmp_path}/a.log ;")) == 3
    assert healthy_runs("") == ()
    with pytest.raises(TraceError, match="no metric in it"):
        healthy_runs(str(tmp_path / "dead.log"))


def test_a_failure_that_a_resume_replaced_leads_in_the_panel(tmp_path: Path) -> None:
    panel = LogPanel(data_dir() / "logs" / "verl_console.log", out=tmp_path)
    assert panel.settle()
    assert panel.verdict.diagnosis is not None
    text = _text(panel.verdict.page.value)
    assert "attempt 1 of 2 (steps 1 to 35, resumed at step 11 after step 35 (line 74)): The run departs" in text
    assert "attempt 2 of 2 (steps 11 to 60): No alarm" in text
    assert "What follows is about attempt 1 of 2. The run departs from step 15 on" in text
    assert {event.step for events in panel.view.onsets.values() for event in events} == {15}
    assert panel.reproduce.widget.layout.display == ""
    failing = panel._failing()
    assert int(failing.run.steps.index[-1]) == 35  # the attempt that failed, not what the log went on with
    assert failing.causes[0] == "gradient_overflow"
