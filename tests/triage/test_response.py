"""Responses: transformation, windows, spreads with few seeds, thresholds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moeproxy.traces import SIGNALS, RunInfo, Trace
from moeproxy.triage.response import CAP, Windows, calibrate, matrix, pair_responses, persistent

NAMES = tuple(name for name, signal in SIGNALS.items() if signal.compared)
RUN = RunInfo(model="original", method="original", n_experts=32, seed=0)
STEPS_S = np.arange(20, 60)
WINDOWS = Windows.after(20, 59, 10)


def healthy(rng: np.random.Generator, drift: float) -> np.ndarray:
    """Return (X, S): step noise, a random walk and an offset of the seed."""
    shape = (len(NAMES), len(STEPS_S))
    walk = np.cumsum(rng.normal(size=shape), axis=1) / np.sqrt(shape[1])
    return rng.normal(size=shape) + drift * (walk + rng.normal(size=(shape[0], 1)))


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (49, ((20, 30), (30, 40), (40, 50))),
        (53, ((20, 30), (30, 40), (40, 54))),
        (54, ((20, 30), (30, 40), (40, 50), (50, 55))),
        (25, ((20, 26),)),
    ],
)
def test_windows(last: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert Windows.after(20, last, 10).bounds == expected


def test_window_means_need_half_of_the_steps() -> None:
    values_XS = np.vstack([np.arange(20.0, 40.0), np.arange(20.0, 40.0)])
    values_XS[0, :4], values_XS[1, :5] = np.nan, np.nan
    means = Windows.after(20, 39, 10).means(values_XS, np.arange(20, 40))
    np.testing.assert_array_equal(means, [[26.5, 34.5], [np.nan, 34.5]])


def test_transformation_keeps_missing_and_not_finite_apart() -> None:
    steps = pd.DataFrame(
        {
            "grad_norm": [np.e, 0.0, np.nan, np.inf],
            "reward_mean": pd.Series([1.0, None, np.nan, -np.inf], dtype=object),
            "prob_pearson": [0.5, 1.0, np.nan, -0.2],
            "router_max_violation/0": [1.0, 1.0, 1.0, 1.0],
            "router_max_violation/1": [np.e**2, 1.0, 1.0, np.nan],
        }
    )
    names = ("grad_norm", "reward_mean", "prob_pearson", "router_max_violation", "kl")
    got = matrix(Trace(steps, None, RUN), names, np.arange(1, 6))
    limit = np.log(1e6 - 1)
    np.testing.assert_allclose(got[0], [np.log(1e-9), np.inf, np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(got[1], [np.nan, np.inf, -np.inf, np.nan, np.nan])
    np.testing.assert_allclose(got[2], [limit, np.inf, -limit, np.nan, np.nan])
    np.testing.assert_allclose(got[3], [0.0, 0.0, np.inf, np.nan, np.nan])
    assert np.isnan(got[4]).all()
    np.testing.assert_allclose(matrix(Trace(steps, None, RUN), names, np.array([0]))[3], [1.0])


@pytest.mark.parametrize(("seeds", "drift"), [(2, 3.0), (3, 0.0), (3, 0.5), (3, 3.0), (5, 3.0)])
def test_false_responses_stay_rare_on_fresh_seeds(seeds: int, drift: float) -> None:
    rates, departures = [], []
    for trial in range(40):
        rng = np.random.default_rng(trial)
        calibration = np.stack([healthy(rng, drift) for _ in range(seeds)])
        spread = calibrate(calibration, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3)
        one, other = healthy(rng, drift), healthy(rng, drift)
        response = spread.response(WINDOWS.means(one, STEPS_S), WINDOWS.means(other, STEPS_S))
        rates.append(np.abs(response) > spread.threshold)
        departures.append(persistent(spread.step_response(one, other), 3).max(1) > spread.step_threshold)
    assert np.mean(rates) < 0.02
    assert np.mean(departures) < 0.04


def test_spread_is_unbiased_for_three_seeds() -> None:
    # Runs that differ by a constant offset only: the window spread is the offset's.
    found = []
    for trial in range(200):
        offsets = np.random.default_rng(trial).normal(size=(3, len(NAMES), 1))
        values = np.repeat(offsets, len(STEPS_S), axis=2)
        found.append(calibrate(values, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3).window_X)
    assert np.mean(found) == pytest.approx(1.0, rel=0.02)


def test_step_noise_is_a_floor_of_the_spread() -> None:
    # Three runs that agree by luck in every window mean, though single steps are noisy.
    noise = np.tile([1.0, -1.0], len(STEPS_S) // 2)
    values = np.broadcast_to(noise, (3, len(NAMES), len(STEPS_S))).copy()
    spread = calibrate(values, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3)
    np.testing.assert_allclose(spread.window_X, np.sqrt(2) / np.sqrt(10))


def test_constant_signal_divides_by_its_resolution() -> None:
    values = np.zeros((3, len(NAMES), len(STEPS_S)))
    spread = calibrate(values, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3)
    assert spread.constant_X.all()
    linear, log = NAMES.index("reward_mean"), NAMES.index("grad_norm")
    assert spread.window_X[linear] == 1e-3
    assert spread.window_X[log] == 0.02
    assert np.abs(spread.response(np.full((len(NAMES), 4), np.inf), np.zeros((len(NAMES), 4)))).max() == CAP


def test_steps_that_no_run_logged_are_left_out() -> None:
    rng = np.random.default_rng(0)
    values = np.stack([healthy(rng, 1.0) for _ in range(3)])
    values[:, :, 3] = np.nan
    values[:, 0] = np.nan
    spread = calibrate(values, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3)
    assert np.isnan(spread.window_X[0])
    assert np.isfinite(spread.window_X[1:]).all()


def test_persistent_agrees_with_brute_force() -> None:
    response = np.random.default_rng(0).normal(size=(5, 30))
    response[2, 7] = np.nan
    got = persistent(response, 3)
    for x in range(5):
        for t in range(28):
            part = response[x, t : t + 3]
            same = not np.isnan(part).any() and abs(np.sign(part).sum()) == 3
            assert got[x, t] == (np.abs(part).min() if same else 0)


def test_pair_responses_come_in_both_directions() -> None:
    rng = np.random.default_rng(0)
    values = np.stack([healthy(rng, 1.0) for _ in range(3)])
    spread = calibrate(values, STEPS_S, WINDOWS, NAMES, alpha=0.01, persist=3)
    pairs = pair_responses(np.stack([WINDOWS.means(v, STEPS_S) for v in values]), spread)
    assert pairs.shape == (6, len(NAMES), 4)
    np.testing.assert_allclose(pairs.sum(0), 0, atol=1e-9)
