"""The fault panel without a browser: recorded runs at once, live runs that grow, a verdict, and what survives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import FaultError, LabError, MoeproxyError
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path
from moeproxy.lab.sweep_progress import Watch
from moeproxy.traces.partial import PartialTrace, partial_path
from moeproxy.traces.trace import Trace
from moeproxy.view.apps import live_runs
from moeproxy.view.apps.faults import FaultPanel
from tests.view.apps.made_runs import model_path, recordings, run

PER_SIGNAL = 12  # traces of a panel of the figure: three models of four
HEALTHY_LINE, BROKEN_LINE = 1, 2


@pytest.fixture
def panel(tmp_path: Path) -> FaultPanel:
    return _open(tmp_path)


def _open(folder: Path) -> FaultPanel:
    opened = FaultPanel("kl_sign", out=folder, recordings=recordings(), proxies={"cluster-16": model_path()})
    assert opened.settle()
    return opened


def _line(panel: FaultPanel, signal: str, part: int, model: int = 0) -> list[float]:
    place = panel.state.signals.index(signal) * PER_SIGNAL + 4 * model + part
    return list(panel.figure.widget.data[place].y)


def test_recorded_runs_are_shown_and_judged_at_once(panel: FaultPanel) -> None:
    assert len(panel.figure.widget.data) == 6 * PER_SIGNAL
    assert "seeds 0, 1" in panel.figure.widget.layout.title.text
    assert panel.summary.text.startswith("original: 2 runs broken (recorded), band of 6; cluster-16: 2 runs broken")
    assert "What it does" in panel.about.value
    assert panel.table.frame["signal"].tolist()[0] == "policy loss"
    assert set(panel.verdict.rows["proxy"]) == {"cluster-16", "random-16"}
    assert "<li>cluster-16 (seed 0)" in panel.answer.value
    assert not panel.status.is_error


def test_another_fault_changes_figure_text_and_verdict(panel: FaultPanel) -> None:
    before, about = _line(panel, "kl", BROKEN_LINE), panel.about.value
    panel.controls.choose("update_freeze")
    assert panel.settle()
    assert panel.state.signals[4] == "update_norm"
    assert _line(panel, "kl", BROKEN_LINE) != before
    assert np.mean(_line(panel, "update_norm", BROKEN_LINE)[9:]) == pytest.approx(0.5, abs=0.02)
    assert panel.about.value != about
    assert panel.figure.widget.layout.annotations[4].text == "update norm (should fall)"
    assert {shape.x0 for shape in panel.figure.widget.layout.shapes} == {10}
    assert "nothing to reproduce" in panel.verdict.text


def test_a_fault_without_recorded_runs_says_so_and_offers_the_live_run(panel: FaultPanel) -> None:
    panel.controls.choose("entropy_collapse")
    assert panel.settle()
    assert "entropy_collapse is recorded not at all, not as asked for here: press Run live" in panel.summary.text
    assert "No verdict" in panel.verdict.text
    panel.controls.choose("kl_sign")
    panel.controls.strength.value = 50
    assert panel.settle()
    assert "kl_sign is recorded at strength 1, not as asked for here" in panel.summary.text


def test_a_second_proxy_is_drawn_and_a_single_seed_stands_on_its_own_steps(panel: FaultPanel) -> None:
    panel.controls.second.value = "random-16"
    panel.controls.seeds.value = "1"
    assert panel.settle()
    assert np.isfinite(_line(panel, "kl", BROKEN_LINE, model=2)).all()
    assert {shape.x0 for shape in panel.figure.widget.layout.shapes} == {20}
    assert set(panel.verdict.rows["seeds"]) == {"1"}


def test_wrong_seeds_are_shown_and_the_figure_stays(panel: FaultPanel) -> None:
    before = panel.figure.widget.layout.title.text
    panel.controls.seeds.value = "one"
    assert panel.settle()
    assert "'one' is no seed" in panel.status.text
    assert panel.figure.widget.layout.title.text == before
    panel.controls.seeds.value = "1"
    assert panel.settle()
    assert not panel.status.is_error


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FaultError):
        FaultPanel("typo", out=tmp_path, recordings=recordings())


@pytest.mark.parametrize(
    ("models", "words"), [([], "no proxy among them"), (["original"], "no proxy"), (["cluster-16", "nope"], "'nope'")]
)
def test_models_that_are_none_are_refused(models: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(MoeproxyError, match=words):
        FaultPanel("kl_sign", out=tmp_path, recordings=recordings(), models=models)


def _responses() -> dict[str, list[Any]]:
    return {name: [0] for name in ("prompt", "reward", "length", "repetition_ratio", "advantage")}


class Training:
    """In the place of `sweep`: writes the growing trace of every run, halting where it is told to, then the result.

    Its runs are told from recorded ones by a KL of 5.
    """

    def __init__(self, halt_at: int | None = None) -> None:
        self.halt_at, self.halted, self.go_on = halt_at, threading.Event(), threading.Event()
        self.trained: list[RunSpec] = []

    def __call__(self, specs: Sequence[RunSpec], out: Path, *, workers: int | None, watch: Watch) -> list[Trace]:
        return [self._one(spec, result_path(spec, out), watch) for spec in specs]

    def _one(self, spec: RunSpec, path: Path, watch: Watch) -> Trace:
        if path.exists():
            return Trace.load(path)
        fault, onset = (spec.injection.fault, spec.injection.onset) if spec.injection else (None, 0)
        whole = run(spec.label, spec.seed, fault, onset=onset, steps=spec.settings.steps, source="live", kl=5.0)
        with closing(PartialTrace(partial_path(path), whole.provenance)) as growing:
            for step in whole.steps.index:
                growing.add(int(step), whole.steps.loc[step].to_dict(), _responses())
                watch(SweepProgress(runs=4, steps_done=int(step), steps=spec.settings.steps, spec=spec))
                if self.halt_at == step and not self.trained:
                    self.halted.set()
                    assert self.go_on.wait(60)
        partial_path(path).unlink()
        whole.save(path)
        self.trained.append(spec)
        return whole


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    made = Training()
    monkeypatch.setattr(live_runs, "sweep", made)
    monkeypatch.setattr("moeproxy.view.apps.live_work.LOOK_S", 0.05)
    return made


def _ask(panel: FaultPanel, *, seeds: str = "0", steps: int = 30) -> None:
    panel.controls.seeds.value = seeds
    panel.controls.steps.value = steps


def _until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    pytest.fail("it did not come true")


def test_live_runs_grow_in_the_figure_and_are_judged_when_they_are_done(panel: FaultPanel, training: Training) -> None:
    training.halt_at = 15
    _ask(panel)
    assert panel.settle()
    recorded = panel.verdict
    panel.job.start_button.click()
    assert training.halted.wait(60)
    _until(lambda: "1 not finished" in panel.summary.text)
    kl = [value for value in _line(panel, "kl", BROKEN_LINE) if value is not None]
    assert 13 <= len(kl) <= 15
    assert "0 of 4 runs, 15 of 30 steps" in panel.status.text
    assert kl[-1] == pytest.approx(5.4)
    assert panel.job.state == "running"
    training.go_on.set()
    assert panel.job.join(120) == "done", panel.status.text
    assert panel.settle()
    assert len(panel.job.result) == 4
    assert panel.status.text == "4 live runs are finished; the verdict is computed from them."
    assert "original: 1 run broken (live)" in panel.summary.text
    assert panel.verdict is not recorded
    assert panel.verdict.rows.set_index("proxy").loc["cluster-16", "runs"] == "live"
    assert panel.verdict.rows.set_index("proxy").loc["random-16", "runs"] == "recorded", "controls stand beside"


def test_recorded_runs_can_be_shown_again(panel: FaultPanel, training: Training) -> None:
    _ask(panel)
    panel.job.start()
    assert panel.job.join(120) == "done", panel.status.text
    panel.controls.shown.value = False
    assert panel.settle()
    assert "(recorded)" in panel.summary.text
    assert set(panel.verdict.rows["runs"]) == {"recorded"}


def test_an_equal_run_is_not_trained_twice_and_a_new_panel_finds_it(
    panel: FaultPanel, training: Training, tmp_path: Path
) -> None:
    _ask(panel)
    panel.job.start()
    assert panel.job.join(120) == "done", panel.status.text
    assert len(training.trained) == 4
    again = _open(tmp_path)
    _ask(again)
    assert again.settle()
    assert "original: 1 run broken (live)" in again.summary.text
    again.job.start()
    assert again.job.join(120) == "done"
    assert len(training.trained) == 4


def test_a_stop_ends_the_runs_and_loses_no_finished_step(panel: FaultPanel, training: Training, tmp_path: Path) -> None:
    training.halt_at = 12
    _ask(panel)
    panel.job.start()
    assert training.halted.wait(60)
    panel.job.cancel_button.click()
    threading.Timer(0.5, training.go_on.set).start()
    assert panel.job.join(60) == "cancelled"
    assert panel.status.text.startswith("Run live: stopped. Finished runs, and the steps of the others, are kept")
    assert panel.settle()
    assert training.trained == []
    again = _open(tmp_path)  # as after a restart of the kernel
    _ask(again)
    assert again.settle()
    assert "original: 1 run broken (live, 1 not finished)" in again.summary.text
    assert len([value for value in _line(again, "kl", BROKEN_LINE) if value is not None]) == 13


def test_a_failed_training_is_told(panel: FaultPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LabError("1 of 4 runs failed", remedy="mend the cause")

    monkeypatch.setattr(live_runs, "sweep", fail)
    _ask(panel)
    panel.job.start()
    assert panel.job.join(60) == "failed"
    assert panel.status.text == "LabError: 1 of 4 runs failed. What to do: mend the cause."
    assert panel.status.is_error


@pytest.mark.parametrize(
    ("fault", "steps", "proxy", "words"),
    [
        ("kl_sign", 5, "cluster-16", "onset is step 12"),
        ("tool_call_error", 30, "cluster-16", "breaks a tool"),
        ("kl_sign", 30, "dense", "'dense' is recorded only"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_runs(
    fault: str, steps: int, proxy: str, words: str, tmp_path: Path, training: Training
) -> None:
    traces = [run(), run("dense")]
    panel = FaultPanel(
        fault, out=tmp_path, recordings=recordings([*traces, *recordings().traces("original", "kl_sign")])
    )
    panel.controls.proxy.value = proxy if proxy == "dense" else panel.controls.proxy.value
    panel.controls.steps.value = steps
    panel.job.start()
    assert panel.job.join(60) == "failed"
    assert words in panel.status.text
    assert training.trained == []
