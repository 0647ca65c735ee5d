"""How far a sweep is, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moeproxy.lab.jobs import Job
from moeproxy.lab.settings import RunSpec


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is.

    Args:
        runs_done: runs that have ended, failed ones included.
        runs_failed: those of them that failed.
        runs: all runs that this sweep makes; runs whose results exist already do not count.
        steps_done: steps made.
        steps: steps of all runs; what a failed run leaves undone is taken off.
        seconds_left: from the measured time of a step, the runs that are left and how many go at a time; None before
            the first step.
        spec: the run that has moved last.
        step: the step it has finished; 0 when it has just begun.
        signals: of that step.
    """

    runs_done: int = 0
    runs_failed: int = 0
    runs: int = 0
    steps_done: int = 0
    steps: int = 0
    seconds_left: float | None = None
    spec: RunSpec | None = None
    step: int = 0
    signals: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the steps that is done, 0 to 1."""
        return self.steps_done / self.steps if self.steps else 1.0

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {_clock(self.seconds_left)} left"
        failed = f" ({self.runs_failed} failed)" if self.runs_failed else ""
        return f"{self.runs_done} of {self.runs} runs{failed}, {self.steps_done} of {self.steps} steps{left}"


Watch = Callable[[SweepProgress], None]


class Tally:
    """Counts the steps of a sweep. Calls must come one at a time.

    Args:
        jobs: runs to make.
        workers: runs at a time.
        clock: seconds, from any origin.
    """

    def __init__(self, jobs: Sequence[Job], workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = {job: job.spec.settings.steps for job in jobs}
        self._seen: dict[Job, tuple[int, float]] = {}  # of the runs in flight: last step, and when
        self._workers, self._clock = max(1, workers), clock
        self._runs, self._done, self._failed = len(self._left), 0, 0
        self._steps_done, self._steps = 0, sum(self._left.values())
        self._timed_steps, self._timed_seconds = 0, 0.0

    def report(self, job: Job, step: int, signals: Mapping[str, float]) -> SweepProgress:
        """Note that a run has finished a step, or begun (step 0), and return how far the sweep is."""
        now = self._clock()
        before, since = self._seen.get(job, (0, now))
        made = max(0, step - before)
        if job in self._seen:
            self._timed_steps += made
            self._timed_seconds += now - since
        self._seen[job] = (step, now)
        self._steps_done += made
        self._left[job] = job.spec.settings.steps - step
        return self._progress(job, step, signals)

    def ended(self, job: Job, failed: bool) -> SweepProgress:
        """Note that a run has ended."""
        rest = self._left.pop(job, 0)
        if failed:
            self._steps -= rest
        else:
            self._steps_done += rest
        self._done += 1
        self._failed += failed
        step, _ = self._seen.pop(job, (0, 0.0))
        return self._progress(job, step, {})

    def _progress(self, job: Job, step: int, signals: Mapping[str, float]) -> SweepProgress:
        counts = (self._done, self._failed, self._runs, self._steps_done, self._steps)
        return SweepProgress(*counts, self._seconds_left(), job.spec, step, signals)

    def _seconds_left(self) -> float | None:
        if not self._left:
            return 0.0
        if not self._timed_steps:
            return None
        pace = self._timed_seconds / self._timed_steps
        # A cluster may carry more runs than it was thought to.
        at_a_time = min(max(self._workers, len(self._seen)), len(self._left))
        # The longest run ends no sooner for the others' being spread.
        return pace * max(sum(self._left.values()) / at_a_time, *self._left.values())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
