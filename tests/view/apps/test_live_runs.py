"""Runs trained from a panel: which they are, what is found of them, how they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import FaultError, LabError, TraceError
from moeproxy.lab.settings import Injection, RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path
from moeproxy.lab.sweep_progress import Watch
from moeproxy.traces.partial import PartialTrace, partial_path
from moeproxy.traces.trace import Trace
from moeproxy.view.apps import live_runs
from moeproxy.view.apps.live_runs import LiveRuns, Stopped
from tests.view.apps.made_runs import SETTINGS, model_path, run

FREEZE = Injection("update_freeze", 1.0, 3)


@pytest.fixture
def live(tmp_path: Path) -> LiveRuns:
    return LiveRuns(model_path(), tmp_path / "lab", SETTINGS, proxies={"cluster-8": model_path()})


def test_specs_name_model_settings_and_fault(live: LiveRuns) -> None:
    [spec] = live.specs("original", FREEZE, [3], 5)
    assert (spec.model, spec.label, spec.method, spec.seed) == (model_path(), "original", "original", 3)
    assert (spec.injection, spec.settings.steps, spec.settings.prompts) == (FREEZE, 5, SETTINGS.prompts)
    assert [s.method for s in live.specs("cluster-8", None, [0, 1], 5)] == ["cluster", "cluster"]
    assert live.specs("cluster-16", None, [0], 5) == [], "it is not built"


def test_what_can_be_trained(live: LiveRuns) -> None:
    answers = {label: live.trainable(label) for label in ("original", "cluster-8", "merge-16", "dense", "typo-16")}
    assert answers == {"original": True, "cluster-8": True, "merge-16": True, "dense": False, "typo-16": False}
    with pytest.raises(LabError, match="'dense' cannot be trained here"):
        live.build(["dense"])
    live.build(["original", "cluster-8"])
    assert not live.out.exists(), "nothing was missing"


def test_finished_runs_and_the_steps_of_others_are_found(live: LiveRuns) -> None:
    specs = live.specs("original", None, [0, 1, 2, 3], 5)
    assert live.found(specs).all == ()
    run(seed=0, steps=5).save(result_path(specs[0], live.out))
    growing = PartialTrace(partial_path(result_path(specs[1], live.out)), run(seed=1).provenance)
    growing.add(1, {"kl": 0.1}, _responses(2))
    growing.add(2, {"kl": 0.2}, _responses(2))
    growing.close()
    partial_path(result_path(specs[2], live.out)).write_text("{", encoding="utf-8")  # killed while it began
    found = live.found(specs)
    assert [len(trace.steps) for trace in found.finished] == [5]
    assert [trace.values("kl").tolist() for trace in found.growing] == [[0.1, 0.2]]
    assert [trace.provenance.seed for trace in found.all] == [0, 1]
    result_path(specs[3], live.out).write_bytes(b"no trace")
    with pytest.raises(TraceError):
        live.found(specs)


def _responses(n: int) -> dict[str, list[Any]]:
    return {name: [0] * n for name in ("prompt", "reward", "length", "repetition_ratio", "advantage")}


def _fake(specs: Sequence[RunSpec], _: Path, *, workers: int | None, watch: Watch) -> list[Trace]:
    """Make the steps of every run without training."""
    for spec in specs:
        for step in range(1, spec.settings.steps + 1):
            watch(SweepProgress(steps_done=step, steps=spec.settings.steps, spec=spec))
    return [run(seed=spec.seed) for spec in specs]


def test_training_tells_how_far_it_is(live: LiveRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_runs, "sweep", _fake)
    told: list[SweepProgress] = []
    traces = live.train(live.specs("original", None, [0, 1], 3), told.append, threading.Event())
    assert [trace.provenance.seed for trace in traces] == [0, 1]
    assert [progress.steps_done for progress in told] == [1, 2, 3, 1, 2, 3]


def test_a_stop_is_heard_at_the_next_step(live: LiveRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, told = threading.Event(), []
    monkeypatch.setattr(live_runs, "sweep", _fake)

    def watch(progress: SweepProgress) -> None:
        told.append(progress.steps_done)
        if progress.steps_done == 3:
            stop.set()

    with pytest.raises(Stopped):
        live.train(live.specs("original", None, [0], 5), watch, stop)
    assert told == [1, 2, 3]


def test_an_impossible_onset_is_refused_before_anything_runs(live: LiveRuns) -> None:
    with pytest.raises(FaultError, match="onset is step 3"):
        live.train(live.specs("original", FREEZE, [0], 2), lambda _: None, threading.Event())
    assert not live.out.exists()


def test_a_key_is_computed_once(live: LiveRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunSpec] = []

    def counted(spec: RunSpec, out: Path) -> Path:
        if out == live.out:  # a panel of another test may still be looking at its own
            asked.append(spec)
        return result_path(spec, out)

    monkeypatch.setattr(live_runs, "result_path", counted)
    for _ in range(3):
        live.found(live.specs("original", None, [0, 1], 5))
    assert len(asked) == 2


@pytest.mark.slow
def test_a_proxy_is_built_when_it_is_missing_and_only_then(live: LiveRuns) -> None:
    live.build(["cluster-16"])
    path = live.checkpoint("cluster-16")
    assert path is not None
    assert path.parent.name.startswith("qwen3-moe-tiny-")
    assert [spec.method for spec in live.specs("cluster-16", None, [0], 5)] == ["cluster"]
    before = path.stat().st_mtime_ns
    live.build(["cluster-16"])
    assert path.stat().st_mtime_ns == before
