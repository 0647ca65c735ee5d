"""Work in a thread of its own: what it returns, what ends it, what is looked at meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from moeproxy.errors import LabError
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.view.apps import live_work
from moeproxy.view.apps.live_work import LiveWork
from moeproxy.view.apps.ui import Job


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_work, "LOOK_S", 0.01)


def test_the_result_comes_back_and_progress_is_reported() -> None:
    told: list[tuple[float, str]] = []
    looked: list[bool] = []

    def work(watch: Watch) -> int:
        for step in (1, 2):
            watch(SweepProgress(runs=1, steps_done=step, steps=4))
            time.sleep(0.1)
        return 7

    live = LiveWork(work)
    assert (
        live.follow(lambda share, text: told.append((share, text)), "Training", look=lambda: looked.append(True)) == 7
    )
    assert (0.25, "Training: 0 of 1 runs, 1 of 4 steps.") in told
    assert told[-1][0] == 0.5
    assert 2 <= len(looked) <= 4, "once a step, and at the end"


def test_a_stop_ends_the_work_at_its_next_step() -> None:
    begun, said = threading.Event(), list[str]()
    steps: list[int] = []

    def work(watch: Watch) -> None:
        for step in range(10_000):
            watch(SweepProgress(steps_done=step, steps=10_000))
            steps.append(step)
            begun.set()
            time.sleep(0.005)

    job = Job(lambda report: LiveWork(work).follow(report, "Training", stopping=lambda: said.append("stopping")), "Go")
    job.start()
    assert begun.wait(10)
    job.cancel()
    assert job.join(10) == "cancelled"
    assert said == ["stopping"]
    n = len(steps)
    time.sleep(0.05)
    assert len(steps) == n < 10_000


def test_what_the_work_raises_is_raised() -> None:
    def work(_: Watch) -> None:
        raise LabError("no proxy")

    with pytest.raises(LabError, match="no proxy"):
        LiveWork(work).follow(lambda *_: None, lambda: "Training")
