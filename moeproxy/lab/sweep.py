"""Run many GRPO runs, each in a fresh process, one result file a run.

A finished run is found by its content key and not repeated; a killed sweep loses only the runs in flight, and of those
no finished step (`moeproxy.traces.load_partial`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from moeproxy.errors import LabError
from moeproxy.lab.executors import chosen
from moeproxy.lab.faults import check_injection
from moeproxy.lab.identity import identify, model_hash
from moeproxy.lab.jobs import Executor, Failure, Job, failure_path
from moeproxy.lab.remedies import check_application
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep_progress import SweepProgress, Tally, Watch
from moeproxy.traces.trace import Trace

__all__ = ["SweepProgress", "SweepResult", "model_hash", "result_path", "sweep", "try_sweep"]

StepProgress = Callable[[RunSpec, int, int], None]


def result_path(spec: RunSpec, out: Path) -> Path:
    """Return the file that the run's trace goes to: readable parts, then the content key."""
    identify(spec.model, spec.method)
    return Path(out) / _file_name(spec, model_hash(spec.model))


@dataclass(frozen=True)
class SweepResult:
    """What a sweep has: traces and failures.

    Args:
        paths: result files that exist, in the order of the specs.
        failures: runs that have none, in that order.
    """

    paths: tuple[Path, ...]
    failures: tuple[Failure, ...]

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of `paths`, read anew at every call: a large sweep need not fit into memory."""
        return tuple(Trace.load(path) for path in self.paths)


def sweep(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    progress: StepProgress | None = None,
    watch: Watch | None = None,
    executor: str | Executor = "local",
) -> list[Trace]:
    """Run every spec that has no result in `out` yet and return the traces in the order of `specs`.

    Args:
        specs: the runs.
        out: directory of the result files; a cluster must see it and the models under the same paths.
        workers: runs at a time; by default one a usable core, for a cluster what the executor says.
        progress: called from worker threads, one call at a time, with (spec, step, steps) after every step of every
            run. An exception in it ends the sweep and the runs in flight.
        watch: called likewise with a `SweepProgress`, when a run begins or ends too.
        executor: "local", "ray", "slurm", or an object that follows `moeproxy.lab.jobs.Executor`.

    Raises:
        FaultError, CheckpointError: a spec is impossible; nothing has been run then.
        LabError: runs failed; the others are finished and kept. The message names the first and its last words.
    """
    jobs = _jobs(specs, Path(out))
    missing = [job for job in dict.fromkeys(jobs) if not job.path.exists()]
    failures = _run(missing, chosen(executor, workers), progress, watch)
    if failures:
        job, failure = next(iter(failures.items()))
        raise LabError(
            f"{len(failures)} of {len(missing)} runs failed; the first is {job.path.stem}: {failure}",
            where=out,
            remedy="mend the cause and call again: finished runs are not repeated",
        )
    return [Trace.load(job.path) for job in jobs]


def try_sweep(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    progress: StepProgress | None = None,
    watch: Watch | None = None,
    executor: str | Executor = "local",
    retry_failed: bool = False,
) -> SweepResult:
    """Like `sweep`, but a run that fails is a result too.

    It leaves `<result>.failed.json`, beside the steps it finished in `<result>.partial`, and is not repeated.

    Args:
        specs, out, workers, progress, watch, executor: as for `sweep`.
        retry_failed: repeat the runs that failed in an earlier call.

    Raises:
        FaultError, CheckpointError: a spec is impossible; nothing has been run then.
        LabError: the executor cannot be used, or the record of a failure cannot be read.
    """
    jobs = list(dict.fromkeys(_jobs(specs, Path(out))))
    missing = [job for job in jobs if not job.path.exists()]
    known = {job: failure_path(job.path) for job in missing if failure_path(job.path).exists() and not retry_failed}
    failures = {job: Failure.load(path) for job, path in known.items()}
    left = [job for job in missing if job not in known]
    failures |= _run(left, chosen(executor, workers), progress, watch, record=True)
    paths = tuple(job.path for job in jobs if job not in failures)
    return SweepResult(paths, tuple(failures[job] for job in jobs if job in failures))


def _jobs(specs: Sequence[RunSpec], out: Path) -> list[Job]:
    models = {place: identify(*place) for place in {(spec.model, spec.method) for spec in specs}}
    jobs = [Job(spec, out / _file_name(spec, model_hash(spec.model))) for spec in specs]
    for spec in specs:
        for application in spec.remedies:
            check_application(application, spec.settings, experts=models[spec.model, spec.method].n_experts > 0)
        for injection in spec.injections:
            experts = models[spec.model, spec.method].n_experts > 0
            check_injection(injection, spec.settings.steps, experts=experts, settings=spec.settings)
    out.mkdir(parents=True, exist_ok=True)
    return jobs


def _file_name(spec: RunSpec, hashed_model: str) -> str:
    return f"{spec.label}--{spec.fault_name}--s{spec.seed}--{spec.key(hashed_model)}.parquet"


def _run(
    jobs: Sequence[Job],
    executor: Executor,
    progress: StepProgress | None,
    watch: Watch | None,
    record: bool = False,
) -> dict[Job, Failure]:
    if not jobs:
        return {}
    tally = Tally(jobs, executor.workers)
    one_at_a_time = threading.Lock()  # a caller's bar need not be made for threads, and never runs backwards

    def report(job: Job, step: int, signals: Mapping[str, float]) -> None:
        with one_at_a_time:
            now = tally.report(job, step, signals)
            if progress and step:
                progress(job.spec, step, job.spec.settings.steps)
            if watch:
                watch(now)

    failures = {}
    with closing(executor.run(jobs, report)) as ends:
        for job, failure in ends:
            if failure is None and not job.path.exists():
                failure = Failure(job.spec, "the run ended without a trace")
            if failure:
                failures[job] = failure
                if record:
                    failure.save(failure_path(job.path))
            with one_at_a_time:
                now = tally.ended(job, failed=failure is not None)
                if watch:
                    watch(now)
    return failures
