"""Run many GRPO runs, each in a fresh process, one result file a run.

A finished run is found by its content key and not repeated; a killed sweep loses only the runs in flight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from moeproxy.errors import LabError
from moeproxy.lab.faults import check_injection
from moeproxy.lab.identity import identify, model_hash
from moeproxy.lab.processes import Children, last_words, receive, usable_cores
from moeproxy.lab.settings import RunSpec
from moeproxy.traces.trace import Trace

StepProgress = Callable[[RunSpec, int, int], None]


def result_path(spec: RunSpec, out: Path) -> Path:
    """Return the file that the run's trace goes to: readable parts, then the content key."""
    identify(spec.model, spec.method)
    key = spec.key(model_hash(spec.model))
    return Path(out) / f"{spec.label}--{spec.fault_name}--s{spec.seed}--{key}.parquet"


def sweep(
    specs: Sequence[RunSpec], out: Path, *, workers: int | None = None, progress: StepProgress | None = None
) -> list[Trace]:
    """Run every spec that has no result in `out` yet and return the traces in the order of `specs`.

    Args:
        specs: the runs.
        out: directory of the result files.
        workers: processes at a time; by default the number of usable cores. Each run uses one thread
            (`settings.threads`): more threads than cores were measured to cost 100 times.
        progress: called from worker threads with (spec, step, steps) after every step of every run.

    Raises:
        FaultError, CheckpointError: a spec is impossible; nothing has been run then.
        LabError: runs failed; the others are finished and kept. The message names the first and its last words.
    """
    paths = [result_path(spec, out) for spec in specs]
    for spec in specs:
        for injection in spec.injections:
            check_injection(injection, spec.settings.steps)
    Path(out).mkdir(parents=True, exist_ok=True)
    missing = {path: spec for spec, path in zip(specs, paths, strict=True) if not path.exists()}
    failures = _run_all(missing, workers or usable_cores(), progress)
    if failures:
        name, words = failures[0]
        raise LabError(
            f"{len(failures)} of {len(missing)} runs failed; the first is {name}: {words}",
            where=out,
            remedy="mend the cause and call again: finished runs are not repeated",
        )
    return [Trace.load(path) for path in paths]


def _run_all(missing: dict[Path, RunSpec], workers: int, progress: StepProgress | None) -> list[tuple[str, str]]:
    failures = []
    children = Children()
    with tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            jobs = {
                pool.submit(_run_one, spec, path, Path(logs) / path.stem, progress, children): path
                for path, spec in missing.items()
            }
            for job in as_completed(jobs):
                words = job.result()
                if words:
                    failures.append((jobs[job].stem, words))
        except BaseException:  # Ctrl-C above all: neither start the rest nor leave the runs in flight behind
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    return failures


def _run_one(spec: RunSpec, path: Path, log: Path, progress: StepProgress | None, children: Children) -> str:
    """Run one spec in a child process; return the last words of a failed child, else an empty string."""
    started = children.start(spec, path, log)
    if started is None:
        return "stopped before it began"
    process, reports = started
    try:
        with reports:
            while (message := receive(reports)) is not None:
                step, steps, _signals = message
                if progress:
                    progress(spec, step, steps)
    except BaseException:
        children.stop()  # here, before this thread takes the next run
        raise
    finally:
        code = children.ended(process)
    return "" if code == 0 and path.exists() else f"exit code {code}: {last_words(log)}"
