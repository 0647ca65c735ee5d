"""The remedy panel without a browser: recorded trials at once, live ones that take their place, and what survives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.lab import bench_record
from moeproxy.lab.settings import Application, RunSpec
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench
from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy import Told
from moeproxy.triage.remedy_recorded import RemedyStudy
from moeproxy.triage.remedy_result import Kind, Remedy, Trial
from moeproxy.triage.severity import Severity
from moeproxy.view.apps import live_work, remedy_runs
from moeproxy.view.apps.live_runs import Found
from moeproxy.view.apps.remedy import RemedyPanel
from moeproxy.view.apps.remedy_runs import Asked, RemedyRuns

ILL, BETTER, HEALTHY = Severity(0.3, 0.9, 0.0), Severity(0.0, 0.3, 0.0), Severity(0.0, 0.0, 0.0)
FAULT, ONSET = "kl_explosion", 10


@dataclass(frozen=True)
class _Case:
    """Stands in for a failure to be treated."""

    cause: str = ""
    remedies: tuple[str, ...] = ()


def trial(name: str, after: Severity | None, *, accepted: bool = False, kind: Kind = "mitigation") -> Trial:
    return Trial(name, kind, ILL, after, 0.01, accepted, False, False, "kept: yes" if accepted else "rolled back: no")


def found(model: str, *trials: Trial) -> Remedy:
    return Remedy(model, FAULT, 0, ONSET, ILL, 0.01, trials, (), 1.0, {})


SAME, KEPT = trial("stronger_kl", ILL), trial("lower_rate", BETTER, accepted=True)


def treated(model: str, remedy: str) -> Trace:
    """A healthy recorded run that says it was treated."""
    one = next(t for t in load_bench(data_dir() / "bench", models=[model], faults=[FAULT]) if t.provenance.seed == 0)
    info = replace(one.provenance, fault=FAULT, strength=1.0, onset=ONSET, remedies=((remedy, ONSET),))
    return Trace(one.steps * 0 + 7.0, None, info)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> RemedyStudy:
    folder = tmp_path_factory.mktemp("study")
    made = RemedyStudy((found("cluster-16", SAME, KEPT),), (found("original", KEPT),))
    made.save(folder, [treated("cluster-16", "lower_rate"), treated("original", "lower_rate")])
    return RemedyStudy.load(folder)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the shipped benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    faults = [FAULT, "update_freeze", None]
    for trace in load_bench(data_dir() / "bench", models=["original", "cluster-16"], faults=faults):
        run = trace.provenance
        if run.strength == 1 or (run.healthy and (run.seed < 2 or 100 <= run.seed < 108)):
            name = f"{run.fault}-1-at{run.onset}" if run.fault else "healthy"
            trace.save(folder / "runs" / f"{run.model}--{name}--s{run.seed}--{len(name):x}.parquet")
    bench_record.pack(folder / "runs", folder / "packs")
    return folder / "packs"


@pytest.fixture
def panel(study: RemedyStudy, bench: Path, tmp_path: Path) -> RemedyPanel:
    opened = RemedyPanel(FAULT, out=tmp_path / "out", study=study, bench=bench)
    assert opened.settle()
    assert not opened.status.is_error, opened.status.text
    return opened


def _drawn(panel: RemedyPanel, part: int) -> list[float]:
    return list(panel.figure.widget.data[part].y)


def test_recorded_trials_are_shown_at_once_the_best_mitigation_first(panel: RemedyPanel) -> None:
    assert panel.asked == Asked("cluster-16", FAULT, 0, FAULT)
    assert [one.remedy for one in panel.trials] == ["lower_rate", "stronger_kl"], "in the order in which they are tried"
    assert panel.shown.value == "lower_rate"
    assert set(_drawn(panel, 2)) == {7.0}
    assert "without and with lower_rate" in panel.figure.widget.layout.title.text
    assert list(panel.figure.widget.data[-1].y) == ["none", "lower_rate", "stronger_kl"]
    assert panel.table.frame["on original"].tolist() == ["0.400 → 0.100, kept", "not tried"]
    assert panel.remedies.frame["remedy"].tolist() == ["lower_rate", "stronger_kl", "clip_gradients"]
    panel.shown.value = "stronger_kl"
    assert panel.settle()
    assert _drawn(panel, 2) == []
    assert "stronger_kl (run not kept)" in panel.figure.widget.layout.title.text
    assert "rolled back: no" in panel.summary.text


def test_the_diagnosis_is_shown_and_offers_other_causes(panel: RemedyPanel) -> None:
    assert panel.diagnosis is not None
    assert panel.diagnosis.causes[0].fault == FAULT
    assert "(as injected)" in panel.about.value
    assert panel.cause.options[0] == (f"{FAULT} (injected)", FAULT)
    second = replace(panel.diagnosis.causes[0], fault="kl_sign", confidence=0.09)
    panel._diagnoses[("cluster-16", FAULT, 0)] = replace(panel.diagnosis, causes=(*panel.diagnosis.causes, second))
    panel._judge()
    assert panel.settle()
    assert panel.cause.options[-1] == ("kl_sign (9%)", "kl_sign")
    panel.cause.value = "kl_sign"
    assert panel.settle()
    assert panel.trials == (), "the study treats what was injected"
    assert panel.remedies.frame["remedy"].tolist()[0] == "kl_off"
    assert panel.which.value == ("kl_off", "stronger_kl", "lower_rate", "correct_signs")
    assert "Nothing was tried yet" in panel.summary.text


def test_another_model_or_failure_keeps_what_it_can(panel: RemedyPanel) -> None:
    panel.choose(FAULT, "original")
    assert [one.remedy for one in panel.trials] == ["lower_rate"]
    assert panel.state.twin.provenance.model == "original"
    assert panel.table.frame["on cluster-16"].tolist() == ["0.400 → 0.100, kept"]
    panel.choose("update_freeze", "cluster-16")
    assert panel.trials == ()
    assert panel.shown.value == ""
    assert panel.figure.widget.layout.title.text.endswith("no remedy is shown")
    assert panel.state.onset == panel.state.broken.provenance.onset
    panel.seed.value = 1
    assert panel.settle()
    assert panel.state.broken.provenance.seed == 1
    with pytest.raises(MoeproxyError, match="no 'typo'"):
        panel.choose("typo")
    with pytest.raises(MoeproxyError, match="no 'tis'"):
        panel.choose(FAULT, remedy="tis")


Loop = Callable[[Watch, Told, tuple[str, ...]], Remedy]


def _loop(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    """Replace what trains: the case is the recorded one, and the loop is given."""
    monkeypatch.setattr(live_work, "LOOK_S", 0.01)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.build", lambda *_: None)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.checkpoint", lambda *_: _model())
    monkeypatch.setattr(remedy_runs, "take_packed", lambda *_: 0)
    monkeypatch.setattr(remedy_runs, "cases", lambda *_, **__: [_Case()])

    def try_remedies(case: _Case, *_: Any, watch: Watch, told: Told, minutes: float, **__: Any) -> Remedy:
        assert (case.cause, minutes) == (FAULT, 5.0)
        return loop(watch, told, case.remedies)

    monkeypatch.setattr(remedy_runs, "try_remedies", try_remedies)


def _model() -> Path:
    return data_dir() / "models" / "qwen3-moe-tools"


MENDED = trial("clip_gradients", HEALTHY, accepted=True)


def test_live_trials_take_the_place_of_recorded_ones_and_are_found_again(
    panel: RemedyPanel, study: RemedyStudy, bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def loop(watch: Watch, told: Told, names: tuple[str, ...]) -> Remedy:
        asked.append(names)
        watch(SweepProgress(runs=1, steps_done=1, steps=60))
        told(SimpleNamespace(), trial("lower_rate", ILL))  # pyright: ignore[reportArgumentType]
        told(SimpleNamespace(), MENDED)  # pyright: ignore[reportArgumentType]
        return found("cluster-16", trial("lower_rate", ILL), MENDED)

    _loop(monkeypatch, loop)
    panel.which.value = ("lower_rate", "clip_gradients")
    panel.job.start()
    assert panel.job.join(60) == "done", panel.status.text
    assert panel.settle()
    assert asked == [("lower_rate", "clip_gradients")]
    assert [(one.remedy, one.accepted) for one in panel.trials] == [
        *(("lower_rate", False), ("stronger_kl", False), ("clip_gradients", True))
    ]
    assert panel.status.text.startswith("Remedy(kl_explosion on cluster-16: clip_gradients, severity 0.400 to 0.000")
    again = RemedyPanel(FAULT, out=tmp_path / "out", study=study, bench=bench)
    assert [one.remedy for one in again.trials] == ["lower_rate", "stronger_kl", "clip_gradients"]
    assert again.shown.value == "clip_gradients"
    assert RemedyRuns(tmp_path / "other", study=study, bench=bench).made(panel.asked) == {}


def test_of_several_runs_one_is_followed_to_its_end(panel: RemedyPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [RunSpec(Path("m"), remedies=(Application(name, ONSET),)) for name in ("lower_rate", "stronger_kl")]
    traces = {spec.remedies[0].remedy: treated("cluster-16", spec.remedies[0].remedy) for spec in specs}
    ended: set[str] = set()

    def found_of(asked: list[RunSpec]) -> Found:
        (name,) = (spec.remedies[0].remedy for spec in asked)
        return Found((traces[name],), ()) if name in ended else Found((), (traces[name],))

    monkeypatch.setattr(panel.runs.live, "found", found_of)
    first, second = (SweepProgress(spec=spec, step=1) for spec in specs)
    assert panel.runs.growing(None) is None
    assert panel.runs.growing(SweepProgress(spec=RunSpec(Path("m")))) is None, "a run without a remedy"
    assert [panel.runs.growing(now) for now in (first, second, first)] == [traces["lower_rate"]] * 3
    ended.add("lower_rate")
    assert panel.runs.growing(second) is traces["stronger_kl"]


def test_a_stop_keeps_what_is_finished(panel: RemedyPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def loop(watch: Watch, told: Told, _: tuple[str, ...]) -> Remedy:
        told(SimpleNamespace(), MENDED)  # pyright: ignore[reportArgumentType]
        while True:
            watch(SweepProgress(runs=1, steps_done=1, steps=60))
            begun.set()

    _loop(monkeypatch, loop)
    panel.job.start()
    assert begun.wait(30)
    panel.job.cancel_button.click()
    assert panel.job.join(30) == "cancelled"
    assert panel.settle()
    assert panel.status.text.startswith("Try live: stopped. What is finished is kept")
    assert "clip_gradients" in panel.table.frame["remedy"].tolist()


def test_what_cannot_be_tried_is_said(panel: RemedyPanel) -> None:
    panel.which.value = ()
    panel.job.start()
    assert panel.job.join(30) == "failed"
    assert "no remedy is chosen" in panel.status.text


def test_a_panel_needs_recorded_runs_and_trials(tmp_path: Path, study: RemedyStudy, bench: Path) -> None:
    with pytest.raises(ComparisonError, match="no study of remedies"):
        RemedyPanel(out=tmp_path, study=tmp_path)
    with pytest.raises(MoeproxyError, match="no such file"):
        RemedyPanel(out=tmp_path, study=study, bench=tmp_path)
    with pytest.raises(MoeproxyError, match="Failure: no 'typo'"):
        RemedyPanel("typo", out=tmp_path, study=study, bench=bench)
    with pytest.raises(MoeproxyError, match="no recorded run of kl_explosion on cluster-16, seed 9"):
        RemedyRuns(tmp_path, study=study, bench=bench).failure(Asked("cluster-16", FAULT, 9))


def test_lines_are_those_of_the_failure(panel: RemedyPanel) -> None:
    failure = panel.runs.failure(panel.asked)
    assert _drawn(panel, 0) == failure.twin.values("reward_mean").tolist()
    assert _drawn(panel, 1) == failure.broken.values("reward_mean").tolist()
    assert _drawn(panel, 0)[: ONSET - 1] == _drawn(panel, 1)[: ONSET - 1], "equal up to the onset"
    assert [run.provenance.seed for run in failure.healthy] == list(range(100, 108))
