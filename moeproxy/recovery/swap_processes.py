"""The processes of a job with hot swap: forked from a server that has everything imported, and none left behind."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import signal
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeproxy.lab.processes import context, without_main
from moeproxy.lab.worker import settle
from moeproxy.recovery.scratch import scratch

LIGHTHOUSE = "lighthouse"
ADDRESS = "lighthouse.address"
"""File that says where it is."""

_SHARDS = "MOEPROXY_SHARDS"
_PRELOAD = "moeproxy.recovery.preload"
_PATIENCE_S = 10.0
_BEAT_S = 1.0
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
        shards: number of files in memory that outlive who writes to them, but not this process and the members.
    """

    def __init__(self, folder: Path, module: str, members: tuple[str, ...], shards: int = 0) -> None:
        self._folder, self._module, self._members, self._shards = folder, module, members, shards
        self._files: list[int] = []
        self._context = context(_PRELOAD)
        self._running: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}
        self._heard: dict[str, float] = {}
        self._open = contextlib.ExitStack()
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Processes:
        self._environment = _ENVIRONMENT | {"TMPDIR": str(self._open.enter_context(scratch()))}
        try:
            self.start_all()
        except BaseException:  # Ctrl-C above all
            self.__exit__()
            raise
        return self

    def start_all(self) -> None:
        """Start the lighthouse and the first members."""
        if hasattr(os, "memfd_create"):  # elsewhere copies end with their process
            self._files = [os.memfd_create(f"shard-{number}") for number in range(self._shards)]
        self._environment[_SHARDS] = os.pathsep.join(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)
        for name in (LIGHTHOUSE, *self._members):
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process; what it prints goes to a file of its own, and it ends when this one does."""
        ours, theirs = self._context.Pipe()
        arguments = (self._module, self._folder, name, {**os.environ, **self._environment}, theirs)
        process = self._context.Process(target=_be, args=arguments, name=name)
        with without_main(), theirs:
            process.start()
        self._pipes[name], self._running[name], self._heard[name] = ours, process, time.monotonic()

    @property
    def members(self) -> set[str]:
        """All that were started, dead ones too."""
        return self._running.keys() - {LIGHTHOUSE}

    def gone(self) -> set[str]:
        """Return the members whose processes have ended."""
        return {name for name in self.members if self.ended(name)}

    def ended(self, name: str) -> bool:
        """Whether a process has ended."""
        return self._running[name].exitcode is not None

    def frozen(self, patience: float) -> list[str]:
        """Return the processes that live, and have given no sign of it for so many seconds."""
        now = time.monotonic()
        for name, pipe in self._pipes.items():
            with contextlib.suppress(EOFError, OSError):  # it has ended
                while pipe.poll():
                    pipe.recv()
                    self._heard[name] = now
        return [name for name, heard in self._heard.items() if now - heard > patience and not self.ended(name)]

    def end(self, name: str) -> None:
        """Kill a process."""
        self._running[name].kill()
        self._running[name].join()

    def stop(self) -> None:
        """Kill all of them, and what engines forked off from them."""
        for name in self._running:
            self.end(name)
        for pipe in self._pipes.values():
            pipe.close()
        for file in self._files:
            os.close(file)
        for kept in (self._running, self._pipes, self._heard, self._files):
            kept.clear()
        deadline = time.monotonic() + _PATIENCE_S
        while (left := marked(self._folder)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        (self._folder / ADDRESS).unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.stop()
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


def outliving() -> list[str]:
    """Return in a member the job's files in memory, one for each rank; none where they end with their process."""
    return [place for place in os.environ.get(_SHARDS, "").split(os.pathsep) if place]


def _mark(folder: Path) -> str:
    return f"swap-{hashlib.blake2b(str(folder).encode(), digest_size=5).hexdigest()}"  # the system keeps 15 letters


def _be(module: str, folder: Path, name: str, environment: dict[str, str], connection: Connection) -> None:
    settle(folder / f"{name}.log", environment, connection)
    with contextlib.suppress(OSError):
        _COMM.write_text(_mark(folder))  # its children inherit it
    threading.Thread(target=_beat, args=(connection,), daemon=True).start()
    tempfile.tempdir = None  # the server's
    _track_alone()
    importlib.import_module(module).serve(folder, name)
    os._exit(0)  # threads of the engines do not end by themselves


def _beat(connection: Connection) -> None:
    """Give a sign of life again and again: a process that is frozen gives none."""
    with contextlib.suppress(OSError):
        while True:
            connection.send(None)
            time.sleep(_BEAT_S)


def _track_alone() -> None:
    """Have what a killed member leaves in the system (semaphores) removed at once, and noted in its own log.

    Python's tracker is one for all processes of a program: it would do so at the program's end, and warn there.
    """
    own = resource_tracker.ResourceTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
