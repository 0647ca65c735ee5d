"""A member of a hot swap as a copy of the program's fork server, which has torch and torchft imported already."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeproxy.lab.processes import context, without_main
from moeproxy.lab.worker import settle

_PRELOAD = "moeproxy.recovery.preload"


class CopiedProcess:
    """A running member, with that part of the face of `subprocess.Popen` which a hot swap uses.

    Args:
        module: that the member runs; its function `be` takes folder and name.
        folder: of the job.
        name: of the member.
        log: file that takes what it writes to its standard streams.
        environment: its whole environment.
    """

    def __init__(self, module: str, folder: Path, name: str, log: Path, environment: Mapping[str, str]) -> None:
        made = context(_PRELOAD)
        there, self.stdin = made.Pipe(duplex=False)
        arguments = (module, folder, name, log, dict(environment), there)
        with without_main():
            self._process: Any = made.Process(target=_be, args=arguments, daemon=True)
            self._process.start()
        there.close()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.join()


def _be(
    module: str, folder: Path, name: str, log: Path, environment: Mapping[str, str], connection: Connection
) -> None:
    settle(log, environment, connection)
    importlib.import_module(module).be(folder, name)
