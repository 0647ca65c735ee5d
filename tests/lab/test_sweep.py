"""A sweep repeats nothing, survives a failing run and says which one failed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import FaultError, LabError
from moeproxy.lab.processes import Children
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import result_path, sweep
from moeproxy.places import data_dir
from tests.tiny import write


def test_finished_runs_are_not_repeated(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    specs = [RunSpec(qwen3, seed=seed, settings=replace(short, steps=2)) for seed in (0, 1)]
    seen: list[int] = []
    first = sweep(specs, tmp_path, progress=lambda spec, step, steps: seen.append(step))
    assert sorted(seen) == [1, 1, 2, 2]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = sweep(specs, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    assert all(a.equals(b) for a, b in zip(first, again, strict=True))
    assert [trace.provenance.seed for trace in again] == [0, 1]
    assert again[0].provenance.peak_memory_bytes > 50e6


def test_a_failing_run_is_named_and_the_others_are_kept(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    tiny = replace(short, steps=1)
    foreign = write(tmp_path / "foreign", "qwen3_moe")  # a good checkpoint whose tokenizer lacks the tasks' characters
    with pytest.raises(LabError, match=r"1 of 2 runs failed.*tokenizer lacks the characters"):
        sweep([RunSpec(qwen3, settings=tiny), RunSpec(foreign, settings=tiny)], tmp_path / "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_an_impossible_fault_is_refused_before_anything_runs(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    with pytest.raises(FaultError):
        sweep([RunSpec(qwen3, settings=short, injection=Injection("typo"))], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_key_holds_what_decides_a_trace(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    spec = RunSpec(qwen3, settings=short)
    other = [
        replace(spec, seed=1),
        replace(spec, settings=replace(short, beta=0.1)),
        replace(spec, injection=Injection("update_freeze", 1.0, 2)),
        replace(spec, injection=Injection("update_freeze", 0.5, 2)),
    ]
    assert len({result_path(item, tmp_path) for item in (spec, *other)}) == 5
    assert RunSpec.from_dict(other[-1].to_dict()) == other[-1]


def test_the_key_of_a_recorded_run_is_what_it_was(qwen3: Path) -> None:
    for injection in (None, Injection("update_freeze", 1.0, 20)):
        assert result_path(RunSpec(qwen3, injection=injection), data_dir() / "runs").exists()


def test_several_faults_are_named_keyed_and_checked(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    first, second = Injection("update_freeze", 1.0, 2), Injection("kl_sign", 0.5, 3)
    both = RunSpec(qwen3, settings=short, injection=first, further=(second,))
    assert result_path(both, tmp_path).name.startswith("original--update_freeze-1-at2+kl_sign-0.5-at3--s0--")
    turned = replace(both, injection=second, further=(first,))
    keys = {spec.key("") for spec in (both, turned, replace(both, further=()))}
    assert len(keys) == 3
    assert RunSpec.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    assert both.injections == (first, second)
    crowd = replace(both, further=(second,) * 30)
    assert len(result_path(crowd, tmp_path).name) < 200
    with pytest.raises(FaultError, match="kl_sign"):
        sweep([replace(both, further=(replace(second, onset=99),))], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(LabError, match="without a first"):
        RunSpec(qwen3, further=(second,))


def test_a_sweep_gives_what_a_run_in_this_process_gives(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    spec = RunSpec(qwen3, seed=3, settings=short, injection=Injection("update_freeze", 1.0, 3))
    (trace,) = sweep([spec], tmp_path)
    assert trace.equals(run(spec))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_sweep_ends_its_runs_and_starts_no_other(
    qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    started: list[int] = []
    start = Children.start

    def remember(self: Children, *args: Any) -> Any:
        process, reports = start(self, *args)
        started.append(process.pid)
        return process, reports

    def interrupt(*_: object) -> None:
        raise error("stop")

    monkeypatch.setattr(Children, "start", remember)
    specs = [RunSpec(qwen3, seed=seed, settings=replace(short, steps=10_000)) for seed in range(4)]
    with pytest.raises(error, match="stop"):
        sweep(specs, tmp_path, workers=1, progress=interrupt)
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    assert list(tmp_path.glob("*.parquet")) == []


def test_a_run_outlives_an_interrupt_that_was_meant_for_the_notebook(
    qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Children.start, []

    def remember(self: Children, *args: Any) -> Any:
        started.append(start(self, *args))
        return started[-1]

    monkeypatch.setattr(Children, "start", remember)
    spec = RunSpec(qwen3, settings=replace(short, steps=3))
    (trace,) = sweep([spec], tmp_path, progress=lambda *_: os.kill(started[0][0].pid, signal.SIGINT))
    assert len(trace.steps) == 3


def test_where_there_is_no_fork_server_runs_are_spawned(
    qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert Children()._context.get_start_method() == "spawn"
    spec = RunSpec(qwen3, settings=replace(short, steps=2))
    (trace,) = sweep([spec], tmp_path)
    assert trace.equals(run(spec))
