"""The figure of a job in roles shows every outage where it was, and says so in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeproxy.recovery import events as ev
from moeproxy.recovery.child import pids
from moeproxy.recovery.effective import ettr
from moeproxy.recovery.events import Event
from moeproxy.recovery.plan import RolePlan
from moeproxy.view.apps.recovery import RecoveryPanel, board, gauge
from moeproxy.view.apps.recovery_calculator import Calculator
from moeproxy.view.figures_recovery import job_figure, outage_table
from moeproxy.view.style import data_table, describe


def _events() -> list[Event]:
    """Four steps of 2 s; the trainer dies in the third, and a standby takes over after 3 s."""

    def event(t: float, member: str, name: str, step: int | None = None, **info: object) -> Event:
        return Event(100.0 + t, member.partition("-")[0], member, name, step, dict(info))

    return [
        event(0, "job", ev.JOB_START, trainers=1, rollouts=1),
        event(0, "trainer", ev.START, pid=11),
        event(0, "rollout-0", ev.START, pid=12),
        event(0, "standby-1", ev.START, pid=13),
        event(1, "trainer", ev.STEP_BEGIN, 1),
        event(3, "trainer", ev.STEP_COMMIT, 1, policy_loss=0.5),
        event(3, "trainer", ev.STEP_BEGIN, 2),
        event(5, "trainer", ev.STEP_COMMIT, 2, policy_loss=0.4),
        event(5, "trainer", ev.STEP_BEGIN, 3),
        event(5, "trainer", ev.PHASE, 3, phase="update"),
        event(6, "trainer", ev.FAULT, 3, kind="kill"),
        event(7, "trainer", ev.DETECT, 3, kind="died"),
        event(8, "trainer", ev.READY, 3),
        event(8.5, "trainer", ev.CONNECTED, 2, pid=13),
        event(9, "trainer", ev.STEP_BEGIN, 3),
        event(11, "trainer", ev.STEP_COMMIT, 3, policy_loss=0.3),
        event(11, "job", ev.JOB_END, outcome="finished"),
    ]


def _cells(table: str) -> list[list[str]]:
    body = table.partition("<tbody>")[2]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_figure_has_the_signal_the_outage_and_words() -> None:
    figure = job_figure(_events())
    signal, up, detect, restart, reconnect = figure.data
    assert list(signal.y) == [0.5, 0.4, 0.3]
    assert list(signal.x) == [2.0, 4.0, 10.0]
    assert list(up.y) == ["trainer", "rollout-0"]
    for bar, begin, length in ((detect, 5.0, 1.0), (restart, 6.0, 1.0), (reconnect, 7.0, 1.0)):
        assert (list(bar.y), list(bar.base), list(bar.x)) == (["trainer"], [begin], [length])
    assert "1 outage of 2 members, the longest of trainer with 3.0 seconds" in describe(figure)
    assert data_table(figure).to_dict("records")[0]["restart (s)"] == 1.0
    assert "0 outages" in describe(job_figure([]))
    assert outage_table([]).empty


def test_the_board_knows_who_is_up_and_a_standby_becomes_the_trainer() -> None:
    events = _events()
    assert pids(events[:10]) == {"trainer": 11, "rollout-0": 12, "standby-1": 13}
    assert pids(events[:12]) == {"rollout-0": 12, "standby-1": 13}
    assert pids(events) == {"trainer": 13, "rollout-0": 12}
    assert _cells(board(events[:3], RolePlan(rollouts=1))) == [
        ["trainer", "◐ starting", "", "11", "0"],
        ["rollout-0", "◐ starting", "", "12", "0"],
        ["manager", "○ not there", "", "", "0"],
    ]
    shown = _cells(board(events[:10], RolePlan(rollouts=1)))
    assert shown[0] == ["trainer", "● up", "update, step 3", "11", "0"]
    assert shown[3] == ["standby-1", "◐ starting", "", "13", "0"]
    waiting = Event(101.0, "standby", "standby-1", ev.READY)
    assert _cells(board([*events[:4], waiting], RolePlan(rollouts=1)))[3][1:3] == ["● up", "waits, loaded"]
    assert _cells(board(events[:11], RolePlan(rollouts=1)))[0][1:3] == ["✕ failed", ""]
    assert _cells(board(events[:12], RolePlan(rollouts=1)))[0][1] == "✕ away"
    assert _cells(board(events[:-1], RolePlan(rollouts=1)))[0][3:] == ["13", "1"]
    assert _cells(board(events, RolePlan(rollouts=1)))[0] == ["trainer", "○ ended", "", "", "1"]


def test_the_gauge_compares_with_a_restart_of_everything() -> None:
    found = ettr(_events())
    words = gauge(found)
    assert f"{found.ratio:.1%}" in words
    assert "expected of restarts of everything" in words
    assert found.ratio == pytest.approx((6 + 1.5) / 10)


def test_the_calculator_follows_its_sliders_and_takes_measured_costs() -> None:
    panel = Calculator()
    before = panel.results["role"].ratio
    panel.faults.value = 0.91
    assert panel.results["role"].ratio < before
    assert "restart the failed role" in panel.table.value
    assert "never done" in panel.table.value  # not forty digits of seconds
    assert not panel.status.is_error
    panel.measured(replace(panel.cluster, step=0.1234, detect=1e9, trainers=7))
    assert (panel.cluster.step, panel.cluster.detect, panel.cluster.trainers) == (0.123, 3600, 16)  # counts stay
    panel.measured(replace(panel.cluster, step=300.0))
    assert panel.cluster.step == 300.0


def test_the_panel_draws_what_happens(tmp_path: Path) -> None:
    events = _events()
    panel = RecoveryPanel(tmp_path, steps=3, plan=RolePlan(rollouts=1))
    panel.job = SimpleNamespace(events=lambda: events, running=False, said="")
    panel._draw(events)
    assert list(panel.figure.widget.data[0].y) == [0.5, 0.4, 0.3]
    assert list(panel.figure.widget.data[3].x) == [1.0]
    assert "Step 3 of 3" in panel.status.text
    assert [name for name, button in panel.kill.items() if not button.disabled] == ["trainer", "rollout-0"]
    assert "75.0%" in panel.gauge.value
    assert panel.calculator.cluster.detect == pytest.approx(1.0, rel=0.03)
    assert panel.effective is not None
    assert panel.effective.outages[0].kind == "died"


def test_without_a_job_the_panel_says_what_to_do(tmp_path: Path) -> None:
    panel = RecoveryPanel(tmp_path)
    panel.kill["trainer"].click()
    assert panel.status.is_error
    assert "press Start first" in panel.status.text
    assert panel.effective is None
    assert panel.join(0.1)
    panel.end()
