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


@pytest.mark.parametrize("change", [-0.4, 0.4])
def test_alone_what_stays_is_no_transient(change: float) -> None:
    for seed in range(3):
        found = _run(seed, 40, None, change)
        alarm = next(one for one in found.alarms if one.signal == "reward_mean")
        assert alarm.kind == "jump"
        assert alarm.recovered is None
        assert found.onset == pytest.approx(41, abs=1)
