"""Excursions of signals that learn: they are told from jumps and drifts, from either edge, and with their length."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moeproxy.traces import RunInfo, Trace
from moeproxy.triage.detect import ALARM, Detection, detect
from moeproxy.triage.excursion import excursion_at

SIZE = 6.0
"""Height in step noise."""


def _learning(seed: int, n_steps: int = 100, gain: float = 13.0) -> np.ndarray:
    """A signal in step noise that learns as rewards do: fast at first, then less and less."""
    noise = np.random.default_rng(seed).normal(size=n_steps)
    return gain * (1 - np.exp(-np.arange(n_steps) / 40)) + noise


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", [4, 8, 20])
@pytest.mark.parametrize("gain", [0.0, 13.0, -13.0])
def test_an_excursion_is_found_from_both_edges(gain: float, length: int, sign: int) -> None:
    for seed in range(5):
        values = _learning(seed, gain=gain)
        values[40 : 40 + length] += 2 * sign * SIZE
        assert excursion_at(values, 40) == (40, 40 + length)
        assert excursion_at(values, 40 + length) == (40, 40 + length)


@pytest.mark.parametrize("gain", [0.0, 13.0])
def test_jumps_drifts_and_learning_are_no_excursions(gain: float) -> None:
    for seed in range(20):
        jump, drift = _learning(seed, gain=gain), _learning(seed, gain=gain)
        jump[40:] += SIZE
        drift[40:] += SIZE * np.clip(np.arange(60) / 20, 0, 1)
        for values in (jump, drift, _learning(seed, gain=gain)):
            assert excursion_at(values, 40) is None


def test_gaps_and_short_runs_do_no_harm() -> None:
    values = _learning(0)
    values[40:48] += 2 * SIZE
    values[[10, 43, 60]] = np.nan
    assert excursion_at(values, 40) == (40, 48)
    assert excursion_at(np.full(100, np.nan), 40) is None
    assert excursion_at(values[:50], 40) is None, "two steps after it do not say that it is back"
    assert excursion_at(values, 2) is None


def _run(seed: int, start: int, stop: int | None, change: float, signal: str = "reward_mean") -> Detection:
    rng, step = np.random.default_rng(seed), np.arange(100)
    rows = {
        "reward_mean": 0.2 + 0.4 * (1 - np.exp(-step / 40)) + rng.normal(0, 0.03, 100),
        "reward_std": 0.4 + rng.normal(0, 0.02, 100),
        "grad_norm": 0.5 * np.exp(rng.normal(0, 0.15, 100)),
        "entropy": 0.9 - 0.3 * (1 - np.exp(-step / 60)) + rng.normal(0, 0.02, 100),
        "response_length": 200 + rng.normal(0, 8, 100),
    }
    rows[signal][start:stop] += change
    steps = pd.DataFrame(rows, index=pd.RangeIndex(1, 101, name="step"))
    return detect(Trace(steps, None, RunInfo("somebody's", "somebody's", 0, 0)))


@pytest.mark.parametrize("length", [6, 10, 20])
@pytest.mark.parametrize("change", [-0.4, 0.4])
def test_alone_a_run_that_learns_has_its_transient_told(change: float, length: int) -> None:
    for seed in range(3):
        found = _run(seed, 40, 40 + length, change)
        assert found.verdict == ALARM
        alarm = next(one for one in found.alarms if one.signal == "reward_mean")
        assert alarm.kind == "transient", alarm.sentence
        assert alarm.direction == ("up" if change > 0 else "down"), alarm.sentence
        assert found.onset == alarm.onset == pytest.approx(41, abs=1)
        assert alarm.recovered == pytest.approx(41 + length, abs=1)
        assert alarm.expected == pytest.approx(0.2 + 0.4 * (1 - np.exp(-(40 + length / 2) / 40)), abs=0.05)
        assert alarm.after == pytest.approx(alarm.expected + change, abs=0.05)


def test_alone_a_reward_that_falls_and_learns_anew_is_not_back() -> None:
    for seed in (0, 1, 2, 3, 5, 6):  # 4 raises no alarm
        rows = _good(120, seed)
        rows["reward_mean"][40:] -= 0.25
        alarm = next(one for one in detect(_trace(rows)).alarms if one.signal == "reward_mean")
        assert (alarm.kind, alarm.recovered) == ("jump", None), alarm.sentence


@pytest.mark.parametrize("change", [-0.4, 0.4])
def test_alone_what_stays_is_no_transient(change: float) -> None:
    for seed in range(3):
        found = _run(seed, 40, None, change)
        alarm = next(one for one in found.alarms if one.signal == "reward_mean")
        assert alarm.kind == "jump"
        assert alarm.recovered is None
        assert found.onset == pytest.approx(41, abs=1)


def _good(n_steps: int, seed: int) -> dict[str, np.ndarray]:
    """Signals of a run that learns, as `reward 0.2 to 0.6`, with noise."""
    rng, step = np.random.default_rng(seed), np.arange(n_steps)
    return {
        "reward_mean": 0.2 + 0.4 * (1 - np.exp(-step / 40)) + rng.normal(0, 0.03, n_steps),
        "grad_norm": 0.5 * np.exp(rng.normal(0, 0.15, n_steps)),
        "entropy": 0.9 - 0.3 * (1 - np.exp(-step / 60)) + rng.normal(0, 0.02, n_steps),
        "response_length": 200 * np.exp(rng.normal(0, 0.04, n_steps)),
    }


def _trace(rows: dict[str, np.ndarray]) -> Trace:
    steps = pd.DataFrame(rows, index=pd.RangeIndex(1, len(rows["entropy"]) + 1, name="step"))
    return Trace(steps, None, RunInfo("somebody's", "somebody's", 0, 0))


def _beside(n_steps: int) -> list[Trace]:
    return [_trace(_good(n_steps, 1000 + seed)) for seed in range(10)]


@pytest.mark.parametrize("length", [6, 25, 40])
@pytest.mark.parametrize(("signal", "factor"), [("grad_norm", 6.0), ("response_length", 1.7), ("reward_mean", 0.4)])
def test_beside_healthy_runs_a_transient_begins_on_the_way_out(signal: str, factor: float, length: int) -> None:
    good = _beside(120)
    for seed in range(4):
        rows = _good(120, seed)
        rows[signal][43 : 43 + length] *= factor
        found = detect(_trace(rows), good)
        alarm = next(one for one in found.alarms if one.signal == signal)
        assert (alarm.kind, alarm.direction) == ("transient", "up" if factor > 1 else "down"), alarm.sentence
        assert found.onset == alarm.onset == pytest.approx(44, abs=1)
        assert alarm.recovered == pytest.approx(44 + length, abs=1)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("signal", ["grad_norm", "response_length"])
def test_what_departs_again_is_not_called_back_for_good(signal: str, beside: bool) -> None:
    good = _beside(60) if beside else ()
    for seed in range(4):
        rows = _good(60, seed)
        for part in (slice(26, 34), slice(44, None)):
            rows[signal][part] *= 6
        found = detect(_trace(rows), good)
        alarm = next(one for one in found.alarms if one.signal == signal)
        assert alarm.direction == "up", alarm.sentence
        if alarm.kind == "transient":
            assert (alarm.onset, alarm.recovered, alarm.again) == (27, 35, 45)
            assert "is back from step 35 on until it departs again at step 45" in alarm.sentence
        else:
            assert alarm.onset == pytest.approx(45, abs=2), alarm.sentence


@pytest.mark.parametrize("beside", [True, False])
def test_of_two_transients_the_first_dates_the_run(beside: bool) -> None:
    good = _beside(120) if beside else ()
    for seed in range(4):
        rows = _good(120, seed)
        for start in (43, 79):
            rows["grad_norm"][start : start + 8] *= 6
        found = detect(_trace(rows), good)
        alarm = next(one for one in found.alarms if one.signal == "grad_norm")
        assert (found.onset, alarm.onset, alarm.recovered, alarm.again) == (44, 44, 52, 80), alarm.sentence


@pytest.mark.parametrize(("n_steps", "middle", "width"), [(60, 24, 26), (120, 48, 53), (200, 80, 88)])
def test_a_reward_that_rises_along_an_s_is_no_fault_alone(n_steps: int, middle: int, width: int) -> None:
    alarms = 0
    for seed in range(8):
        rows = _good(n_steps, seed)
        done = 1 / (1 + np.exp(-(np.arange(n_steps) - middle) * 4.4 / width))
        rows["reward_mean"] = 0.3 + 0.35 * done + np.random.default_rng(seed).normal(0, 0.03, n_steps)
        alarms += detect(_trace(rows)).verdict == ALARM
    assert alarms <= 1


def test_alone_a_reward_that_falls_while_it_learns_is_one() -> None:
    for seed in range(4):
        rows = _good(120, seed)
        rows["reward_mean"][60:] -= 0.25
        found = detect(_trace(rows))
        alarm = next(one for one in found.alarms if one.signal == "reward_mean")
        assert (found.verdict, alarm.direction) == (ALARM, "down")
        assert found.onset == pytest.approx(61, abs=2)
        assert "was usual just before" in alarm.sentence
        assert alarm.expected == pytest.approx(alarm.before, abs=0.01)
