"""The same sweep on a local Ray and through submitit: same files, same numbers, same records of failures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import LabError
from moeproxy.lab import executor_ray, executor_slurm, executors, ray_start
from moeproxy.lab.jobs import Job
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.sweep import try_sweep
from tests.lab.cluster import check, dying

ROOT = Path(__file__).resolve().parents[2]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")


@needs_submitit
@pytest.mark.slow
def test_submitit(qwen3: Path, short: GRPOSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_slurm, "train", dying(1))
    executor = executor_slurm.SlurmExecutor(folder=tmp_path / "logs", cluster="local", look_every_s=0.2)
    killed, raised = check(qwen3, short, tmp_path, executor)
    assert killed.startswith("state FINISHED: ")  # what submitit says of a local job that left no result
    assert "tokenizer lacks the characters" in raised


@needs_ray
@pytest.mark.job
@pytest.mark.slow
def test_ray(tmp_path: Path) -> None:
    # A program of its own: Ray leaves signal handlers and, when it cannot start, processes behind.
    command = [sys.executable, "-m", "tests.lab.cluster", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "timed out during startup" in ended.stderr:
        pytest.skip("this machine is too busy to start a Ray within the 30 s that Ray allows")
    assert ended.returncode == 0, ended.stderr
    killed, raised = json.loads(ended.stdout.splitlines()[-1])
    assert "worker" in killed.lower()
    assert "tokenizer lacks the characters" in raised


class FakeRay(types.ModuleType):
    """What RayExecutor asks of Ray, noting it; a task is made when it is waited for."""

    def __init__(self, running: bool) -> None:
        super().__init__("ray")
        self.running, self.asked, self.cancelled = running, {}, []

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: object) -> None:
        if "broken" in options:
            raise Exception("The current node timed out")
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
    monkeypatch.setattr(ray_start, "alone", nullcontext)  # of the real one
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


def test_a_ray_that_does_not_start_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(running=False))
    monkeypatch.setattr(ray_start, "alone", nullcontext)
    monkeypatch.setattr(executor_ray, "require", lambda _: None)
    executor = executor_ray.RayExecutor(1, {"broken": True})
    with pytest.raises(LabError, match=r"no Ray could be started.*node timed out.*ray start --head"):
        next(executor.run([Job(RunSpec(tmp_path), tmp_path / "a.parquet")], lambda *_: None))


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
