"""The thread-correct parts: used from many threads at once, as JupyterLab does."""

from __future__ import annotations

import threading
import time

import pytest

from moeproxy.errors import ProxyError
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Debouncer, Job, Redraw, Report, Status, TimeLeft
from tests.view.apps.threads import in_threads


def test_debouncer_acts_once_with_the_latest() -> None:
    seen: list[int] = []
    debounced = Debouncer(seen.append, wait_s=0.05)
    for value in range(20):
        debounced(value)
    assert debounced.settle()
    assert seen == [19]
    assert (debounced.calls, debounced.runs) == (20, 1)


def test_debouncer_settles_at_once_when_never_called() -> None:
    assert Debouncer(lambda: None).settle()


def test_debouncer_never_overlaps_itself() -> None:
    inside, worst = [0], [0]

    def slow(_: int) -> None:
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        time.sleep(0.03)
        inside[0] -= 1

    debounced = Debouncer(slow, wait_s=0.001)
    for value in range(8):
        debounced(value)
        time.sleep(0.01)
    assert debounced.settle()
    assert debounced.runs > 1, "the calls were spread so that several acted"
    assert worst[0] == 1


def test_debouncer_takes_calls_from_many_threads() -> None:
    seen: list[int] = []
    debounced = Debouncer(seen.append, wait_s=0.1)
    in_threads(debounced, 16)
    assert debounced.settle()
    assert len(seen) == 1
    assert debounced.calls == 16


def test_status_is_announced_and_escaped() -> None:
    status = Status("a <b> & c")
    assert "role='status'" in status.widget.value
    assert "aria-live='polite'" in status.widget.value
    assert "a &lt;b&gt; &amp; c" in status.widget.value


def test_guard_shows_what_would_be_lost() -> None:
    status = Status()

    def broken(_: object) -> None:
        raise ProxyError("5 experts cannot be kept", remedy="choose 4 or 8")

    assert status.guard(broken)(None) is None
    assert status.is_error
    assert status.text == "ProxyError: 5 experts cannot be kept. What to do: choose 4 or 8."
    assert "⚠" in status.widget.value, "an error is not told by colour alone"


def test_job_reports_and_ends() -> None:
    results: list[int] = []

    def work(report: Report) -> int:
        report(0.5, "half")
        return 7

    job = Job(work, "Count", on_done=results.append)
    assert job.state == "idle"
    assert job.start()
    assert job.join(10) == "done"
    assert (job.result, results, job.bar.value, job.bar.description) == (7, [7], 1.0, "100 %")
    assert not job.start_button.disabled
    assert job.cancel_button.disabled


def test_job_cannot_be_started_twice_and_can_be_cancelled() -> None:
    started, cleaned = threading.Event(), threading.Event()

    def work(report: Report) -> None:
        try:
            for step in range(10_000):
                started.set()
                report(step / 10_000, f"step {step}")
                time.sleep(0.002)
        except Exception:
            pytest.fail("cancelling is no failure that the work may swallow")
        finally:
            cleaned.set()

    job = Job(work, "Count")
    job.start_button.click()
    assert started.wait(10)
    assert not job.start()
    assert job.start_button.disabled
    job.cancel_button.click()
    assert job.join(10) == "cancelled"
    assert cleaned.is_set()
    assert "cancelled" in job.status.text
    assert job.start()
    job.cancel()
    assert job.join(10) == "cancelled"


def test_a_click_waits_for_what_the_controls_were_told_just_before() -> None:
    told, seen = ["old"], list[str]()
    job = Job(lambda _: seen.append(told[0]), "Run")
    job.start_button.click()
    told[0] = "new"
    assert job.join(10) == "done"
    assert seen == ["new"]
    job.start_button.click()
    job.cancel_button.click()
    assert job.join(10) == "cancelled"
    assert seen == ["new"]


def test_job_says_what_became_of_cancelled_work() -> None:
    asked = threading.Event()

    def work(report: Report) -> None:
        assert asked.wait(10)
        report(0.5)

    job = Job(work, "Run", cancelled="stopped, half is kept.")
    job.start()
    job.cancel()
    asked.set()
    assert job.join(10) == "cancelled"
    assert job.status.text == "Run: stopped, half is kept."


@pytest.mark.parametrize("where", ["work", "on_done"])
def test_job_shows_a_failure_and_can_be_retried(where: str) -> None:
    def fail(_: object) -> None:
        raise ProxyError("the disk is full")

    job = Job(fail, "Build") if where == "work" else Job(lambda _: None, "Build", on_done=fail)
    job.start()
    assert job.join(10) == "failed"
    assert job.status.text == "ProxyError: the disk is full"
    assert job.status.is_error
    assert not job.start_button.disabled


def test_job_reports_at_most_ten_times_a_second() -> None:
    drawn: list[float] = []

    def work(report: Report) -> None:
        for step in range(2_000):
            report(step / 2_000, "")

    job = Job(work, "Count")
    job.bar.observe(lambda change: drawn.append(change["new"]), "value")
    job.start()
    job.join(10)
    assert len(drawn) < 20


def test_time_left_is_said_between_start_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("moeproxy.view.apps.ui.time.monotonic", lambda: now_s[0])
    left = TimeLeft("MB", 1e-6)
    assert left(0, 8_000_000) == "0.0 of 8.0 MB"
    now_s[0] += 6.0
    assert left(2_000_000, 8_000_000) == "2.0 of 8.0 MB, 18 s left"
    assert left(100_000, 8_000_000) == "0.1 of 8.0 MB, 8 min left"
    assert left(8_000_000, 8_000_000) == "8.0 of 8.0 MB"
    assert TimeLeft("resamples")(3, 20).startswith("3 of 20 resamples, ")


def test_slider_has_a_name_and_stays_inside() -> None:
    slider = NamedSlider([4, 8, 16], 8, "Experts kept")
    assert (slider.value, slider.index, slider.label) == (8, 1, "Experts kept")
    slider.index = 99  # as a faulty front end might send
    assert slider.value == 16
    slider.value = 4
    assert slider.index == 0


def test_redraw_forgets_only_errors_that_a_change_made_old() -> None:
    status, failing = Status(), [True]

    def draw() -> None:
        if failing[0]:
            raise ProxyError("no weight at all")

    redraw = Redraw(draw, status)
    redraw()
    status.say("refused", error=True)  # while the change before waits to be drawn
    failing[0] = False
    assert redraw.settle()
    assert status.text == "refused"
    redraw()
    assert not status.is_error
    failing[0] = True
    assert redraw.settle()
    assert status.text == "ProxyError: no weight at all"
    failing[0] = False
    redraw._act()  # as when that drawing had been under way while the line was cleared
    assert (status.text, status.is_error) == ("Ready.", False)
