"""Severity on runs of known answer: 0 is healthy, parts move apart, nothing depends on a model's size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeproxy.errors import ComparisonError
from moeproxy.traces import Trace
from moeproxy.triage.severity import GROUPS, Calibrated, Healthy, Severity, severity
from tests.triage import study_synthetic as made

ONSET = 20


@pytest.fixture(scope="module")
def calibrated() -> Calibrated:
    return Calibrated.of([made.run("original", seed) for seed in made.CALIBRATION], made.PROTOCOL)


@pytest.fixture(scope="module")
def healthy(calibrated: Calibrated) -> Healthy:
    return Healthy(made.run("original", 0), calibrated)


def broken(effect: dict[str, float], fault: str = "x", **more: float) -> Trace:
    return made.run("original", 0, fault=fault, effect=effect, onset=ONSET, **more)


def with_values(trace: Trace, name: str, value: float, start: int = ONSET) -> Trace:
    steps = trace.steps.copy()
    steps.loc[steps.index >= start, name] = value
    return Trace(steps, trace.trajectories, trace.provenance)


def test_the_twin_itself_is_healthy(healthy: Healthy) -> None:
    found = severity(healthy.twin, healthy, ONSET)
    assert found.value == 0
    assert set(found.groups) == set(GROUPS)
    assert set(found.groups.values()) == {0.0}


def test_other_healthy_runs_stay_about_the_margin(healthy: Healthy) -> None:
    margin = healthy.margin(ONSET).value
    assert 0 <= margin < 0.1
    others = [severity(broken({}, f"nothing {i}"), healthy, ONSET).value for i in range(20)]
    assert np.quantile(others, 0.8) <= margin + 0.02
    assert healthy.margin(ONSET) is healthy.margin(ONSET)


def test_severity_grows_with_the_response(healthy: Healthy) -> None:
    found = [severity(broken({"kl": size}), healthy, ONSET) for size in (5, 10, 20, 40)]
    departures = [one.groups["policy"] for one in found]
    assert departures == sorted(departures)
    assert departures[-1] > 0.8
    assert all(one.reward_loss == 0 and one.not_finite == 0 for one in found)
    assert found[-1].departure == pytest.approx(np.mean(list(found[-1].groups.values())))
    assert found[-1].value == pytest.approx(found[-1].departure / 3)


def test_a_mismatch_that_falls_is_no_illness_and_one_that_rises_is(healthy: Healthy) -> None:
    effect = {"logprob_diff_mean": 30, "logprob_diff_max": 30, "logprob_diff_k3": 30, "prob_pearson": -30}
    worse, better = (broken({name: sign * size for name, size in effect.items()}) for sign in (1, -1))
    assert severity(worse, healthy, ONSET).groups["engines"] > 0.7
    assert severity(better, healthy, ONSET).groups["engines"] < 0.5


def test_all_reward_lost_is_a_loss_of_one_and_more_reward_is_none(healthy: Healthy) -> None:
    assert severity(with_values(healthy.twin, "reward_mean", 0.0), healthy, ONSET).reward_loss == 1
    twin = healthy.twin.values("reward_mean")[ONSET:].mean()
    assert severity(with_values(healthy.twin, "reward_mean", 2 * twin), healthy, ONSET).reward_loss == 0
    half = severity(with_values(healthy.twin, "reward_mean", 0.5 * twin), healthy, ONSET).reward_loss
    assert 0.1 < half < 0.5  # half, less what healthy runs differ by


def test_steps_that_are_not_finite_are_counted(healthy: Healthy) -> None:
    assert severity(with_values(healthy.twin, "kl", np.nan), healthy, ONSET).not_finite == 1
    late = severity(with_values(healthy.twin, "kl", np.inf, start=ONSET + 15), healthy, ONSET)
    assert late.not_finite == pytest.approx(0.5)
    assert late.groups["policy"] > 0.9


def test_nothing_depends_on_the_size_of_a_model(healthy: Healthy) -> None:
    scaled = Calibrated.of([made.run("original", seed, scale=0.01) for seed in made.CALIBRATION], made.PROTOCOL)
    small = Healthy(made.run("original", 0, scale=0.01), scaled)
    effect = {"grad_norm": 15.0, "update_norm": -15.0}
    one, other = severity(broken(effect), healthy, ONSET), severity(broken(effect, scale=0.01), small, ONSET)
    assert one.groups["updates"] == pytest.approx(other.groups["updates"], abs=0.02)
    assert one.groups["updates"] > 0.5


def test_what_cannot_be_judged_is_refused(healthy: Healthy, calibrated: Calibrated) -> None:
    with pytest.raises(ComparisonError, match="the twin of"):
        severity(made.run("original", 1), healthy, ONSET)
    with pytest.raises(ComparisonError, match="goes on after the onset"):
        severity(Trace(healthy.twin.steps[:ONSET], None, healthy.twin.provenance), healthy, ONSET)
    with pytest.raises(ComparisonError, match="at least 6"):
        Calibrated.of(calibrated.traces[:5], made.PROTOCOL)
    with pytest.raises(ComparisonError, match="several models"):
        Calibrated.of([*calibrated.traces, broken({})], made.PROTOCOL)
    without = [Trace(t.steps.drop(columns="reward_mean"), t.trajectories, t.provenance) for t in calibrated.traces]
    with pytest.raises(ComparisonError, match="reward_mean"):
        Calibrated.of(without, made.PROTOCOL)


def test_values_survive_a_dict() -> None:
    one = Severity(0.3, 0.6, 0.0, {"reward": 0.6})
    assert Severity(**one.to_dict()) == one
    assert one.value == pytest.approx(0.3)
    assert str(replace(one, departure=0.9)) == "0.400 (reward loss 0.30, departure 0.90, not finite 0.00)"
