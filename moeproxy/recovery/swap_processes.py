"""The processes of a job with hot swap: forked from a server that has everything imported, and none left behind."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import signal
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeproxy.lab.processes import context, without_main
from moeproxy.lab.worker import settle
from moeproxy.recovery.scratch import scratch

LIGHTHOUSE = "lighthouse"
_PRELOAD = "moeproxy.recovery.preload"
_PATIENCE_S = 10.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",  # else it listens on the machine's own address
}
_COMM = Path("/proc/self/comm")


class Processes:
    """The lighthouse and the members of a job.

    Args:
        folder: of the job.
        module: of its driver; its `serve(folder, name)` is what a process does.
        members: who is started at the beginning.
    """

    def __init__(self, folder: Path, module: str, members: tuple[str, ...]) -> None:
        self._folder, self._module, self._members = folder, module, members
        self._context = context(_PRELOAD)
        self.running: dict[str, Any] = {}
        self._pipes: list[Connection] = []
        self._open = contextlib.ExitStack()
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Processes:
        self._environment = _ENVIRONMENT | {"TMPDIR": str(self._open.enter_context(scratch()))}
        for name in (LIGHTHOUSE, *self._members):
            self.start(name)
        return self

    def start(self, name: str) -> None:
        """Start a process; what it prints goes to a file of its own, and it ends when this one does."""
        ours, theirs = self._context.Pipe()
        arguments = (self._module, self._folder, name, {**os.environ, **self._environment}, theirs)
        process = self._context.Process(target=_be, args=arguments, name=name)
        with without_main(), theirs:
            process.start()
        self._pipes.append(ours)
        self.running[name] = process

    def gone(self) -> set[str]:
        """Return the members whose processes have ended."""
        return {name for name, process in self.running.items() if process.exitcode is not None} - {LIGHTHOUSE}

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _PATIENCE_S
        while (left := marked(self._folder)) and time.monotonic() < deadline:  # helpers that an engine forked off
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        self._open.close()


def marked(folder: Path) -> list[int]:
    """Return the living processes that bear the mark of a job's folder."""
    found, name = [], _mark(folder)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid, _, rest = stat.read_text("utf-8", "replace").partition(" ")
            comm, _, after = rest.rpartition(") ")
            if comm == f"({name}" and after[0] not in "ZX" and int(pid) != os.getpid():
                found.append(int(pid))
    return found


def _mark(folder: Path) -> str:
    return f"swap-{hashlib.blake2b(str(folder).encode(), digest_size=5).hexdigest()}"  # the system keeps 15 letters


def _be(module: str, folder: Path, name: str, environment: dict[str, str], connection: Connection) -> None:
    settle(folder / f"{name}.log", environment, connection)
    with contextlib.suppress(OSError):
        _COMM.write_text(_mark(folder))  # its children inherit it
    tempfile.tempdir = None  # the server's
    _track_alone()
    importlib.import_module(module).serve(folder, name)
    os._exit(0)  # threads of the engines do not end by themselves


def _track_alone() -> None:
    """Have what a killed member leaves in the system (semaphores) removed at once, and noted in its own log.

    Python's tracker is one for all processes of a program: it would do so at the program's end, and warn there.
    """
    own = resource_tracker.ResourceTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
