"""The executors of a sweep by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.jobs import Executor
from moeproxy.lab.processes import LocalExecutor

NAMES = ("local", "ray", "slurm")


def chosen(executor: str | Executor, workers: int | None) -> Executor:
    """Return the executor of a name, or the one given.

    Args:
        executor: "local", "ray", "slurm", or an object that follows `moeproxy.lab.jobs.Executor`.
        workers: runs at a time; None leaves it to the executor.

    Raises:
        LabError: no such name, no worker, `workers` given beside an object, or a package is missing.
    """
    if workers is not None and workers < 1:
        raise LabError(f"workers is {workers}", expected="at least 1, or None for one a core")
    options: dict[str, Any] = {} if workers is None else {"workers": workers}
    if not isinstance(executor, str):
        if options:
            raise LabError("workers given beside an executor", remedy="give the number to the executor itself")
        return executor
    if executor == "local":
        return LocalExecutor(**options)
    if executor == "ray":
        from moeproxy.lab.executor_ray import RayExecutor

        return RayExecutor(**options)
    if executor == "slurm":
        from moeproxy.lab.executor_slurm import SlurmExecutor

        return SlurmExecutor(**options)
    raise LabError(f"no executor {executor!r}", expected=f"one of {', '.join(NAMES)}, or an object that makes runs")


def require(package: str) -> None:
    """Refuse to go on without a package of the `cluster` extra.

    Raises:
        LabError: it is not installed; the message has the command.
    """
    if find_spec(package) is None:
        raise LabError(f"{package} is not installed", remedy="python -m pip install 'moeproxy[cluster]'")
