"""The budget of new runs: what is no budget, what fits into one, and what ends a round that overruns it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moeproxy.errors import LabError
from moeproxy.lab import budget as module
from moeproxy.lab.budget import Budget, OutOfTime, check_minutes
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep_progress import SweepProgress
from moeproxy.triage.reproduce import Live


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the budget reads, to be set."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_time_is_refused_everywhere(minutes: float) -> None:
    with pytest.raises(LabError, match="Expected: a positive, finite number of minutes"):
        check_minutes(minutes)
    with pytest.raises(LabError, match="budget of"):
        Budget(minutes)
    with pytest.raises(LabError, match="budget of"):
        Live(RunSpec(Path("m")), Path("out"), minutes)


def test_a_round_fits_when_one_as_long_as_the_longest_would_end_in_time(clock: list[float]) -> None:
    budget = Budget(5.0)
    assert budget.fits()
    for seconds in (120, 30):
        with budget.round():
            clock[0] += seconds
    assert budget.spent == pytest.approx(2.5)
    assert budget.fits(), "2.5 spent, 2 at the longest, of 5"
    clock[0] += 30
    assert not budget.fits(), "3 spent and 2 more are all of it"


def test_a_budget_without_end_ends_nothing(clock: list[float]) -> None:
    budget = Budget(None)
    clock[0] += 1e9
    budget.watch()(SweepProgress(runs=2, runs_done=1))
    assert budget.fits()


def test_a_round_over_time_is_ended_unless_all_of_it_is_done(clock: list[float]) -> None:
    seen: list[SweepProgress] = []
    budget = Budget(1.0)
    watch = budget.watch(seen.append)
    watch(SweepProgress(runs=2, runs_done=1))
    clock[0] += 60
    watch(SweepProgress(runs=2, runs_done=2))
    with pytest.raises(OutOfTime):
        watch(SweepProgress(runs=2, runs_done=1))
    assert len(seen) == 3, "who watches is told first"
