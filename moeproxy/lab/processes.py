"""Run specs on this machine, each in a fresh process forked from one that has imported torch already.

Imports cost more than a short run. Python's fork server pays for them once a program; where there is none (Windows) or
where forking after an import is not safe (macOS), every run is spawned and imports for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moeproxy.lab import worker
from moeproxy.lab.settings import RunSpec

_PRELOAD = "moeproxy.lab.preload"
_WORDS = 5  # lines of a failed process that are kept


def usable_cores() -> int:
    """Return the number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Children:
    """The runs in flight, so that an interrupted sweep can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[BaseProcess] = set()
        self._stopped = False
        self._context = _context()

    def start(self, spec: RunSpec, path: Path, log: Path) -> tuple[BaseProcess, Connection] | None:
        """Start a run and return it with the end of its pipe, unless the sweep has been stopped."""
        ours, theirs = self._context.Pipe()
        arguments = (spec.to_dict(), path, log, dict(os.environ), theirs)
        with self._lock, theirs:
            if self._stopped:
                ours.close()
                return None
            process = self._context.Process(target=worker.child, args=arguments, daemon=True)
            with _without_main():
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


def _context() -> Any:
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    return context


@contextmanager
def _without_main() -> Iterator[None]:
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


def receive(reports: Connection) -> tuple[int, int, dict[str, float]] | None:
    """Return the next (step, steps, signals) of a run, or None when its process has ended."""
    try:
        return reports.recv()
    except (EOFError, OSError):
        return None


def last_words(log: Path) -> str:
    """Return the last lines that a process wrote, in one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join([line.strip() for line in lines if line.strip()][-_WORDS:])
