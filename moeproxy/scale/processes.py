"""Do a job in a process of its own, so that process groups and fake modes never reach the caller's."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moeproxy.errors import ScaleError
from moeproxy.lab.jobs import last_words
from moeproxy.lab.processes import context, without_main
from moeproxy.scale import child

_PRELOAD = "moeproxy.scale.preload"
_LOOK = 0.2
"""Seconds between two looks at whether the caller wants to stop."""


class Cancelled(ScaleError):
    """The caller stopped the emulation."""


@dataclass
class _Running:
    process: Any
    connection: Connection
    log: Path


def call(
    task: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    cancel: threading.Event | None = None,
    timeout: float | None,
) -> list[Any]:
    """Do `task` once for every request, all at the same time, each in a fresh process; return the results in order.

    Args:
        task: name of a task of `child`.
        requests: arguments, one mapping for each process.
        cancel: set it (from another thread) to end all processes.
        timeout: seconds after which they are ended too.

    Raises:
        Cancelled: `cancel` was set.
        ScaleError: a process failed, was killed or took too long; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        running: list[_Running] = []
        try:
            for number, request in enumerate(requests):
                running.append(_start(task, request, Path(folder) / str(number)))
            return _results(running, cancel, timeout)
        finally:
            for one in running:
                one.process.terminate()
                one.process.join()
                one.process.close()
                one.connection.close()


def _start(task: str, request: Mapping[str, Any], log: Path) -> _Running:
    world = context(_PRELOAD)
    ours, theirs = world.Pipe()
    with theirs, without_main():
        process = world.Process(target=child.main, args=(task, request, log, dict(os.environ), theirs), daemon=True)
        process.start()
    return _Running(process, ours, log)


def _results(running: list[_Running], cancel: threading.Event | None, timeout: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    until = None if timeout is None else time.monotonic() + timeout
    while len(results) < len(running):
        if cancel is not None and cancel.is_set():
            raise Cancelled("stopped on request")
        if timeout is not None and until is not None and time.monotonic() > until:
            raise too_long(timeout)
        waiting = {one.connection: place for place, one in enumerate(running) if place not in results}
        for ready in wait(list(waiting), _LOOK):
            place = waiting[ready]  # pyright: ignore[reportArgumentType]
            results[place] = _received(running[place])
    return [results[place] for place in range(len(running))]


def too_long(timeout: float) -> ScaleError:
    """Return the error of an emulation that was ended after `timeout` seconds."""
    said = f"{timeout:,.0f}" if timeout >= 10 else f"{timeout:.2g}"
    return ScaleError(
        f"the emulation took too long: it was ended after {said} s",
        remedy="take fewer layers (`program.sliced`), sequences or ranks, or pass a larger `timeout`",
    )


def _received(one: _Running) -> Any:
    try:
        error, result = one.connection.recv()
    except (EOFError, OSError):
        one.process.join()
        said = last_words(one.log.read_text(errors="replace")) if one.log.exists() else ""
        raise ScaleError(
            f"the process of the emulation ended with exit code {one.process.exitcode}: {said or 'it said nothing'}",
            remedy="exit code -9 means that the machine had no memory left: take a smaller slice or level='fake'",
        ) from None
    if error is not None:
        raise error
    return result
