"""Reproducing a failure from the log panel: recorded runs at once, new ones on request, and a run laid over the log."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from moeproxy.lab import bench_record
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import SweepResult
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench
from moeproxy.traces.trace import Trace
from moeproxy.triage import reproduce as module
from moeproxy.view.apps import live_work
from moeproxy.view.apps.log_reproduce import LogReproduce, proxies_of
from moeproxy.view.apps.logs import LogPanel

BROKEN = data_dir() / "logs" / "trainer_state.json"
FAULTS = ("nan_poison", "kl_explosion")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the shipped benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    traces = load_bench(
        data_dir() / "bench", models=["original", "cluster-16"], faults=[*FAULTS, None], trajectories=False
    )
    for trace in traces:
        run = trace.provenance
        if run.fault or (100 <= run.seed < 108 and run.model == "cluster-16") or run.seed == 100:
            name = f"{run.fault}-{run.strength:g}-at{run.onset}" if run.fault else "healthy"
            trace.save(folder / "runs" / f"{run.model}--{name}--s{run.seed}--{len(name):x}.parquet")
    bench_record.pack(folder / "runs", folder / "packs")
    return folder / "packs"


@pytest.fixture
def panel(bench: Path, tmp_path: Path) -> LogPanel:
    made = LogPanel(BROKEN, out=tmp_path / "out")
    made.reproduce = LogReproduce(made._failing, made._lay_over, tmp_path / "proxy", bench=bench)
    assert made.settle()
    return made


def _healthy(folder: Path) -> Path:
    """What the resumed example holds after its resume: a run in which nothing departs."""
    lines = (data_dir() / "logs" / "verl_console.log").read_text().splitlines(keepends=True)
    (folder / "healthy.log").write_text("".join(lines[73:]))
    return folder / "healthy.log"


def test_recorded_runs_answer_at_once_and_can_be_laid_over_the_log(panel: LogPanel, tmp_path: Path) -> None:
    box = panel.reproduce
    assert box.proxy.options == ("cluster-16",)
    assert box.overlay.disabled
    box.job.start()
    assert box.job.join(60) == "done", box.status.text
    assert box.result is not None
    assert box.result.candidates[0].fault == "nan_poison"
    first = box.table.frame.iloc[0]
    assert (first["fault"], first["match on the proxy"]) == ("nan_poison", f"{box.result.candidates[0].match:.2f}")
    assert box.table.frame["match on the proxy"].tolist().count("not run") == 3, "of five candidates two are recorded"
    assert "cluster-16 matches best with nan_poison" in box.said.value
    box.overlay.click()
    assert panel.settle()
    assert [run.label.partition(" ")[0] for run in panel.view.runs][1] == "cluster-16,"
    assert "nan_poison" in panel.view.runs[1].label
    panel.read(_healthy(tmp_path))
    assert panel.settle()
    assert (box.result, box.said.value, box.overlay.disabled) == (None, "", True)
    assert box.widget.layout.display == "none"


def test_a_run_that_does_not_depart_is_refused(panel: LogPanel, tmp_path: Path) -> None:
    panel.read(_healthy(tmp_path))
    assert panel.settle()
    panel.reproduce.job.start()
    assert panel.reproduce.job.join(30) == "failed"
    assert "no run that departs is shown" in panel.reproduce.status.text


def test_new_runs_are_made_on_request_though_others_are_recorded(
    panel: LogPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = load_bench(data_dir() / "bench", models=["cluster-16"], faults=["nan_poison"])
    asked: list[RunSpec] = []

    def try_sweep(specs: Sequence[RunSpec], out: Path, **options: object) -> _Made:
        asked.extend(specs)
        return _Made([recorded[0]] if specs[0].injection and specs[0].injection.fault == "nan_poison" else [])

    monkeypatch.setattr(module, "try_sweep", try_sweep)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.build", lambda *_: None)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.checkpoint", lambda *_: Path("proxy"))
    box = panel.reproduce
    box.live_job.start()
    assert box.live_job.join(60) == "done", box.status.text
    assert box.result is not None
    assert (box.result.candidates[0].n_live, box.result.candidates[0].n_recorded) == (1, 0)
    assert [spec.injection.fault for spec in asked if spec.injection] == list(panel._failing().causes)
    assert {spec.label for spec in asked} == {"cluster-16"}
    assert {spec.injection.onset for spec in asked if spec.injection} == {15}
    assert "1 new" in box.table.frame["runs"].tolist()


def test_live_runs_can_be_stopped(panel: LogPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def try_sweep(*_: object, watch: Watch, **__: object) -> SweepResult:
        while True:
            watch(SweepProgress(runs=1, steps_done=1, steps=60))
            begun.set()

    monkeypatch.setattr(module, "try_sweep", try_sweep)
    monkeypatch.setattr(live_work, "LOOK_S", 0.01)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.build", lambda *_: None)
    monkeypatch.setattr("moeproxy.view.apps.live_runs.LiveRuns.checkpoint", lambda *_: Path("proxy"))
    job = panel.reproduce.live_job
    job.start()
    assert begun.wait(60)
    job.cancel_button.click()
    assert job.join(30) == "cancelled"
    assert panel.reproduce.status.text.startswith("Run them live: stopped. Finished runs are kept")
    assert panel.reproduce.result is None


def test_only_proxies_with_broken_runs_are_offered(tmp_path: Path) -> None:
    assert proxies_of(tmp_path) == []
    assert "cluster-16" in proxies_of(data_dir() / "bench")
    assert "random-16" not in proxies_of(data_dir() / "bench")


class _Made:
    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces, self.failures = traces, ()
