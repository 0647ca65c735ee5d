"""Who is failed when: rules of detection alone, on a clock of their own."""

from __future__ import annotations

import pytest

from moeproxy.recovery.detection import ASK, FAILED, FINE, PATIENCE, Monitor, Progress
from moeproxy.recovery.plan import RolePlan


def test_a_waiting_trainer_is_idle_by_right_and_a_stuck_one_is_not() -> None:
    monitor = Monitor(RolePlan(trainer_hang=10))
    assert monitor.judge("trainer", "trainer", 0.0) == FINE  # it begins
    for now in range(1, 1000):
        monitor.answered("trainer", Progress("wait", 0, 1), now)
        monitor.answered("manager", Progress("serve", 0, 0), now)
        assert monitor.judge("trainer", "trainer", now) == FINE
    monitor.answered("trainer", Progress("update", 1, 1), 1000.0)
    for now in (1001.0, 1009.0):
        monitor.answered("trainer", Progress("update", 1, 1), now)  # its process answers; its work stands still
        assert monitor.judge("trainer", "trainer", now) == FINE
    assert monitor.judge("trainer", "trainer", 1010.5) == FAILED
    monitor.forget("trainer")
    assert monitor.judge("trainer", "trainer", 1011.0) == FINE


@pytest.mark.parametrize(
    ("role", "phase", "limit"),
    [("trainer", "wait", 40.0), ("trainer", "recover", 40.0), ("rollout", "idle", 20.0), ("manager", "serve", 20.0)],
)
def test_who_is_idle_by_right_still_has_to_answer(role: str, phase: str, limit: float) -> None:
    monitor = Monitor(RolePlan(trainer_hang=40, rollout_hang=20, answer=5))
    for now in range(100):  # less than a recovery may take
        monitor.answered("m", Progress(phase, 0, 1), now)
        assert monitor.judge("m", role, now) == FINE
    assert monitor.judge("m", role, 99 + limit) == FINE
    assert monitor.judge("m", role, 99 + limit + 0.1) == FAILED
    monitor.forget("m")
    for now, verdict in ((200.0, FINE), (200 + limit, FINE), (200 + limit + 0.1, FAILED)):
        assert monitor.judge("m", role, now) == verdict  # one that is frozen before it ever answers


@pytest.mark.parametrize("ready", [1, 2])
def test_a_trainer_that_does_not_take_what_is_there_is_not_idle_by_right(ready: int) -> None:
    monitor = Monitor(RolePlan(trainer_hang=10))
    for now in range(0, 100):
        monitor.answered("trainer", Progress("wait", 5, 2), now)
        monitor.answered("manager", Progress("serve", 0, ready if now >= 50 else 1), now)
        assert monitor.judge("trainer", "trainer", now) == (FAILED if ready == 2 and now > 60 else FINE)
    monitor.answered("trainer", Progress("update", 6, 2), 100.0)  # it has taken it
    assert monitor.judge("trainer", "trainer", 109.0) == FINE


def test_a_trainer_that_recovers_has_long_but_not_for_ever() -> None:
    monitor = Monitor(RolePlan(trainer_hang=10))
    for now in range(0, 60):
        monitor.answered("trainer", Progress("recover", 0, 0), now)
        assert monitor.judge("trainer", "trainer", now) == (FAILED if now > PATIENCE * 10 else FINE)
    monitor.answered("trainer", Progress("wait", 1, 4), 60.0)  # it came through after all
    assert monitor.judge("trainer", "trainer", 65.0) == FINE


def test_a_trainer_is_not_blamed_for_a_manager_that_hangs() -> None:
    monitor = Monitor(RolePlan(trainer_hang=10, rollout_hang=10))
    for now in range(0, 15):
        monitor.answered("trainer", Progress("wait", 5, 2), now)
        if now < 2:
            monitor.answered("manager", Progress("serve", 0, 2), now)
        assert monitor.judge("trainer", "trainer", now) == FINE
        assert monitor.judge("manager", "manager", now) == (FINE if now <= 11 else FAILED)


def test_a_rollout_is_judged_by_throughput_then_by_a_heartbeat() -> None:
    monitor = Monitor(RolePlan(rollout_hang=60, answer=5))
    monitor.answered("r", Progress("generate", 3, 1), 0.0)
    assert monitor.judge("r", "rollout", 59.0) == FINE
    assert monitor.judge("r", "rollout", 61.0) == ASK
    assert monitor.judge("r", "rollout", 65.0) == FINE
    assert monitor.judge("r", "rollout", 66.5) == FAILED


def test_a_slow_rollout_that_answers_is_no_failed_one_but_patience_ends() -> None:
    monitor = Monitor(RolePlan(rollout_hang=60, answer=5))
    monitor.answered("r", Progress("generate", 3, 1), 0.0)
    assert monitor.judge("r", "rollout", 61.0) == ASK
    monitor.answered("r", Progress("generate", 3, 1), 62.0)
    assert monitor.judge("r", "rollout", 100.0) == FINE
    assert monitor.judge("r", "rollout", PATIENCE * 60 + 1) == FAILED
    for now in range(400, 800):
        monitor.answered("r", Progress("idle", 3, 1), now)  # no work: nothing to judge
        assert monitor.judge("r", "rollout", now) == FINE


def test_how_long_a_failed_member_was_silent_goes_by_what_it_should_have_done() -> None:
    monitor = Monitor(RolePlan(trainer_hang=10, answer=5))
    for now in range(0, 31):  # it answers to the end: its work has stood still since 4
        monitor.answered("trainer", Progress("update", min(now, 4), 2), now)
        monitor.answered("frozen", Progress("update", 4, 2), min(now, 22))
        monitor.answered("rollout-0", Progress("generate", 4, 2), now)
    assert [monitor.silent(name, 30.0) for name in ("trainer", "frozen", "rollout-0")] == [26.0, 8.0, 30.0]
    for now in range(31, 60):  # it waits since 31, and since 45 for what is there
        monitor.answered("trainer", Progress("wait", 5, 3), now)
        monitor.answered("manager", Progress("serve", 0, 3 if now >= 45 else 2), now)
    assert monitor.judge("trainer", "trainer", 59.0) == FAILED
    assert monitor.silent("trainer", 59.0) == 14.0
