"""Runs of a sweep as job arrays of Slurm, through submitit."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.executors import require
from moeproxy.lab.followed import Followed, arguments
from moeproxy.lab.jobs import Failure, Job, Report, last_words
from moeproxy.lab.worker import train

_FRAME = ("----", "You can check", "  - /")  # lines that submitit puts around what a job said


@dataclass(frozen=True)
class SlurmExecutor:
    """Runs as tasks of job arrays, one core each. The folders of models and results must be shared with the nodes.

    A sweep whose program ends leaves its jobs in the queue no longer: they are cancelled, unless it was killed. Then
    they go on, and the next call finds the results of those that have ended.

    Args:
        workers: tasks of an array that run at a time.
        folder: for submitit's scripts and logs; shared too.
        parameters: of submitit, such as `slurm_partition`, `slurm_account` or `mem_gb`.
        cluster: "slurm", or "local" to try it out: plain processes, all at once.
        array_size: tasks of one array; Slurm's own limit (MaxArraySize) is 1001 unless a site changes it.
        look_every_s: seconds between two looks at the queue and the growing traces.

    Raises:
        LabError: submitit is not installed, or there is no Slurm.
    """

    workers: int = 64
    folder: Path = Path("submitit")
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cluster: str = "slurm"
    array_size: int = 1000
    look_every_s: float = 5.0

    def __post_init__(self) -> None:
        require("submitit")

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[tuple[Job, Failure | None], None, None]:
        """Make every run and yield each as it ends."""
        followed = Followed(jobs, report)
        queued = self._submit(jobs)
        began = time.monotonic()
        try:
            while queued:
                followed.look(queued)
                for job in [job for job, task in queued.items() if task.done()]:
                    followed.ended(job)
                    yield job, _failure(queued.pop(job), job, time.monotonic() - began)
                if queued:
                    time.sleep(self.look_every_s)
        finally:
            for task in queued.values():
                task.cancel(check=False)

    def submitter(self) -> Any:
        """Return submitit's executor with the parameters of the arrays."""
        import submitit

        ours = {"name": "moeproxy", "cpus_per_task": 1, "mem_gb": 4, "timeout_min": 120}
        try:
            executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
            executor.update_parameters(**{**ours, "slurm_array_parallelism": self.workers, **self.parameters})
        except (NameError, AssertionError, ValueError, RuntimeError) as error:
            raise LabError(f"submitit refuses: {error}", remedy="check `parameters` and that Slurm is here") from error
        return executor

    def _submit(self, jobs: Sequence[Job]) -> dict[Job, Any]:
        executor, queued = self.submitter(), {}
        for start in range(0, len(jobs), self.array_size):
            array = jobs[start : start + self.array_size]
            tasks = executor.map_array(train, *zip(*map(arguments, array), strict=True))
            queued |= dict(zip(array, tasks, strict=True))
        return queued


def _failure(task: Any, job: Job, seconds: float) -> Failure | None:
    error = task.exception()
    if error is None or job.path.exists():
        return None
    lines = [line for line in str(error).splitlines() if not line.startswith(_FRAME)]
    state = "" if task.paths.result_pickle.exists() else f"state {task.state}: "
    return Failure(job.spec, state + last_words("\n".join(lines)), None, round(seconds, 2))
