"""Progress of a sweep, on a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeproxy.lab.jobs import Job
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.sweep_progress import SweepProgress, Tally


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _jobs(*steps: int) -> list[Job]:
    specs = [RunSpec(Path("m"), seed=seed, settings=GRPOSettings(steps=n)) for seed, n in enumerate(steps)]
    return [Job(spec, Path(f"{spec.seed}.parquet")) for spec in specs]


def test_time_left_is_the_rest_at_the_measured_pace() -> None:
    clock, jobs = Clock(), _jobs(10, 10, 10, 10)
    tally = Tally(jobs, 2, clock)
    assert tally.report(jobs[0], 0, {}) == SweepProgress(runs=4, steps=40, spec=jobs[0].spec)
    tally.report(jobs[1], 0, {})
    clock.now = 3.0
    now = tally.report(jobs[0], 1, {"kl": 0.5})
    assert (now.steps_done, now.step, now.signals) == (1, 1, {"kl": 0.5})
    assert now.seconds_left == pytest.approx(39 * 3 / 2)
    clock.now = 5.0
    # Two steps took 3 and 5 seconds: 4 on average.
    assert tally.report(jobs[1], 1, {}).seconds_left == pytest.approx(38 * 4 / 2)


def test_the_longest_run_bounds_the_time_left() -> None:
    clock, jobs = Clock(), _jobs(20, 1, 1)
    tally = Tally(jobs, 3, clock)
    tally.report(jobs[1], 0, {})
    clock.now = 2.0
    tally.report(jobs[1], 1, {})
    assert tally.ended(jobs[1], failed=False).seconds_left == pytest.approx(20 * 2)


def test_a_cluster_that_carries_more_than_thought_is_faster() -> None:
    clock, jobs = Clock(), _jobs(*[10] * 8)
    tally = Tally(jobs, 1, clock)
    for job in jobs[:4]:
        tally.report(job, 0, {})
    clock.now = 2.0
    assert tally.report(jobs[0], 1, {}).seconds_left == pytest.approx(79 * 2 / 4)
    assert tally.ended(jobs[0], failed=True).seconds_left == pytest.approx(70 * 2 / 3)


def test_failed_runs_take_their_steps_away() -> None:
    jobs = _jobs(10, 5)
    tally = Tally(jobs, 1, Clock())
    tally.report(jobs[0], 4, {})
    now = tally.ended(jobs[0], failed=True)
    assert (now.runs_done, now.runs_failed, now.steps_done, now.steps) == (1, 1, 4, 9)
    # An executor that reports no steps still comes to its end.
    now = tally.ended(jobs[1], failed=False)
    assert (now.runs_done, now.steps_done, now.steps, now.seconds_left, now.share) == (2, 9, 9, 0.0, 1.0)


def test_it_reads_like_a_sentence() -> None:
    assert str(SweepProgress(3, 1, 12, 40, 200, 754.0)) == "3 of 12 runs (1 failed), 40 of 200 steps, 12:34 left"
    assert str(SweepProgress(0, 0, 12, 0, 200)) == "0 of 12 runs, 0 of 200 steps"
    assert str(SweepProgress(0, 0, 1, 0, 2, 3725.0)).endswith("1:02:05 left")
    assert SweepProgress(steps_done=50, steps=200).share == 0.25
