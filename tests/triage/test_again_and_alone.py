"""What alarms though most of a run looks healthy: breaks and spikes that come again, and one signal that goes far."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moeproxy.traces import RunInfo, Trace
from moeproxy.triage.alarms import SPIKES, Alarm
from moeproxy.triage.alone import REACHED
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR, detect
from moeproxy.triage.reference import REACH
from moeproxy.triage.repeated import LEAST, repeated
from tests.triage.synthetic import run
from tests.triage.test_detect import GOOD, PRIORS

_FROM = 25


def _with(name: str, change, seed: int = 0) -> Trace:
    trace = run("original", seed)
    values_S = trace.values(name).copy()
    change(values_S)
    return Trace(trace.steps.assign(**{name: values_S}), None, trace.provenance)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("every", [3, 4, 7])
def test_values_that_are_not_finite_again_and_again_are_an_alarm(every: int, beside: bool) -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[_FROM::every] = np.nan

    found = detect(_with("grad_norm", change), GOOD if beside else (), priors=PRIORS)
    assert found.verdict == ALARM
    assert found.onset == run("original", 0).steps.index[_FROM]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("up", [True, False])
def test_spikes_that_come_again_and_again_are_an_alarm(every: int, up: bool, beside: bool) -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[_FROM::every] *= 100.0 if up else 0.01

    trace = _with("grad_norm", change)
    found = detect(trace, GOOD if beside else (), priors=PRIORS)
    assert found.verdict == ALARM
    (alarm,) = (one for one in found.alarms if one.signal == "grad_norm")
    assert alarm.kind == SPIKES
    assert alarm.direction == ("up" if up else "down")
    assert alarm.onset == found.onset == trace.steps.index[_FROM]
    assert alarm.steps == len(range(_FROM, len(trace.steps), every))
    usual = np.exp(np.log(np.delete(trace.values("grad_norm"), np.s_[_FROM::every])[_FROM:]).mean())
    assert alarm.expected == pytest.approx(usual, rel=1e-6)
    assert f"at {alarm.steps} steps up to step {alarm.shown[1]}" in alarm.sentence
    assert "single steps stand out again and again" in found.sentences[0]
    assert Alarm.from_dict(alarm.to_dict()) == alarm


def test_spikes_are_repeated_only_where_they_become_frequent() -> None:
    spikes_RS = np.zeros((4, 100), bool)
    spikes_RS[0, 50:70:4] = True  # five within twenty
    spikes_RS[1, 50:66:4] = True  # four
    spikes_RS[2, ::4] = True  # always
    spikes_RS[3, 20::20] = True  # seldom
    (found,) = repeated(spikes_RS)
    assert (found.row, found.places, found.most) == (0, (50, 54, 58, 62, 66), LEAST)


@pytest.mark.parametrize("beside", [True, False])
def test_one_signal_that_goes_far_alarms_whatever_the_others_do(beside: bool) -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[_FROM : _FROM + 15] -= 25 * np.std(np.diff(values_S)) / np.sqrt(2)

    found = detect(_with("entropy", change), GOOD if beside else (), priors=PRIORS)
    assert found.verdict == ALARM
    assert "entropy" in {alarm.signal for alarm in found.alarms}
    assert abs(found.onset - run("original", 0).steps.index[_FROM]) <= 2
    if not found.strength > found.threshold:
        assert "entropy has" in found.sentences[0]


def _made_up(n_steps: int, **signals: np.ndarray) -> Trace:
    rng = np.random.default_rng(3)
    usual = {
        "reward_mean": 0.6 + 0.03 * rng.normal(size=n_steps),
        "entropy": 0.8 * np.exp(0.03 * rng.normal(size=n_steps)),
        "grad_norm": 0.5 * np.exp(0.15 * rng.normal(size=n_steps)),
        "response_length": 300 * np.exp(0.04 * rng.normal(size=n_steps)),
        "kl": 1e-2 * np.exp(0.1 * rng.normal(size=n_steps)),
    }
    return Trace(pd.DataFrame({**usual, **signals}, index=range(1, n_steps + 1)), None, RunInfo("made up", "", 0, 0))


def test_a_limit_is_told_as_one_and_not_as_what_healthy_runs_reach() -> None:
    place_S = np.arange(2000)
    found = detect(_made_up(2000, kl=1e-3 + 2.2 * place_S / 2000))
    (alarm,) = (one for one in found.alarms if one.signal == "kl")
    assert alarm.excess == pytest.approx(alarm.after, rel=0.1), "the limit is one nat"
    assert "times the 1 up to which it is taken for learning" in alarm.sentence
    assert REACH not in alarm.sentence
    far = detect(_made_up(200, grad_norm=0.5 * np.exp(np.clip((place_S[:200] - 60) / 20, 0, 6))))
    (alarm,) = (one for one in far.alarms if one.signal == "grad_norm")
    assert alarm.against in (REACHED, REACH)


def test_a_slow_loss_is_not_hidden_by_what_passes_its_limit_later() -> None:
    place_S = np.arange(3000)
    rng = np.random.default_rng(0)
    reward_S = 0.6 * (1 - np.clip((place_S - 1000) / 800, 0, 1)) + 0.03 * rng.normal(size=3000)
    found = detect(_made_up(3000, reward_mean=reward_S, kl=1e-3 + 3.0 * place_S / 3000))
    assert found.verdict == ALARM
    assert 900 <= found.onset <= 1300
    assert found.alarms[0].signal == "reward_mean"


@pytest.mark.parametrize(("digits", "slope"), [(3, 5e-5), (3, 2e-4), (4, 1e-5), (4, 5e-5)])
def test_a_divergence_that_the_log_rounds_is_no_jump(digits: int, slope: float) -> None:
    for seed in range(3):
        noise_S = np.exp(np.random.default_rng(seed).normal(0, 0.1, 100))
        found = detect(_made_up(100, kl=np.round(slope * np.arange(100) * noise_S, digits)))
        assert found.verdict == HEALTHY


def test_a_start_with_steps_of_nearly_zero_gradient_is_no_beginning_to_be_far_from() -> None:
    rng = np.random.default_rng(0)
    norm_S = 0.4 * np.exp(0.2 * rng.normal(size=120))
    norm_S[[1, 4, 7, 20, 33]] = 1e-3
    assert detect(_made_up(120, grad_norm=norm_S)).verdict == HEALTHY


def test_a_run_in_which_nothing_changes_cannot_be_judged_alone() -> None:
    still = _made_up(60)
    still = Trace(still.steps * 0 + 0.5, None, still.provenance)
    found = detect(still)
    assert found.verdict == UNCLEAR
    assert "No signal changes in the whole run" in found.notes[0]


def test_a_spike_at_the_first_step_is_told_with_the_value_after_it_alone() -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[0] = 5e3

    trace = _with("total_loss", change)
    (note,) = (n for n in detect(trace, GOOD).notes if n.startswith("total_loss: lone spike"))
    assert f"({5e3:.3g}, {trace.values('total_loss')[1]:.3g} after)" in note


def test_a_mean_of_zeros_is_zero() -> None:
    still = _made_up(60, reward_mean=np.concatenate([np.full(30, 0.3), np.zeros(30)]))
    (alarm,) = (one for one in detect(still).alarms if one.signal == "reward_mean")
    assert alarm.after == 0
