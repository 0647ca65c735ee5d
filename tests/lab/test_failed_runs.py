"""A run that fails is a result: recorded, not repeated unless asked, its finished steps kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import LabError
from moeproxy.lab.jobs import Failure, Job, Report, failure_path
from moeproxy.lab.processes import Children
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path, sweep, try_sweep
from moeproxy.lab.worker import train
from moeproxy.traces import Trace, load_partial, partial_path
from tests.tiny import write


def test_a_killed_run_is_recorded_and_repeated_only_when_asked(
    qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [RunSpec(qwen3, seed=seed, settings=short) for seed in (0, 1)]
    pids: dict[RunSpec, int] = {}
    start = Children.start

    def remember(self: Children, job: Job, log: Path) -> Any:
        started = start(self, job, log)
        pids[job.spec] = started[0].pid  # pyright: ignore[reportOptionalSubscript]
        return started

    def kill(spec: RunSpec, step: int, _steps: int) -> None:
        if (spec.seed, step) == (0, 2):
            os.kill(pids[spec], signal.SIGKILL)

    monkeypatch.setattr(Children, "start", remember)
    seen: list[SweepProgress] = []
    result = try_sweep(specs, tmp_path, workers=2, progress=kill, watch=seen.append)
    (failure,) = result.failures
    assert (failure.spec, failure.exit_code) == (specs[0], -9)
    assert str(failure).startswith("killed by SIGKILL")
    assert 0 < failure.seconds < 600
    assert [trace.provenance.seed for trace in result.traces] == [1]
    assert (seen[-1].runs_done, seen[-1].runs_failed, seen[-1].seconds_left) == (2, 1, 0.0)

    lost = result_path(specs[0], tmp_path)
    left = load_partial(partial_path(lost))
    whole = run(specs[0])
    finished = len(left.steps)
    assert finished >= 2
    assert left.equals(Trace(whole.steps[:finished], whole.trajectories.query(f"step <= {finished}"), whole.provenance))  # pyright: ignore

    pids.clear()
    assert try_sweep(specs, tmp_path) == result
    assert not pids
    repeated = try_sweep(specs, tmp_path, retry_failed=True)
    assert list(pids) == [specs[0]]
    assert not repeated.failures
    assert repeated.traces[0].equals(whole)
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}


def test_a_run_that_raises_is_recorded_with_its_last_words(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    tiny = replace(short, steps=1)
    foreign = RunSpec(write(tmp_path / "foreign", "qwen3_moe"), settings=tiny)
    (failure,) = try_sweep([foreign], tmp_path / "runs").failures
    assert failure.exit_code == 1
    assert "tokenizer lacks the characters" in failure.words
    (file,) = (tmp_path / "runs").iterdir()
    assert file == failure_path(result_path(foreign, tmp_path / "runs"))
    assert Failure.load(file) == failure
    # Who asks for traces or an error gets the run tried again.
    with pytest.raises(LabError, match=r"1 of 1 runs failed.*tokenizer lacks"):
        sweep([foreign], tmp_path / "runs")


def test_records_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    spec = RunSpec(tmp_path, injection=Injection("kl_sign"), further=(Injection("update_freeze"),))
    file = Failure(spec, "words", None, 1.5).save(tmp_path / "a.failed.json")
    assert Failure.load(file) == Failure(spec, "words", None, 1.5)
    stored = json.loads(file.read_text())
    for wrong in ("", "[]", "{}", json.dumps({**stored, "format": "other"}), json.dumps({**stored, "spec": {}})):
        file.write_text(wrong)
        with pytest.raises(LabError, match="remove it"):
            Failure.load(file)


def test_a_failure_reads_well() -> None:
    spec = RunSpec(Path("m"))
    assert str(Failure(spec, "boom", 1)) == "exit code 1: boom"
    assert str(Failure(spec, "", -15)) == "killed by SIGTERM: it said nothing"
    assert str(Failure(spec, "boom", -60)) == "killed by signal 60: boom"
    assert str(Failure(spec, "the node is gone")) == "the node is gone"


@dataclass
class Here:
    """An executor as a reader may write it: in this process, losing the runs of one seed."""

    loses: int
    workers: int = 1

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[tuple[Job, Failure | None], None, None]:
        for job in jobs:
            if job.spec.seed != self.loses:
                train(job.spec.to_dict(), job.path, lambda step, signals, job=job: report(job, step, signals))
            yield job, None


def test_an_executor_of_ones_own(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    specs = [RunSpec(qwen3, seed=seed, settings=replace(short, steps=2)) for seed in (0, 1)]
    seen: list[tuple[int, int]] = []
    result = try_sweep(specs, tmp_path, executor=Here(1), progress=lambda spec, step, _: seen.append((spec.seed, step)))
    assert seen == [(0, 1), (0, 2)]
    assert [failure.words for failure in result.failures] == ["the run ended without a trace"]
    assert result.traces[0].equals(run(specs[0]))


def test_executors_that_cannot_be_meant(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    specs = [RunSpec(qwen3, settings=short)]
    with pytest.raises(LabError, match=r"no executor 'typo'.*local, ray, slurm"):
        sweep(specs, tmp_path, executor="typo")
    with pytest.raises(LabError, match="workers given beside"):
        sweep(specs, tmp_path, executor=Here(1), workers=3)
