"""Run specs on this machine, each in a fresh process forked from one that has imported torch already.

Imports cost more than a short run. Python's fork server pays for them once a program; where there is none (Windows) or
where forking after an import is not safe (macOS), every run is spawned and imports for itself. The server stays until
the program ends and shares its half gigabyte with the runs. A program that had a fork server before keeps that one, and
its runs import for themselves too.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moeproxy.lab import worker
from moeproxy.lab.jobs import Failure, Job, Report, last_words

_PRELOAD = "moeproxy.lab.preload"


def usable_cores() -> int:
    """Return the number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalExecutor:
    """Runs on this machine, each in a process of its own.

    Args:
        workers: processes at a time. Each run uses one thread (`settings.threads`): more threads than cores were
            measured to cost 100 times.
    """

    workers: int = field(default_factory=usable_cores)

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[tuple[Job, Failure | None], None, None]:
        """Make every run and yield each as it ends; an exception, also of `report`, ends the runs in flight."""
        children = Children()
        with tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(max_workers=self.workers) as pool:
            try:
                ends = {
                    pool.submit(_follow, job, Path(logs) / str(number), report, children): job
                    for number, job in enumerate(jobs)
                }
                for end in as_completed(ends):
                    yield ends[end], end.result()
            except BaseException:  # Ctrl-C above all: neither start the rest nor leave the runs in flight behind
                pool.shutdown(wait=False, cancel_futures=True)
                children.stop()
                raise


def _follow(job: Job, log: Path, report: Report, children: Children) -> Failure | None:
    """Make one run in a child process and report its steps; return how it failed, if it did."""
    began = time.monotonic()
    try:
        started = children.start(job, log)
    except (EOFError, OSError) as error:  # the fork server is gone, or the machine has no room for a process
        return Failure(job.spec, f"no process could be started: {error!r}")
    if started is None:
        return Failure(job.spec, "stopped before it began")
    process, reports = started
    try:
        with reports:
            while (message := _receive(reports)) is not None:
                report(job, *message)
    except BaseException:
        children.stop()  # here, before this thread takes the next run
        raise
    finally:
        code = children.ended(process)
    if job.path.exists():
        return None
    said = log.read_text(errors="replace") if log.exists() else ""
    return Failure(job.spec, last_words(said), code, round(time.monotonic() - began, 2))


class Children:
    """The runs in flight, so that an interrupted sweep can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[BaseProcess] = set()
        self._stopped = False
        self._context = context()

    def start(self, job: Job, log: Path) -> tuple[BaseProcess, Connection] | None:
        """Start a run and return it with the end of its pipe, unless the sweep has been stopped."""
        ours, theirs = self._context.Pipe()
        arguments = (job.spec.to_dict(), job.path, log, dict(os.environ), theirs)
        with self._lock, theirs:
            if self._stopped:
                ours.close()
                return None
            process = self._context.Process(target=worker.child, args=arguments, daemon=True)
            with without_main():
                process.start()
            self._running.add(process)
        return process, ours

    def ended(self, process: BaseProcess) -> int:
        """Forget a run that has ended and return its exit code, -9 for one that signal 9 killed."""
        process.join()
        with self._lock:
            self._running.discard(process)
            code = process.exitcode
            process.close()
        return 1 if code is None else code

    def stop(self) -> None:
        """End every run in flight; none starts afterwards."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def context(preload: str = _PRELOAD) -> Any:
    """Return the multiprocessing context whose fork server has imported `preload`, or "spawn" where there is none.

    The server that is started first stays until the program ends, with what it has imported.
    """
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([preload])
    return server


@contextmanager
def without_main() -> Iterator[None]:
    """Keep new processes from importing the caller's script.

    Multiprocessing does so in case a function of the script is to be called. None is, and a script without
    `if __name__ == "__main__"` would start its sweep again in every run.
    """
    whole = spawn.get_preparation_data

    def without(name: str) -> dict[str, Any]:
        return {key: value for key, value in whole(name).items() if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = without
    try:
        yield
    finally:
        spawn.get_preparation_data = whole


def _receive(reports: Connection) -> tuple[int, dict[str, float]] | None:
    """Return the next (step, signals) of a run, or None when its process has ended."""
    try:
        return reports.recv()
    except (EOFError, OSError):
        return None
