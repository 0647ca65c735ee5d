"""The time that new runs may take: what fits into it, what it was spent on, and the end of what overruns it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moeproxy.errors import LabError
from moeproxy.lab.sweep_progress import SweepProgress, Watch


class OutOfTime(Exception):
    """The budget was spent while runs were in flight; they have been ended, what they finished is kept."""


class Budget:
    """Minutes for rounds of runs.

    No round begins that would be longer than what is left, going by the longest so far. One that is over time all the
    same is ended at its next step: the budget is overrun by a step of the runs in flight or, where a run has just been
    started, by what its process needs to load the model.

    Args:
        minutes: positive and finite; None has no end.

    Raises:
        LabError: the minutes are no such number.
    """

    def __init__(self, minutes: float | None) -> None:
        check_minutes(minutes)
        self.minutes = math.inf if minutes is None else minutes
        self._began, self._longest = time.monotonic(), 0.0

    @property
    def spent(self) -> float:
        """Minutes since the budget was made."""
        return (time.monotonic() - self._began) / 60

    def fits(self) -> bool:
        """Whether another round is expected to end in time."""
        return self.spent + self._longest < self.minutes

    @contextmanager
    def round(self) -> Iterator[None]:
        """Time a round of runs."""
        begun = self.spent
        yield
        self._longest = max(self._longest, self.spent - begun)

    def watch(self, inner: Watch | None = None) -> Watch:
        """Return a watch for a sweep that tells `inner`, and raises OutOfTime when runs are left and no time is."""

        def watch(now: SweepProgress) -> None:
            if inner is not None:
                inner(now)
            if now.runs_done < now.runs and self.spent >= self.minutes:
                raise OutOfTime

        return watch


def check_minutes(minutes: float | None) -> None:
    """Check a number of minutes.

    Raises:
        LabError: it is not positive, or not finite.
    """
    if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
        raise LabError(f"a budget of {minutes:g} minutes", expected="a positive, finite number of minutes")
