"""The thread-correct parts: used from many threads at once, as JupyterLab does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comm
import plotly.graph_objects as go
import pytest
from comm.base_comm import BaseComm
from plotly.basedatatypes import Undefined

from moeproxy.errors import ProxyError
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.ui import Debouncer, Job, LiveFigure, Redraw, Report, Status, TimeLeft


def _in_threads(action: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=action, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


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
    _in_threads(debounced, 16)
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


def test_live_figure_survives_changes_from_many_threads() -> None:
    live = LiveFigure(go.Figure(go.Scatter(x=[0], y=[0])))

    def change(index: int) -> None:
        for step in range(20):
            with live.change() as figure:
                figure.data[0].y = [index, step]
                figure.layout.title.text = f"{index} {step}"

    _in_threads(change, 4)
    assert list(live.widget.data[0].y)[1] == 19
    assert live.widget.layout.title.text.endswith(" 19")


def test_no_change_is_lost_while_the_page_zooms() -> None:
    live = LiveFigure(go.Figure(go.Scatter(x=[0, 1], y=[0, 1])))
    told: list[Any] = []
    live.widget._send = lambda message, **_: told.append(message["state"])  # what would go to the page
    taking_in, changed = threading.Event(), threading.Event()
    held = live.widget.hold_trait_notifications

    @contextmanager
    def slowly() -> Iterator[None]:
        with held():
            taking_in.set()
            changed.wait(0.2)  # a thread that did not wait has made its change by then
            yield

    live.widget.hold_trait_notifications = slowly
    zoom = {"_js2py_relayout": {"relayout_data": {"xaxis.range": [0, 1]}, "source_view_id": "page"}}
    page = threading.Thread(target=live.widget.set_state, args=(zoom,))
    page.start()
    assert taking_in.wait(10)
    with live.change() as figure:
        figure.layout.title.text = "new"
    changed.set()
    page.join()
    assert "new" in repr([state["_py2js_update"] for state in told if "_py2js_update" in state])


def test_live_figure_gives_a_reloaded_page_the_newest_state() -> None:
    live = LiveFigure(go.Figure(go.Scatter(y=[0])).update_layout(title="before", width=700))
    with live.change() as figure:
        figure.data[0].y = [5, 6]
        figure.layout.title.text = "after"
    state = live.widget.get_state()
    assert state["_widget_layout"]["title"]["text"] == "after"
    assert state["_widget_layout"]["width"] == 700
    assert list(state["_widget_data"][0]["y"]) == [5, 6]


def test_live_figure_leaves_out_what_the_page_calls_undefined() -> None:
    live = LiveFigure(go.Figure(go.Scatter(y=[0])))
    # This is what a box drawn in the page leaves behind.
    live.widget._layout_obj._props["selections"] = [{"type": "rect", "line": Undefined, "x0": 1.0}, Undefined]
    with live.change() as figure:
        figure.data[0].y = [5, 6]
    state = live.widget.get_state()
    assert json.loads(json.dumps(state["_widget_layout"]))["selections"] == [{"type": "rect", "x0": 1.0}]


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


def test_the_first_message_holds_the_whole_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    class Channel(BaseComm):
        def __init__(self, *, data: Any = None, **options: Any) -> None:
            opened.append(data["state"])
            super().__init__(data=data, **options)

        def publish_msg(self, msg_type: str, data: Any = None, *_: Any, **__: Any) -> None:
            if msg_type == "comm_msg":
                sent.append(data or {})

    monkeypatch.setattr(comm, "create_comm", Channel)
    figure = LiveFigure(go.Figure(go.Scatter(x=[1, 2], y=[3, 4]), layout={"title": {"text": "seen"}}))
    (state,) = [state for state in opened if "_widget_data" in state]
    assert state["_widget_data"][0]["type"] == "scatter"
    assert state["_widget_layout"]["title"]["text"] == "seen"
    assert not [message for message in sent if "_widget_data" in message.get("state", {})]
    with figure.change() as widget:
        widget.data[0].y = [5, 6]
    assert sent  # later changes are messages, as ever
