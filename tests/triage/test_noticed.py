"""What is a note and no alarm, and that headline and alarms agree: spikes of any size, bursts, onsets."""

from __future__ import annotations

import re

import numpy as np
import pytest

from moeproxy.traces import Trace
from moeproxy.triage.departure import lone_spikes, robust_noise, without_spikes
from moeproxy.triage.detect import ALARM, HEALTHY, Detection, detect
from tests.triage.synthetic import FAULTS, ONSET, run, scaled
from tests.triage.test_detect import GOOD, PRIORS


def _with(name: str, change, seed: int = 0) -> Trace:
    trace = run("original", seed)
    values_S = trace.values(name).copy()
    change(values_S)
    return Trace(trace.steps.assign(**{name: values_S}), None, trace.provenance)


def _found(trace: Trace, beside: bool) -> Detection:
    return detect(trace, GOOD if beside else (), priors=PRIORS)


def _set(at: int, value: float):
    def change(values_S: np.ndarray) -> None:
        values_S[at] = value

    return change


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("at", [0, 40, -1])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("total_loss", value) for value in (500.0, -50.0, 1e12)),
        *(("kl", 5e3), ("grad_norm", 5e9), ("entropy", 30.0), ("reward_mean", -10.0)),
    ],
)
def test_a_lone_spike_of_any_size_and_signal_is_a_note_with_its_value(
    beside: bool, at: int, name: str, value: float
) -> None:
    found = _found(_with(name, _set(at, value)), beside)
    assert found.verdict == HEALTHY
    step = run("original", 0).steps.index[at]
    (note,) = (note for note in found.notes if f"{name}: lone spike at step {step} ({value:.3g}" in note)
    assert ("whether it lasts is not known" in note) == (at == -1)


def test_a_spike_beyond_all_other_values_is_a_note_though_the_run_begins_with_a_zero() -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[0], values_S[40] = 0.0, values_S[40] * 100

    found = _found(_with("kl", change), beside=False)
    assert found.verdict == HEALTHY
    assert any("kl: lone spike at step 40" in note for note in found.notes)


def test_the_last_value_is_set_against_the_two_before_it() -> None:
    values_RS = np.random.default_rng(0).normal(size=(2, 30)) * 0.1
    values_RS[0, -1] += 5
    values_RS[1, -2:] += 5  # two are no lone spike
    found_RS = lone_spikes(values_RS, np.full(2, 0.1))
    assert np.argwhere(found_RS).tolist() == [[0, 29]]
    assert without_spikes(values_RS, found_RS)[0, -1] == values_RS[0, -2]


def test_robust_noise_ignores_outliers_and_empty_rows() -> None:
    values_RS = np.random.default_rng(1).normal(size=(2, 2000))
    values_RS[0, ::50] = 1e6
    values_RS[1] = np.nan
    assert robust_noise(values_RS)[0] == pytest.approx(1.0, rel=0.1)
    assert robust_noise(values_RS)[1] == 0


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("beside", [True, False])
def test_a_burst_is_told_with_its_steps(length: int, beside: bool) -> None:
    def change(values_S: np.ndarray) -> None:
        values_S[30 : 30 + length] *= 50

    found = _found(_with("grad_norm", change), beside)
    told = [note for note in found.notes if note.startswith(f"grad_norm: burst at steps 30 to {29 + length} ")]
    alarmed = any(a.signal == "grad_norm" and a.kind == "transient" for a in found.alarms)
    assert told or alarmed


def test_healthy_runs_have_no_bursts() -> None:
    notes = [note for seed in range(200, 208) for note in _found(run("original", seed), False).notes]
    assert not [note for note in notes if "burst" in note]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_headline_names_the_step_of_the_earliest_alarm(beside: bool, factor: float) -> None:
    errors = []
    for fault, effect in scaled(FAULTS, factor).items():
        for seed in range(2):
            found = _found(run("original", seed, fault=fault, effect=effect), beside)
            if found.verdict == ALARM:
                assert found.onset == min(alarm.onset for alarm in found.alarms)
                errors.append(abs(found.onset - ONSET))
    assert np.median(errors) <= 3


def test_a_certain_alarm_before_a_larger_one_is_the_onset() -> None:
    trace = run("original", 0)
    steps = np.arange(len(trace.steps))
    early = trace.values("grad_norm") * np.where(steps >= 25, np.exp(1.0), 1)
    late = trace.values("total_loss") + np.where(steps >= 40, 2.0, 0)
    found = detect(Trace(trace.steps.assign(grad_norm=early, total_loss=late), None, trace.provenance), GOOD)
    by_signal = {alarm.signal: alarm for alarm in found.alarms}
    assert 5 < by_signal["grad_norm"].excess < 0.3 * by_signal["total_loss"].excess
    assert by_signal["total_loss"].onset == 40
    assert found.onset == by_signal["grad_norm"].onset == pytest.approx(25, abs=1)


def test_a_weak_departure_that_is_over_before_the_run_departs_is_a_note() -> None:
    trace = run("original", 0)
    steps = np.arange(len(trace.steps))
    weak = trace.values("entropy") + np.where((steps >= 12) & (steps < 16), 0.15, 0)
    late = trace.values("total_loss") + np.where(steps >= 40, 20.0, 0)
    found = detect(Trace(trace.steps.assign(entropy=weak, total_loss=late), None, trace.provenance), GOOD)
    assert found.onset == min(alarm.onset for alarm in found.alarms) == 40
    assert "entropy" not in {alarm.signal for alarm in found.alarms}
    assert any(re.match(r"entropy: moves up at step 1\d, 2\.\d times", note) for note in found.notes)


def test_the_sentence_says_which_mean_it_gives() -> None:
    broken = run("original", 0, fault="wrong_logp", effect=FAULTS["wrong_logp"])
    told = {alarm.signal: alarm.sentence for alarm in detect(broken, GOOD).alarms}
    assert "(geometric mean over steps" in told["logprob_diff_mean"]
    assert "(mean over steps" in told["clip_fraction_high"]
