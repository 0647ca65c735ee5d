"""Detection: planted faults are found from their onset on, healthy runs are left alone, oddities are notes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import ComparisonError
from moeproxy.traces import Trace
from moeproxy.triage.alone import Priors
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR, Detection, detect
from moeproxy.triage.judged import Judged
from tests.triage.synthetic import FAULTS, ONSET, run

GOOD = [run("original", seed) for seed in range(100, 112)]
PRIORS = Priors.of(
    [Judged.of(run(model, seed)) for model in ("one", "two", "three") for seed in range(12)],
    [model for model in ("one", "two", "three") for _ in range(12)],
)


def _with(trace: Trace, **signals: np.ndarray) -> Trace:
    return Trace(trace.steps.assign(**signals), trace.trajectories, trace.provenance)


def _changed(seed: int, name: str, change, **kwargs) -> Trace:
    trace = run("original", seed, **kwargs)
    values_S = trace.values(name).copy()
    return _with(trace, **{name: change(values_S)})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("beside", [True, False])
def test_a_planted_fault_is_found_from_its_onset_on(fault: str, beside: bool) -> None:
    broken = run("original", 0, fault=fault, effect=FAULTS[fault])
    found = detect(broken, GOOD if beside else (), priors=PRIORS)
    assert found.verdict == ALARM
    assert abs(found.onset - ONSET) <= 3
    named = {alarm.signal for alarm in found.alarms}
    assert len(named & set(FAULTS[fault])) > len(FAULTS[fault]) / 2
    strongest = max(FAULTS[fault], key=lambda name: abs(FAULTS[fault][name]))
    alarm = next(one for one in found.alarms if one.signal == strongest)
    assert alarm.direction == ("up" if FAULTS[fault][strongest] > 0 else "down")
    assert alarm.sentence.startswith(strongest)
    assert f"step {alarm.onset}" in alarm.sentence


def test_healthy_runs_seldom_alarm() -> None:
    """The declared rate is two in a hundred runs, here of 60 steps: 0.3 false alarms in 1,000 steps."""
    beside = [detect(run("original", seed), GOOD).verdict for seed in range(200, 240)]
    alone = [detect(run("new", seed), priors=PRIORS).verdict for seed in range(200, 240)]
    assert beside.count(ALARM) <= 3
    assert alone.count(ALARM) <= 3


def test_the_unit_of_a_positive_signal_moves_no_verdict() -> None:
    broken = run("original", 0, fault="quiet_update", effect=FAULTS["quiet_update"])
    larger = _with(broken, grad_norm=broken.values("grad_norm") * 50)
    good = [_with(one, grad_norm=one.values("grad_norm") * 50) for one in GOOD]
    one, other = detect(broken, GOOD), detect(larger, good)
    assert (one.verdict, one.onset) == (other.verdict, other.onset)
    assert [a.signal for a in one.alarms] == [a.signal for a in other.alarms]
    assert one.strength == pytest.approx(other.strength, rel=1e-6)


def test_a_lone_spike_is_a_note_and_no_alarm() -> None:
    def spike(values_S: np.ndarray) -> np.ndarray:
        values_S[30] *= 50
        return values_S

    found = detect(_changed(0, "grad_norm", spike), GOOD)
    assert found.verdict == HEALTHY
    assert any("grad_norm: lone spike at step" in note for note in found.notes)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_value_that_is_not_finite_is_a_note_and_several_are_an_alarm(bad: float) -> None:
    def some(places: slice):
        def change(values_S: np.ndarray) -> np.ndarray:
            values_S[places] = bad
            return values_S

        return change

    once = detect(_changed(0, "grad_norm", some(slice(30, 31))), GOOD)
    assert once.verdict == HEALTHY
    assert any("grad_norm: not finite at step" in note for note in once.notes)
    lasting = detect(_changed(0, "grad_norm", some(slice(30, None))), GOOD)
    assert lasting.verdict == ALARM
    first = next(alarm for alarm in lasting.alarms if alarm.signal == "grad_norm")
    assert first.direction == "not finite"
    assert lasting.onset == first.onset == run("original", 0).steps.index[30]
    assert np.isinf(first.size)


def test_a_transient_is_called_one() -> None:
    def bump(values_S: np.ndarray) -> np.ndarray:
        values_S[20:32] += 40 * np.std(np.diff(values_S))
        return values_S

    found = detect(_changed(0, "entropy", bump), GOOD)
    alarm = next(one for one in found.alarms if one.signal == "entropy")
    steps = run("original", 0).steps.index
    assert alarm.kind == "transient"
    assert alarm.recovered == pytest.approx(steps[32], abs=1)
    assert "is back from step" in alarm.sentence


def test_too_few_steps_say_how_many_are_needed() -> None:
    short = run("original", 0, n_steps=12)
    assert detect(short, priors=PRIORS).verdict == UNCLEAR
    assert "at least 15" in detect(short, priors=PRIORS).notes[0]
    assert detect(short, GOOD).verdict != UNCLEAR, "beside healthy runs ten are enough"
    with pytest.raises(ComparisonError, match="at least 6"):
        detect(short, GOOD[:5])


def test_a_log_without_a_judged_signal_could_not_be_judged() -> None:
    trace = run("original", 0)
    bare = Trace(trace.steps[["seconds_per_step"]], None, trace.provenance)
    found = detect(bare, priors=PRIORS)
    assert found.verdict == UNCLEAR
    assert "seconds_per_step" in found.notes[0]


def test_few_signals_are_enough() -> None:
    broken = run("original", 0, fault="wrong_logp", effect=FAULTS["wrong_logp"])
    names = ["logprob_diff_mean", "reward_mean", "kl"]
    found = detect(Trace(broken.steps[names], None, broken.provenance), GOOD)
    assert found.verdict == ALARM
    assert set(found.signals) == set(names)


def test_other_settings_of_the_healthy_runs_are_told() -> None:
    def at(rate: float, trace: Trace) -> Trace:
        info = dataclasses.replace(trace.provenance, config={"learning_rate": rate})
        return Trace(trace.steps, trace.trajectories, info)

    found = detect(at(1e-4, run("original", 0)), [at(2e-4, one) for one in GOOD])
    assert any("another learning_rate (0.0002, here 0.0001)" in note for note in found.notes)
    same = detect(at(1e-4, run("original", 0)), [at(1e-4, one) for one in GOOD])
    assert not any("learning_rate" in note for note in same.notes)


def test_steps_that_healthy_runs_do_not_reach_are_not_called_healthy() -> None:
    found = detect(run("original", 0, n_steps=90), GOOD)
    assert found.verdict == UNCLEAR
    assert found.n_steps == 60
    assert found.sentences[0] == "Could not judge the whole run."
    assert "do not reach the other 30 of the run's 90 steps" in found.notes[0]
    assert "steps 0 to 89" in found.notes[0]
    assert any("60 of 90 steps" in note for note in found.notes)
    broken = detect(run("original", 0, n_steps=90, fault="wrong_logp", effect=FAULTS["wrong_logp"]), GOOD)
    assert broken.verdict == ALARM, "an alarm stays one"
    assert detect(run("original", 0, n_steps=62), GOOD).verdict == HEALTHY, "in two steps no departure shows"


def test_steps_between_those_of_the_healthy_runs_are_covered() -> None:
    seldom = [Trace(one.steps.iloc[::4], None, one.provenance) for one in GOOD]
    assert detect(run("original", 0), seldom).verdict == HEALTHY


def test_a_broken_run_among_the_healthy_ones_is_named_and_left_out() -> None:
    effects = {"a": {"grad_norm": 30.0, "kl": 30.0, "entropy": 30.0}, "b": {"reward_mean": -30.0, "update_norm": 30.0}}
    odd = [
        run("original", seed, fault=fault, effect=effect) for seed, (fault, effect) in enumerate(effects.items(), 50)
    ]
    broken = run("original", 0, fault="wrong_logp", effect=FAULTS["wrong_logp"])
    alone = detect(broken, GOOD[:8])
    for some in (odd[:1], odd):
        found = detect(broken, [*GOOD[:8], *some])
        assert found.strength == pytest.approx(alone.strength)
        told = [note for note in found.notes if "departs from the others" in note]
        assert len(told) == len(some)
        assert all("original, seed 5" in note and note.endswith("it was left out.") for note in told)
        assert found.n_healthy == 8
    few = detect(broken, [*GOOD[:5], odd[0]])
    assert any("Is it healthy?" in note for note in few.notes)
    assert few.n_healthy == 6
    assert not any("departs from the others" in note for note in alone.notes)


def test_a_run_too_short_to_judge_names_values_that_are_not_finite() -> None:
    trace = run("original", 0, n_steps=12)
    values_S = trace.values("grad_norm").copy()
    values_S[4:] = np.nan
    found = detect(_with(trace, grad_norm=values_S), priors=PRIORS)
    assert found.verdict == UNCLEAR
    assert "grad_norm: not finite from step 4 on, at 8 of 12 steps." in found.notes


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    broken = run("original", 0, fault="wrong_logp", effect=FAULTS["wrong_logp"])
    found = detect(broken, GOOD)
    assert Detection.load(found.save(tmp_path / "found.json")) == found
    assert "departs from step" in found._repr_html_()

    def lasting(values_S: np.ndarray) -> np.ndarray:
        values_S[30:] = np.nan
        return values_S

    for odd in (detect(_changed(0, "grad_norm", lasting), GOOD), detect(run("original", 0, n_steps=12), priors=PRIORS)):
        path = odd.save(tmp_path / "odd.json")
        json.loads(path.read_text(), parse_constant=pytest.fail)  # JSON knows no NaN and no infinity
        assert repr(Detection.load(path).to_dict()) == repr(odd.to_dict())
        assert [a.size for a in Detection.load(path).alarms] == [a.size for a in odd.alarms]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ComparisonError, match="no detection"):
        Detection.load(tmp_path / "other.json")


def test_priors_need_two_models_and_come_back_from_a_file(tmp_path: Path) -> None:
    assert Priors.load(PRIORS.save(tmp_path / "priors.json")) == PRIORS
    with pytest.raises(ComparisonError, match="two or more"):
        Priors.of([Judged.of(one) for one in GOOD], ["original"] * len(GOOD))
    with pytest.raises(ComparisonError, match="no priors"):
        Priors.load(tmp_path / "absent.json")


def test_a_signal_that_healthy_runs_lack_is_told() -> None:
    good = [Trace(one.steps.drop(columns=["entropy"]), None, one.provenance) for one in GOOD]
    found = detect(run("original", 0), good)
    assert "entropy" not in found.signals
    assert any("not all healthy runs log it: entropy" in note for note in found.notes)
