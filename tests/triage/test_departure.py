"""Statistics of a departure: planted change points, lone spikes, missing values, and slow twins of the fast paths."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.triage.course import DRIFT, JUMP, TRANSIENT, course
from moeproxy.triage.departure import (
    LEAST_BEFORE,
    MEMORY,
    SPANS,
    candidates,
    contrast,
    lone_spikes,
    shifts,
    smoothed,
    step_noise,
    without_spikes,
)


def _noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("onset", [8, 20, 41])
@pytest.mark.parametrize("size", [3.0, -4.0])
def test_the_largest_contrast_lies_at_the_planted_onset(onset: int, size: float) -> None:
    values_RS = _noise(onset, 3, 60)
    values_RS[1, onset:] += size
    onset_T = candidates(60)
    found = contrast(values_RS, onset_T)
    assert abs(int(onset_T[found[1].argmax()]) - onset) <= 1
    assert found[1].max() > 2 * max(found[0].max(), found[2].max())


def test_shifts_equal_plain_means() -> None:
    values_RS = _noise(0, 2, 40)
    values_RS[0, 5:9] = np.nan
    onset_T = candidates(40)
    found = shifts(values_RS, onset_T)
    for w, (start, stop) in enumerate(SPANS):
        for place, onset in enumerate(onset_T):
            for r, row_S in enumerate(values_RS):
                part = row_S[onset + start : onset + stop]
                known, before = part[np.isfinite(part)], row_S[max(0, onset - MEMORY) : onset]
                enough = len(known) > len(part) / 2
                assert found[w, 0, r, place] == pytest.approx(known.mean() if enough else 0.0)
                past = before[np.isfinite(before)]
                change = known.mean() - past.mean() if enough and len(past) >= LEAST_BEFORE - 1 else 0.0
                assert found[w, 1, r, place] == pytest.approx(change)


def test_a_trend_that_goes_on_is_no_change() -> None:
    steps = np.arange(80.0)
    rising_RS = 0.2 * steps[None] + _noise(1, 1, 80) * 0.3
    onset_T = candidates(80)[6:]
    assert contrast(rising_RS, onset_T).max() > 10
    assert contrast(rising_RS, onset_T, trend=True).max() < 4
    rising_RS[0, 40:] -= 8  # against the trend
    found = contrast(rising_RS, onset_T, trend=True)
    assert found[0, onset_T == 40] > 2 * contrast(_noise(1, 1, 80), onset_T, trend=True).max()


def test_a_lone_spike_is_found_and_a_jump_is_none() -> None:
    values_RS = _noise(2, 2, 30) * 0.1
    values_RS[0, 12] += 5
    values_RS[1, 12:] += 5
    found_RS = lone_spikes(values_RS, np.full(2, 0.1))
    assert np.flatnonzero(found_RS[0]).tolist() == [12]
    assert not found_RS[1].any()
    mended_RS = without_spikes(values_RS, found_RS)
    assert abs(mended_RS[0, 12]) < 0.5
    assert np.array_equal(mended_RS[1], values_RS[1])


def test_step_noise_sees_neither_trend_nor_one_jump() -> None:
    values_RS = _noise(3, 1, 400) + np.linspace(0, 20, 400)
    values_RS[0, 200:] += 30
    assert step_noise(values_RS, np.zeros(1))[0] == pytest.approx(1.0, rel=0.2)
    assert step_noise(np.zeros((1, 20)), np.array([0.02]))[0] == 0.02
    assert step_noise(np.full((1, 20), np.nan), np.array([0.02]))[0] == 0.02


def test_smoothing_leaves_missing_values_out() -> None:
    values_RS = np.array([[1.0, np.nan, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    assert smoothed(values_RS, 3)[0].tolist() == [1.0, 2.0, *([3.0] * 7)]
    assert np.isnan(smoothed(np.full((1, 5), np.nan))).all()


def test_candidates_leave_room_and_are_not_too_many() -> None:
    assert candidates(60)[0] == LEAST_BEFORE
    assert candidates(60)[-1] == 57
    assert len(candidates(50_000)) <= 1100


@pytest.mark.parametrize("n_steps", [60, 5000])
def test_courses_are_told_apart(n_steps: int) -> None:
    noise_S, onset = _noise(4, n_steps), n_steps // 3
    jump_S, drift_S, back_S = noise_S.copy(), noise_S.copy(), noise_S.copy()
    jump_S[onset:] += 8
    drift_S[onset:] += np.linspace(0, 20, n_steps - onset)
    back_S[onset : 2 * onset] += 8
    assert course(jump_S, onset).kind == JUMP
    assert course(drift_S, onset).kind == DRIFT
    found = course(back_S, onset)
    assert found.kind == TRANSIENT
    assert found.recovered == pytest.approx(2 * onset, abs=max(2, n_steps // 500))


def test_a_course_bridges_gaps() -> None:
    values_S = np.r_[np.zeros(10), np.full(5, np.nan), np.full(15, 6.0)]
    assert course(values_S, 10).kind in (JUMP, DRIFT)
    assert course(np.full(20, np.nan), 5).kind == DRIFT


def test_a_slow_fall_after_a_long_rise_is_a_drift() -> None:
    values_S = np.interp(np.arange(1400), [0, 1000, 1300, 1399], [0, 20, 0, 0.0])
    assert course(values_S, 1000).kind == DRIFT
