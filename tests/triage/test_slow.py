"""Slow departures of long runs: found at any length, dated at their beginning; learning for long is none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moeproxy.traces import RunInfo, Trace
from moeproxy.triage.departure import averages
from moeproxy.triage.detect import ALARM, HEALTHY, Detection, detect
from moeproxy.triage.slow import FROM, begun, bend, slow_changes

INFO = RunInfo("somebody's", "original", 0, 0)


def _learning(n_steps: int, seed: int = 0, *, halves: bool = False) -> dict[str, np.ndarray]:
    """A healthy run: reward rises and saturates, entropy falls by half, KL is below a nat, length doubles or halves."""
    rng, place = np.random.default_rng(seed), np.arange(n_steps) / n_steps
    learned = np.clip(place * 1.6, 0, 1)
    length = 1 / (1 + learned) if halves else 1 + learned
    return {
        "reward_mean": 0.2 + 0.4 * learned + 0.03 * rng.normal(size=n_steps),
        "entropy": 0.6 * (1 - 0.5 * place) * np.exp(0.04 * rng.normal(size=n_steps)),
        "kl": (1e-3 + 0.6 * place) * np.exp(0.1 * rng.normal(size=n_steps)),
        "grad_norm": 0.5 * np.exp(-0.7 * place + 0.15 * rng.normal(size=n_steps)),
        "response_length": 300 * length * np.exp(0.04 * rng.normal(size=n_steps)),
        "truncated": np.clip(0.02 + 0.01 * rng.normal(size=n_steps), 0, 1),
    }


def _judge(signals: dict[str, np.ndarray]) -> Detection:
    n_steps = len(signals["reward_mean"])
    return detect(Trace(pd.DataFrame(signals, index=np.arange(1, n_steps + 1)), None, INFO))


def _gone(n_steps: int, over: int) -> np.ndarray:
    """Share (S,) that is gone of something that goes from the middle of a run on."""
    return np.clip((np.arange(n_steps) - n_steps // 2) / over, 0, 1)


@pytest.mark.parametrize(
    ("n_steps", "over"), [(200, 80), (500, 150), (500, 240), (1000, 300), (2000, 200), (2000, 900), (5000, 2000)]
)
@pytest.mark.parametrize("name", ["reward_mean", "entropy", "response_length"])
def test_a_slow_collapse_is_found_where_it_begins(n_steps: int, over: int, name: str) -> None:
    signals, gone_S = _learning(n_steps), _gone(n_steps, over)
    if name != "reward_mean":
        signals["reward_mean"] = signals["reward_mean"] - np.clip(np.arange(n_steps) / n_steps * 1.6, 0, 1) * 0.4
    signals[name] = signals[name] * (1 - 0.96 * gone_S)
    found = _judge(signals)
    assert found.verdict == ALARM
    alarm = next(one for one in found.alarms if one.signal == name)
    assert alarm.direction == "down"
    assert abs(alarm.onset - n_steps // 2) <= max(0.04 * n_steps, 0.3 * over)
    assert found.onset == min(one.onset for one in found.alarms)
    assert alarm.after < 0.5 * alarm.expected


@pytest.mark.parametrize("n_steps", [500, 2000])
def test_a_gradient_norm_that_grows_for_half_the_run_is_dated_where_it_begins(n_steps: int) -> None:
    signals = _learning(n_steps)
    signals["grad_norm"] = signals["grad_norm"] * np.exp(6 * _gone(n_steps, n_steps // 2))
    found = _judge(signals)
    assert found.verdict == ALARM
    assert found.onset == pytest.approx(n_steps / 2, abs=0.06 * n_steps)


def test_a_jump_in_a_long_run_is_dated_to_the_step() -> None:
    signals = _learning(1000)
    signals["grad_norm"][600:] *= 300
    assert _judge(signals).onset == pytest.approx(601, abs=2)


def test_truncation_that_becomes_the_rule_is_found() -> None:
    signals = _learning(1000)
    signals["truncated"] = signals["truncated"] + 0.9 * _gone(1000, 400)
    found = _judge(signals)
    assert found.verdict == ALARM
    assert next(one for one in found.alarms if one.signal == "truncated").direction == "up"


@pytest.mark.parametrize("n_steps", [300, 1000, 3000])
@pytest.mark.parametrize("halves", [True, False])
def test_learning_for_long_is_no_fault(n_steps: int, halves: bool) -> None:
    assert [_judge(_learning(n_steps, seed, halves=halves)).verdict for seed in range(3)] == [HEALTHY] * 3


def test_entropy_that_goes_while_the_reward_rises_to_the_end_is_learning() -> None:
    signals = _learning(2000)
    signals["entropy"] = 0.6 * np.exp(-3 * np.arange(2000) / 2000) + 0.0 * signals["entropy"]
    rows, values_RS = ("reward_mean", "entropy"), np.stack([signals["reward_mean"], signals["entropy"]])
    noise_R = np.array([0.03, 0.02])
    assert slow_changes(rows, values_RS, noise_R) == []
    values_RS[0] = 0.2  # the same without a reward that rises
    assert [one.row for one in slow_changes(rows, values_RS, noise_R)] == [1]


@pytest.mark.parametrize(
    ("start", "best", "end", "falls"), [(-1, 0.5, -1, True), (-10, -10, -100, True), (5, 6, 5, False)]
)
def test_rewards_of_any_sign_fall_by_what_was_gained(start: float, best: float, end: float, falls: bool) -> None:
    values_RS = np.interp(np.arange(600), [0, 200, 300, 500, 599], [start, best, best, end, end])[None]
    assert bool(slow_changes(("reward_mean",), values_RS, np.array([0.03]))) == falls


def test_a_short_run_has_no_slow_changes() -> None:
    values_RS = np.linspace(1, 0, FROM - 1)[None]
    assert slow_changes(("reward_mean",), values_RS, np.array([0.01])) == []
    assert slow_changes(("reward_mean",), np.linspace(1, 0, FROM)[None], np.array([0.01]))


def test_the_bend_of_two_lines_is_found() -> None:
    curve_S = np.interp(np.arange(300), [0, 150, 299], [0, 1, 20.0])
    assert bend(curve_S, 170, 280) == pytest.approx(150, abs=3)
    assert bend(-curve_S, 170, 280) == pytest.approx(150, abs=3)


def test_what_has_begun_to_go_too_far_is_dated_at_its_bend() -> None:
    deviation_S = np.interp(np.arange(300), [0, 150, 299], [0, 0.0, 1.2])
    assert begun(deviation_S, 0.2) == pytest.approx(150, abs=4)
    assert begun(-deviation_S, 0.2) == begun(deviation_S, 0.2)
    assert begun(0.5 * deviation_S, 0.2) is None


def test_averages_leave_out_what_is_missing() -> None:
    values_RS = np.array([[1.0, np.nan, 3.0, 5.0]])
    assert averages(values_RS, np.array([0, 1, 1]), np.array([3, 2, 4])).tolist() == [[2.0, 0.0, 4.0]]
