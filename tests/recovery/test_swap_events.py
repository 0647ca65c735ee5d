"""What a job with hot swap cost, from its events: recovery, lost steps, and snapshots beside training."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.recovery import swap_watch
from moeproxy.recovery.events import Event
from moeproxy.recovery.hotswap import lost_steps, recoveries
from moeproxy.recovery.snapshot_cost import ratios, snapshot_cost
from moeproxy.recovery.timeline import attempts


def _events(*lines: tuple[float, str, str, int]) -> list[Event]:
    return [Event(t, "trainer", f"trainer-{member}", event, step) for t, member, event, step in lines]


def test_recovery_ends_with_the_first_step_that_began_after_the_fault() -> None:
    found = _events(
        (0, "0", "step_begin", 5),
        (0, "1", "step_begin", 5),
        (1, "1", "fault", 5),
        (2, "0", "step_commit", 5),  # with what the dead rank had sent
        (3, "0", "step_begin", 6),  # broken off
        (6, "2", "step_begin", 5),
        (6, "0", "step_begin", 5),
        (7, "2", "fault", 5),
        (9, "0", "step_begin", 5),
        (11, "0", "step_commit", 5),
    )
    assert recoveries(found) == (10.0, 4.0)
    assert recoveries(found[:-1]) == ()
    assert lost_steps(found, 2) == 0  # rank 1 never finished step 5


def test_a_recovery_from_a_fault_that_nobody_logged_begins_with_its_detection() -> None:
    steps = [(t, "0", name, 5) for t, name in ((10, "step_begin"), (12, "step_commit"))]
    for number, kind in enumerate(("detect", "fault")):
        found = _events((7, "1", kind, 5), *[(8, "1", "detect", 5)] * number, *steps)
        assert recoveries(found) == (5.0,)
    twice = _events((1, "1", "fault", 5), (2, "1", "detect", 5), (3, "2", "detect", 5), (4, "1", "detect", 5), *steps)
    assert recoveries(twice) == (11.0, 9.0, 8.0)


def test_a_ranks_last_sign_of_life_is_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_watch.time, "time", lambda: 20.0)
    found = _events((1, "0", "start", 0), (4, "2", "ready", 0), (5, "0", "step_begin", 1), (9, "1", "step_commit", 1))
    assert [swap_watch.silent(found, f"trainer-{number}") for number in range(4)] == [15.0, 11.0, 0.0, 0.0]


def test_a_step_is_lost_when_all_had_finished_it() -> None:
    both = _events((0, "0", "step_begin", 1), (1, "0", "step_commit", 1), (1, "1", "step_commit", 1))
    again = _events((2, "1", "step_begin", 1), (3, "0", "step_begin", 1), (4, "0", "step_begin", 2))
    assert lost_steps([*both, *again], 2) == 1
    assert lost_steps([*both, *again], 3) == 0
    late = _events((2, "2", "step_begin", 1))  # a rank that had no part in it
    assert lost_steps([*both, *late], 2) == 0


def _commit(step: int, seconds: float, beside: bool, member: str = "trainer-0") -> Event:
    return Event(step, "trainer", member, "step_commit", step, {"seconds": seconds, "beside": beside})


def test_the_cost_of_a_snapshot_is_that_of_the_step_beside_it() -> None:
    steady = [_commit(step, 2.0 + 0.1 * (step % 2), bool(step % 2)) for step in range(1, 60)]
    found = snapshot_cost(ratios(steady))
    assert found is not None
    assert (found.share, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert found.steps == 27  # the odd ones from 5 to 57: those with neighbours on both sides, after warming up
    drifting = [_commit(step, (1.0 + 0.02 * step) * (1.05 if step % 2 else 1.0), bool(step % 2)) for step in range(60)]
    assert ratios(drifting) == pytest.approx([1.05] * len(ratios(drifting)))
    slower = [_commit(step, 3.0 + 0.3 * (step % 2), bool(step % 2), "trainer-1") for step in range(1, 60)]
    assert ratios([*steady, *slower]) == pytest.approx([5.4 / 5.0] * 27)  # ranks wait for one another
    assert snapshot_cost(ratios([_commit(step, 2.0, True) for step in range(20)])) is None
    alone = [_commit(step, 1.0, bool(step % 2), f"trainer-{step % 2}") for step in range(20)]
    assert ratios(alone) == []  # no step that both ranks finished


def test_noise_widens_the_interval_around_the_cost() -> None:
    rng = np.random.default_rng(0)
    noisy = [_commit(step, rng.lognormal(0, 0.1) * (1.04 if step % 2 else 1), bool(step % 2)) for step in range(400)]
    found = snapshot_cost(ratios(noisy))
    assert found is not None
    assert found.low < 0.04 < found.high
    assert 0.01 < found.high - found.low < 0.06
    assert snapshot_cost(ratios(noisy)) == found  # the bootstrap has a seed


def test_ranks_that_train_together_make_one_try_of_a_step() -> None:
    found = _events(
        (0, "0", "step_begin", 1),
        (0.5, "1", "step_begin", 1),
        (2, "1", "step_commit", 1),
        (2.5, "1", "step_begin", 2),
        (3, "0", "step_commit", 1),
        (3, "0", "step_begin", 2),
        (4, "1", "fault", 2),
        (6, "2", "step_begin", 2),
        (6, "0", "step_begin", 2),
        (8, "0", "step_commit", 2),
    )
    tries = [(item.step, item.begin, item.end, item.kept) for item in attempts(found)]
    assert tries == [(1, 0, 2, True), (2, 2.5, 4, False), (2, 6, 8, True)]
