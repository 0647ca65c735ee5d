"""Runs of a sweep as tasks of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeproxy.lab.executors import require
from moeproxy.lab.followed import Followed, arguments
from moeproxy.lab.jobs import Failure, Job, Report, last_words
from moeproxy.lab.processes import usable_cores
from moeproxy.lab.ray_start import local_options, start_ray
from moeproxy.lab.worker import train

_LOOK_EVERY_S = 1.0
_STORE_BYTES = 100 * 2**20  # tasks return nothing, so the object store may be as small as Ray allows


@dataclass(frozen=True)
class RayExecutor:
    """Runs as Ray tasks of one core, each in a worker of its own; a worker that dies is the failure of its run only.

    A Ray that the program has initialised is used and left as it is. Otherwise one is started, or joined where
    RAY_ADDRESS is set, and left at the end.

    Args:
        workers: cores of a Ray that is started here; a cluster decides for itself.
        options: of `ray.init`, when it is called.

    Raises:
        LabError: Ray is not installed, or none can be started or joined.
    """

    workers: int = field(default_factory=usable_cores)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("ray")

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[tuple[Job, Failure | None], None, None]:
        """Make every run and yield each as it ends."""
        import ray

        ours = not ray.is_initialized()
        if ours:
            start_ray(self._options())
        followed, pending = Followed(jobs, report), {}
        try:
            # A worker that is used again would keep the memory, the threads and the patches of an earlier run.
            task = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(train)
            pending = {task.remote(*arguments(job)): job for job in jobs}
            began = time.monotonic()
            while pending:
                ended, _ = ray.wait(list(pending), timeout=_LOOK_EVERY_S)
                followed.look(pending.values())
                for reference in ended:
                    job = pending.pop(reference)
                    followed.ended(job)
                    yield job, _failure(reference, job, time.monotonic() - began)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)
            if ours:
                ray.shutdown()

    def _options(self) -> dict[str, Any]:
        quiet = {"log_to_driver": False, "configure_logging": False}
        if "address" in self.options or "RAY_ADDRESS" in os.environ:
            return quiet | self.options
        return quiet | local_options(self.workers, _STORE_BYTES) | self.options


def _failure(reference: Any, job: Job, seconds: float) -> Failure | None:
    import ray

    try:
        ray.get(reference)
    except Exception as error:  # whatever the run raised, or that its worker died
        return None if job.path.exists() else Failure(job.spec, last_words(str(error)), None, round(seconds, 2))
    return None
