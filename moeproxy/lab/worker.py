"""What happens in the process of one run, whoever started it. Imports torch only when a run begins."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeproxy.lab.jobs import Job, failure_path
from moeproxy.lab.settings import RunSpec

Report = Callable[[int, dict[str, float]], None]


def set_environment(threads: int) -> None:
    """Set what torch and the tokenizers read when they are imported."""
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        # Otherwise the mere question whether there is a GPU makes it unusable in forked processes.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )


def train(stored: Mapping[str, Any], path: Path, report: Report | None = None) -> None:
    """Make one run in this process and write its trace; until then its steps lie in the growing trace.

    Args:
        stored: `RunSpec.to_dict()`.
        path: where the trace goes.
        report: called with (step, signals), step 0 before the first.
    """
    spec = RunSpec.from_dict(stored)
    set_environment(spec.settings.threads)
    from moeproxy.lab.run import run  # here: torch reads the environment when it is imported

    job = Job(spec, path)
    said = report or (lambda *_: None)
    said(0, {})
    run(spec, progress=lambda step, _steps, signals: said(step, signals), partial=job.partial).save(path)
    for left in (job.partial, failure_path(path)):
        left.unlink(missing_ok=True)


def child(
    stored: Mapping[str, Any], path: Path, log: Path, environment: Mapping[str, str], connection: Connection
) -> None:
    """Be the process of one run of a local sweep.

    Args:
        stored: `RunSpec.to_dict()`.
        path: where the trace goes.
        log: file that takes all this process writes to its standard streams.
        environment: of the parent; a fork server still has the one it was started with.
        connection: takes (step, signals) after every step; its other end closes when the parent ends.
    """
    settle(log, environment, connection)
    train(stored, path, lambda *step: connection.send(step))


def settle(log: Path, environment: Mapping[str, str], connection: Connection) -> None:
    """Make this process a child that writes to `log`, has its parent's environment and ends with its parent."""
    _write_to(log)
    # Terminals and notebooks interrupt the whole process group; whether a run ends is the sweep's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()


def _write_to(log: Path) -> None:
    with open(log, "ab") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def _end_with_parent(connection: Connection) -> None:
    """Wait for the parent's end of the pipe to close, as it does however the parent ends, and end this process."""
    try:
        connection.recv()  # the parent never sends
    except (EOFError, OSError):
        os._exit(1)
