"""Run many GRPO runs, each in a fresh process, one result file a run.

A finished run is found by its content key and not repeated; a killed sweep loses only the runs in flight.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from moeproxy.errors import LabError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.files import sha256_file
from moeproxy.lab.faults import check_injection
from moeproxy.lab.settings import RunSpec
from moeproxy.traces.trace import Trace

StepProgress = Callable[[RunSpec, int, int], None]
_MARK = "moeproxy-step"  # starts the lines in which a child reports its steps


def result_path(spec: RunSpec, out: Path) -> Path:
    """Return the file that the run's trace goes to: readable parts, then the content key."""
    injection = spec.injection
    fault = f"{injection.fault}-{injection.strength:g}-at{injection.onset}" if injection else "healthy"
    key = spec.key(model_hash(spec.model))
    return Path(out) / f"{spec.label}--{fault}--s{spec.seed}--{key}.parquet"


def model_hash(path: Path) -> str:
    """Return a hash of a checkpoint's config and weights (all bytes: proxies of equal shape differ only there)."""
    Checkpoint.open(path)
    files = [path / "config.json", *sorted(Path(path).glob("*.safetensors"))]
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


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
        if spec.injection:
            check_injection(spec.injection, spec.settings.steps)
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


def usable_cores() -> int:
    """Return the number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_all(missing: dict[Path, RunSpec], workers: int, progress: StepProgress | None) -> list[tuple[str, str]]:
    failures = []
    children = _Children()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            jobs = {pool.submit(_run_one, spec, path, progress, children): path for path, spec in missing.items()}
            for job in as_completed(jobs):
                words = job.result()
                if words:
                    failures.append((jobs[job].stem, words))
        except BaseException:  # Ctrl-C above all: neither start the rest nor leave the runs in flight behind
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    return failures


class _Children:
    """The runs in flight, so that an interrupted sweep can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str] | None:
        """Start a run, unless the sweep has been stopped."""
        with self._lock:
            if self._stopped:
                return None
            child = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            self._running.add(child)
        return child

    def ended(self, child: subprocess.Popen[str]) -> None:
        """Forget a run that has ended."""
        with self._lock:
            self._running.discard(child)

    def stop(self) -> None:
        """End every run in flight; none starts afterwards."""
        with self._lock:
            self._stopped = True
            for child in self._running:
                child.terminate()


def _run_one(spec: RunSpec, path: Path, progress: StepProgress | None, children: _Children) -> str:
    """Run one spec in a child process; return the last words of a failed child, else an empty string."""
    threads = str(spec.settings.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "moeproxy.lab.sweep", json.dumps(spec.to_dict()), str(path)]
    child = children.start(command, environment)
    if child is None:
        return "stopped before it began"
    last: list[str] = []
    try:
        with child:
            for line in child.stdout or ():
                if line.startswith(_MARK):
                    if progress:
                        _, step, steps = line.split()
                        progress(spec, int(step), int(steps))
                elif line.strip():
                    last = [*last[-4:], line.strip()]
    finally:
        children.ended(child)
    return "" if child.returncode == 0 and path.exists() else f"exit code {child.returncode}: {' | '.join(last)}"


def _child() -> None:
    from moeproxy.lab.run import run

    parser = argparse.ArgumentParser(description="Run one GRPO run and write its trace (used by sweep).")
    parser.add_argument("spec", help="JSON of a RunSpec")
    parser.add_argument("path", type=Path, help="where the trace goes")
    options = parser.parse_args()

    def report(step: int, steps: int, _row: dict[str, float]) -> None:
        sys.stdout.write(f"{_MARK} {step} {steps}\n")
        sys.stdout.flush()

    run(RunSpec.from_dict(json.loads(options.spec)), progress=report).save(options.path)


if __name__ == "__main__":
    _child()
