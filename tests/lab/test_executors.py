"""The same sweep on a local Ray and through submitit: same files, same numbers, same records of failures."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import LabError
from moeproxy.lab import executor_ray, executor_slurm, executors
from moeproxy.lab.jobs import Executor, Job
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path, try_sweep
from tests.tiny import write

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


def dying(*seeds: int) -> Callable[[dict[str, Any], Path], None]:
    """Return the `train` of a node on which runs of these seeds are killed."""

    def run_or_die(stored: dict[str, Any], path: Path) -> None:
        import os

        from moeproxy.lab.worker import train

        if stored["seed"] in seeds:
            os.kill(os.getpid(), 9)
        train(stored, path)

    return run_or_die


def _check(model: Path, settings: GRPOSettings, folder: Path, executor: Executor) -> list[str]:
    """Sweep a run that works, one whose tokenizer lacks the tasks' characters, and one that is killed."""
    out, settings = folder / "out", replace(settings, steps=3)
    foreign = write(folder / "foreign", "qwen3_moe")
    specs = [
        RunSpec(model, seed=1, settings=settings),
        RunSpec(model, seed=2, settings=settings),
        RunSpec(foreign, seed=3, settings=settings),
    ]
    steps: list[tuple[int, int]] = []
    seen: list[SweepProgress] = []
    result = try_sweep(
        specs,
        out,
        executor=executor,
        progress=lambda spec, step, _: steps.append((spec.seed, step)),
        watch=seen.append,
    )
    (trace,) = result.traces
    assert trace.equals(run(specs[1]))
    assert [failure.spec for failure in result.failures] == [specs[0], specs[2]]
    assert steps == [(2, 1), (2, 2), (2, 3)]
    assert (seen[-1].runs_done, seen[-1].runs_failed, seen[-1].steps_done) == (3, 2, 3)
    # Any other executor takes up what this one left.
    assert try_sweep(specs, out) == result
    ends = [".failed.json", ".parquet", ".failed.json"]
    names = {result_path(spec, out).with_suffix(end).name for spec, end in zip(specs, ends, strict=True)}
    assert {path.name for path in out.iterdir()} == names
    return [failure.words for failure in result.failures]


@needs_submitit
@pytest.mark.slow
def test_submitit(qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_slurm, "train", dying(1))
    executor = executor_slurm.SlurmExecutor(folder=tmp_path / "logs", cluster="local", look_every_s=0.2)
    killed, raised = _check(qwen3, short, tmp_path, executor)
    assert killed.startswith("state FINISHED: ")  # what submitit says of a local job that left no result
    assert "tokenizer lacks the characters" in raised


@needs_ray
@pytest.mark.slow
def test_ray(qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(executor_ray, "train", dying(1))
    killed, raised = _check(qwen3, short, tmp_path, executor_ray.RayExecutor(workers=2))
    assert "worker" in killed.lower()
    assert "tokenizer lacks the characters" in raised
    assert not ray.is_initialized()


class FakeRay(types.ModuleType):
    """What RayExecutor asks of Ray, noting it; a task is made when it is waited for."""

    def __init__(self, running: bool) -> None:
        super().__init__("ray")
        self.running, self.asked, self.cancelled = running, {}, []

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: object) -> None:
        self.asked["init"] = options

    def shutdown(self) -> None:
        self.asked["shutdown"] = True

    def remote(self, **options: object) -> Any:
        self.asked["remote"] = options
        return lambda function: types.SimpleNamespace(remote=lambda *arguments: (function, Path(arguments[1])))

    def wait(self, pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        pending[0][1].write_text("a trace")
        return pending[:1], pending[1:]

    def get(self, _reference: Any) -> None:
        return None

    def cancel(self, reference: Any, force: bool) -> None:
        assert force
        self.cancelled.append(reference[1].stem)


@pytest.mark.parametrize("running", [False, True])
def test_a_ray_that_runs_is_used_and_left_as_it_is(
    running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(running)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(executor_ray, "require", lambda _: None)
    monkeypatch.setattr(executor_ray.Followed, "ended", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    jobs = [Job(RunSpec(tmp_path, seed=seed), tmp_path / f"{seed}.parquet") for seed in range(3)]
    ends = executor_ray.RayExecutor(5).run(jobs, lambda *_: None)
    assert next(ends) == (jobs[0], None)
    ends.close()  # as an interrupted sweep does
    assert ray.cancelled == ["1", "2"]
    assert ray.asked.pop("remote") == {"num_cpus": 1, "max_retries": 0, "max_calls": 1}
    if running:
        assert ray.asked == {}
    else:
        assert ray.asked["shutdown"]
        assert ray.asked["init"]["num_cpus"] == 5
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "num_cpus" not in executor_ray.RayExecutor(5)._options()


def test_an_interrupted_sweep_leaves_no_job_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[int] = []

    class Task(types.SimpleNamespace):
        def done(self) -> bool:
            return self.seed == 0

        def exception(self) -> None:
            return None

        def cancel(self, check: bool) -> None:
            cancelled.append(self.seed)

    monkeypatch.setattr(executor_slurm, "require", lambda _: None)
    executor = executor_slurm.SlurmExecutor(folder=tmp_path)
    jobs = [Job(RunSpec(tmp_path, seed=seed), tmp_path / f"{seed}.parquet") for seed in range(3)]
    monkeypatch.setattr(type(executor), "_submit", lambda *_: {job: Task(seed=job.spec.seed) for job in jobs})
    ends = executor.run(jobs, lambda *_: None)
    assert next(ends) == (jobs[0], None)
    ends.close()
    assert cancelled == [1, 2]


@needs_submitit
def test_arrays_are_as_long_and_as_wide_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, scripts = tmp_path / "bin", tmp_path / "scripts"
    for folder in (commands, scripts):
        folder.mkdir()
    said = f'cp "$1" {scripts}/$(ls {scripts} | wc -l)\necho Submitted batch job 12\n'
    for name in ("srun", "sbatch"):
        (commands / name).write_text(f"#!/bin/sh\n{said}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    parameters = {"slurm_partition": "small", "mem_gb": 3}
    executor = executor_slurm.SlurmExecutor(3, tmp_path / "logs", parameters, array_size=4)
    specs = [RunSpec(tmp_path, seed=seed) for seed in range(10)]
    queued = executor._submit([Job(spec, tmp_path / f"{spec.seed}.parquet") for spec in specs])
    assert [job.spec.seed for job in queued] == list(range(10))
    arrays = [(scripts / name).read_text() for name in ("0", "1", "2")]
    for array, width in zip(arrays, ("0-3%3", "0-3%3", "0-1%2"), strict=True):
        for line in (f"array={width}", "partition=small", "mem=3GB", "cpus-per-task=1", "job-name=moeproxy"):
            assert f"#SBATCH --{line}\n" in array


@needs_submitit
def test_parameters_that_submitit_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="slurm_typo"):
        executor_slurm.SlurmExecutor(folder=tmp_path, cluster="local", parameters={"slurm_typo": 1}).submitter()
    with pytest.raises(LabError, match="srun"):
        executor_slurm.SlurmExecutor(folder=tmp_path).submitter()


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_named_with_its_command(
    name: str, package: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "find_spec", lambda wanted: None)
    with pytest.raises(LabError, match=rf"{package} is not installed.*pip install 'moeproxy\[cluster\]'"):
        try_sweep([RunSpec(qwen3)], tmp_path, executor=name)
