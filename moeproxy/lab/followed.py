"""Runs that go elsewhere: their steps are read from the growing traces, which a shared folder shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moeproxy.lab.jobs import Job, Report
from moeproxy.traces.partial import Follower
from moeproxy.traces.trace import Trace


def arguments(job: Job) -> tuple[dict[str, Any], Path]:
    """Return what `moeproxy.lab.worker.train` takes, with paths that hold in any working directory."""
    stored = {**job.spec.to_dict(), "model": str(job.spec.model.resolve())}
    if kept := job.spec.snapshots:
        stored["snapshots"] = {"folder": str(kept.folder.resolve()), "steps": list(kept.steps)}
    return stored, job.path.resolve()


class Followed:
    """Reports the steps of runs whose processes cannot be asked.

    Args:
        jobs: the runs. What earlier attempts left of their growing traces is removed.
        report: see `moeproxy.lab.jobs.Report`.
    """

    def __init__(self, jobs: Sequence[Job], report: Report) -> None:
        self._report = report
        self._followers = {job: Follower(job.partial) for job in jobs}
        self._last = dict.fromkeys(jobs, 0)
        for job in jobs:
            job.partial.unlink(missing_ok=True)

    def look(self, jobs: Iterable[Job]) -> None:
        """Report what these runs have done since the last look."""
        for job in jobs:
            for step, signals in self._followers[job].new():
                self._tell(job, step, signals)

    def ended(self, job: Job) -> None:
        """Report the steps that were never seen, since the growing trace goes when the run has ended."""
        if job.path.exists():
            steps = Trace.load(job.path).steps
            for step, row in zip(steps.index.tolist(), steps.to_dict("records"), strict=True):
                if step > self._last[job]:
                    self._tell(job, step, {str(name): float(value) for name, value in row.items()})
        else:
            self.look([job])

    def _tell(self, job: Job, step: int, signals: dict[str, float]) -> None:
        self._last[job] = step
        self._report(job, step, signals)
