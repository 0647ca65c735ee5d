"""A live figure: changed from many threads, told to pages that are there and to those that come."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comm
import plotly.graph_objects as go
import pytest
from comm.base_comm import BaseComm
from plotly.basedatatypes import Undefined

from moeproxy.view.apps.live_figure import LiveFigure
from tests.view.apps.threads import in_threads


def test_live_figure_survives_changes_from_many_threads() -> None:
    live = LiveFigure(go.Figure(go.Scatter(x=[0], y=[0])))

    def change(index: int) -> None:
        for step in range(20):
            with live.change() as figure:
                figure.data[0].y = [index, step]
                figure.layout.title.text = f"{index} {step}"

    in_threads(change, 4)
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
