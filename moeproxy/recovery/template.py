"""A process that has imported everything, of which the members of a job on this machine are copies.

A member needs seven seconds of CPU time for imports and half a second for the rest. The template imports once, and
forks: Ray starts a worker with `fork_client.py`, which hands over arguments, environment and streams. Where the
template is gone, that program becomes an ordinary worker.

It also is the job's last guard: when the program that started it ends, however it ends, all copies are killed, what
Ray leaves behind then, and the job's temporary files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeproxy.lab.ray_start import NO_CLUSTER
from moeproxy.recovery import fork_client
from moeproxy.recovery.scratch import remove_ownerless, scratch

PRELOADED = (
    "ray._private.workers.default_worker",
    "moeproxy.lab.run",
    "moeproxy.lab.snapshot",
    "moeproxy.recovery.crew",
    "moeproxy.recovery.digests",
    "moeproxy.recovery.packing",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""What members import. What is missing or broken here says so in the member that needs it."""

CLIENT = Path(fork_client.__file__)
_READ_ON_IMPORT = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_AUTH_MODE")
_LOOK_S = 1.0
_CLEANING_S = 15.0  # Ray writes until it has noticed, which takes longer than 5 s on a busy machine
_TEMPORARY = "TMPDIR"
_ORDERLY = b"."  # tells the template that its owner lives, and removes the temporary files itself


class Template:
    """A place to ask for copies, and the template that makes them once it is started; requests wait for it.

    Args:
        modules: that it imports.

    Example:
        >>> with Template() as template:
        ...     template.start()
        ...     subprocess.run([sys.executable, CLIENT, "program.py"], env=os.environ | template.variables)
    """

    folder: Path
    """For temporary files; it ends with the template."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self._open = contextlib.ExitStack()
        self.folder = self._open.enter_context(scratch())
        self._modules, self._place = modules, self.folder / "template"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._place))
        self._listening.listen(64)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the template.

        Args:
            environment: variables that it has besides those of this process.
        """
        number = self._listening.fileno()
        command = [sys.executable, "-m", "moeproxy.recovery.template", str(number), *self._modules]
        whole = _environment() | dict(environment or {}) | {_TEMPORARY: str(self.folder)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], env=whole)
        self._listening.close()  # so that nobody waits for a template that is gone

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of a program must have to be started as a copy, with the job's temporary files."""
        return {fork_client.VARIABLE: f"{self._place}:{os.getpid()}", _TEMPORARY: str(self.folder)}

    @property
    def pid(self) -> int:
        """Its process number; 0 before it was started."""
        return self._process.pid if self._process else 0

    def close(self) -> None:
        """End it and all its copies."""
        self._listening.close()
        if self._process:
            if self._process.stdin:
                with contextlib.suppress(OSError, ValueError):  # it is gone, or the pipe is closed already
                    self._process.stdin.write(_ORDERLY)
                    self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:  # still at its imports
                self._process.kill()
                self._process.wait()
        self._open.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **quiet, NO_CLUSTER: "0"}


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _serve(listening: socket.socket) -> dict[str, Any]:
    """Fork a copy for each request; return only in a copy, with its request. Ends when the standard input closes."""
    copies: set[int] = set()
    wards: dict[int, str] = {}
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [], _LOOK_S)
        copies -= _ended()
        if sys.stdin in ready:
            killed = os.read(sys.stdin.fileno(), len(_ORDERLY)) != _ORDERLY
            for pid in copies | {ward for ward, born in wards.items() if _born(ward) == born}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if killed:
                remove_ownerless(Path(listening.getsockname()).parent, _CLEANING_S)
            os._exit(0)
        if listening in ready:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                request, streams = _received(connection)
                if (pid := os.fork()) == 0:
                    listening.close()
                    connection.close()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return request
                copies.add(pid)
                for stream in streams:
                    os.close(stream)
                connection.sendall(str(pid).encode())
                wards = _children(os.environ.get("RAY_RAYLET_PID", ""))


def _ended() -> set[int]:
    """Take note of copies that have ended, so that none stays as a zombie, and return their numbers."""
    found = set()
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            found.add(pid)
    return found


def _children(parent: str) -> dict[int, str]:
    """Return the children of a process, each with the time of its start.

    Ray's agents are such: when the process that started Ray is killed they wait for ever for a pipe to close.
    """
    found = {}
    for place in Path("/proc").glob("[0-9]*/stat") if parent else ():
        with contextlib.suppress(OSError):
            fields = place.read_text().rpartition(")")[2].split()
            if fields[1] == parent:
                found[int(place.parent.name)] = fields[19]
    return found


def _born(pid: int) -> str:
    """Return when a process was started, in the kernel's units; "" when it is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read())
    if len(streams) != 3:
        raise ValueError(f"{len(streams)} streams")
    return request, streams


def _become(request: dict[str, Any]) -> None:
    """Be the program of a request: with its signals, its environment, its folder, its arguments."""
    os.setpgid(0, 0)  # as a worker that Ray starts itself: an interrupt on a terminal is not for it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    fixed = [name for name in _READ_ON_IMPORT if os.environ.get(name) != request["environment"].get(name)]
    os.environ.clear()
    os.environ.update(request["environment"])
    if fixed and "ray" in sys.modules:  # it would be a worker of another Ray
        os.execv(sys.executable, [sys.executable, *request["arguments"]])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Import the modules named, and serve on the socket of the number given, until the standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the program that started it
    _preload(sys.argv[2:])
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
