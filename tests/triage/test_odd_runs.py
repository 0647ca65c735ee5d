"""Runs as they come: with few signals, cut off, hidden NaN, huge numbers, bad references, slow divergence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moeproxy.__main__ import main
from moeproxy.errors import ComparisonError
from moeproxy.traces import RunInfo, Trace, read
from moeproxy.triage.alone import Priors
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR, detect
from moeproxy.triage.diagnose import diagnose
from tests.triage.synthetic import FAULTS, run
from tests.triage.test_detect import GOOD, PRIORS

STEPS = 200


def _log(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rows(seed: int = 0, n_steps: int = STEPS) -> list[dict]:
    """A run as somebody's logger writes it: reward rises, KL grows, the rest is noise."""
    rng = np.random.default_rng(seed)
    return [
        {
            "step": step,
            "reward": 0.3 + 0.3 * step / n_steps + 0.03 * rng.normal(),
            "kl": 0.02 * step / n_steps * np.exp(0.1 * rng.normal()) + 1e-3,
            "grad_norm": float(np.exp(-1 + 0.15 * rng.normal())),
            "entropy": 0.6 + 0.02 * rng.normal(),
        }
        for step in range(1, n_steps + 1)
    ]


def _only(trace: Trace, *names: str) -> Trace:
    return Trace(trace.steps[list(names)], None, trace.provenance)


@pytest.mark.parametrize("names", [("kl",), ("kl", "entropy"), ("kl", "entropy", "grad_norm")])
@pytest.mark.parametrize("beside", [True, False])
def test_a_run_with_few_signals_is_judged_by_these(names: tuple[str, ...], beside: bool) -> None:
    for seed in range(6):
        found = detect(_only(run("original", seed), *names), GOOD if beside else (), priors=PRIORS)
        assert set(found.signals) == set(names)
        assert {alarm.signal for alarm in found.alarms} <= set(names)
        assert np.isfinite(found.strength)


def test_signals_that_no_fault_is_known_by_give_an_unknown_cause() -> None:
    steps = pd.DataFrame({"value_loss": np.r_[np.full(40, 1.0), np.full(40, 50.0)] * np.exp(0.01 * np.arange(80) % 3)})
    found = diagnose(Trace(steps, None, RunInfo("somebody's", "original", 0, 0)))
    assert found.detection.verdict == ALARM
    assert found.unknown
    assert found.causes == ()
    assert "nothing is among the signals" in found.sentences[-1]


def test_no_signal_in_common_is_an_error_and_no_crash() -> None:
    with pytest.raises(ComparisonError, match="no signal that the run and all healthy runs log"):
        detect(_only(run("original", 0), "kl"), [_only(one, "entropy") for one in GOOD])


def test_runs_read_from_a_log_are_judged_as_they_are(tmp_path: Path) -> None:
    (log,) = read(_log(tmp_path / "run.jsonl", _rows()))
    good = [log for seed in range(1, 9) for log in read(_log(tmp_path / f"{seed}.jsonl", _rows(seed)))]
    assert detect(log).verdict == HEALTHY
    assert detect(log, good).verdict == HEALTHY
    assert diagnose(log, good).causes == ()


def test_an_empty_trace_could_not_be_judged() -> None:
    empty = Trace(run("original", 0).steps.iloc[:0], None, run("original", 0).provenance)
    assert detect(empty, priors=PRIORS).verdict == UNCLEAR
    assert detect(empty, GOOD).verdict == UNCLEAR


@pytest.mark.parametrize("n_last", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_run_that_ends_in_what_is_no_number_alarms(n_last: int, bad: float) -> None:
    trace = run("original", 0)
    values_S = trace.values("grad_norm").copy()
    values_S[-n_last:] = bad
    ended = Trace(trace.steps.assign(grad_norm=values_S), None, trace.provenance)
    for good in (GOOD, ()):
        found = detect(ended, good, priors=PRIORS)
        assert found.verdict == ALARM
        assert found.onset == trace.steps.index[-n_last]
        assert not any("finite between and after" in note for note in found.notes)


def test_values_that_are_finite_again_are_said_to_be() -> None:
    trace = run("original", 0)
    values_S = trace.values("grad_norm").copy()
    values_S[:3] = np.nan
    alarm = detect(Trace(trace.steps.assign(grad_norm=values_S), None, trace.provenance), GOOD).alarms[0]
    assert (alarm.kind, alarm.recovered) == ("transient", trace.steps.index[3])
    assert "it was" not in alarm.sentence, "nothing came before"


def test_nulls_to_the_end_of_a_log_count_as_not_finite(tmp_path: Path) -> None:
    rows = _rows()
    for row in rows[150:]:
        row["grad_norm"] = None
    (log,) = read(_log(tmp_path / "null.jsonl", rows))
    found = detect(log)
    assert found.verdict == ALARM
    assert next(alarm for alarm in found.alarms if alarm.signal == "grad_norm").onset == 151
    for place, row in enumerate(_rows()):
        rows[place] = row | ({"grad_norm": None} if place % 4 == 1 else {})
    (sometimes,) = read(_log(tmp_path / "sometimes.jsonl", rows))
    assert detect(sometimes).verdict == HEALTHY, "a null now and then is nothing measured"


@pytest.mark.parametrize("beside", [True, False])
def test_a_huge_number_overflows_nothing(beside: bool) -> None:
    trace = run("original", 0)
    values_S = trace.values("total_loss").copy()
    values_S[30:] = 1e308
    huge = Trace(trace.steps.assign(total_loss=values_S), None, trace.provenance)
    found = detect(huge, GOOD if beside else (), priors=PRIORS)
    assert found.verdict == ALARM
    assert np.isfinite(found.strength)
    assert all(len(sentence) < 400 for sentence in found.sentences)


def test_references_that_are_short_or_the_same_are_left_out_and_told() -> None:
    broken = run("original", 0, fault="wrong_logp", effect=FAULTS["wrong_logp"])
    plain = detect(broken, GOOD)
    helped = detect(broken, [*GOOD, run("original", 300, n_steps=2), GOOD[0], broken])
    assert helped.verdict == ALARM
    assert helped.strength == pytest.approx(plain.strength)
    assert any("2 left out: equal" in note for note in helped.notes)
    assert any("1 left out: not half as long" in note for note in helped.notes)
    with pytest.raises(ComparisonError, match="1 healthy run that serves; 7 left out"):
        detect(broken, [GOOD[0]] * 8)


def test_steps_that_do_not_meet_are_an_error() -> None:
    later = [Trace(one.steps.set_axis(one.steps.index + 1000), None, one.provenance) for one in GOOD]
    with pytest.raises(ComparisonError, match="no step in common: the run has 0 to 59, the healthy ones 1000 to 1059"):
        detect(run("original", 0), later)


def test_a_fault_from_the_first_step_on_is_seen_there_beside_healthy_runs() -> None:
    trace = run("original", 0)
    off = {name: trace.values(name) * 3 for name in ("grad_norm", "update_norm", "logprob_diff_mean", "kl")}
    found = detect(Trace(trace.steps.assign(**off), None, trace.provenance), GOOD)
    assert found.verdict == ALARM
    assert found.onset == trace.steps.index[0]
    assert {alarm.onset for alarm in found.alarms if alarm.signal in off} == {trace.steps.index[0]}
    alone = detect(trace, priors=PRIORS)
    assert any("from the beginning cannot be seen" in note for note in alone.notes)


def test_every_sentence_agrees_with_its_numbers() -> None:
    for fault, effect in FAULTS.items():
        for good in (GOOD, ()):
            for seed in range(3):
                for alarm in detect(run("original", seed, fault=fault, effect=effect), good, priors=PRIORS).alarms:
                    assert (alarm.after > alarm.expected) == (alarm.direction == "up"), alarm
                    words = "was to be expected" if good else "was usual"
                    assert f"where {alarm.expected:.3g} {words}" in alarm.sentence
                    assert alarm.onset <= alarm.shown[0] <= alarm.shown[1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kl", lambda value, far: value * np.exp(9 * far)),
        ("grad_norm", lambda value, far: value * np.exp(9 * far)),
        ("entropy", lambda value, far: value * np.exp(4 * far)),
    ],
)
@pytest.mark.parametrize("n_steps", [200, 1000])
def test_slow_divergence_is_found_alone(name: str, change, n_steps: int, tmp_path: Path) -> None:
    rows = _rows(n_steps=n_steps)
    for place, row in enumerate(rows):
        row[name] = float(change(row[name], max(0.0, place / n_steps - 0.4)))
    (log,) = read(_log(tmp_path / "slow.jsonl", rows))
    found = detect(log)
    assert found.verdict == ALARM
    assert name in {alarm.signal for alarm in found.alarms}


@pytest.mark.parametrize("n_steps", [200, 1000])
def test_learning_alone_is_no_fault(n_steps: int, tmp_path: Path) -> None:
    logs = [read(_log(tmp_path / f"{seed}.jsonl", _rows(seed, n_steps)))[0] for seed in range(12)]
    assert sum(detect(log).verdict == ALARM for log in logs) <= 1


def test_rounded_values_have_the_noise_of_their_rounding(tmp_path: Path) -> None:
    rows = [row | {"loss": round(4e-5 * row["step"] / STEPS, 4)} for row in _rows()]
    (log,) = read(_log(tmp_path / "rounded.jsonl", rows))
    assert detect(log).verdict == HEALTHY


def test_what_is_logged_seldom_is_told_and_not_counted_as_steps(tmp_path: Path) -> None:
    rows = [row | ({"clip_fraction": 0.01} if row["step"] % 10 == 0 else {}) for row in _rows()]
    (log,) = read(_log(tmp_path / "seldom.jsonl", rows))
    found = detect(log)
    assert found.n_steps == STEPS
    assert "clip_fraction" not in found.signals
    seldom = run("original", 0).steps[["kl"]].where(np.arange(60)[:, None] % 6 == 0)
    few = detect(Trace(seldom.astype("Float64"), None, run("original", 0).provenance), priors=PRIORS)
    assert few.verdict == UNCLEAR
    assert "10 steps with values" in few.notes[0]


def test_a_resume_is_told_beside_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(n_steps=90)
    path = _log(tmp_path / "resumed.jsonl", [*rows[:60], *rows[40:]])
    assert main(["triage", str(path)]) == 0
    assert "resumed at step 41 after step 60" in capsys.readouterr().out


def test_keys_of_ones_own_are_mapped_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"i": row["step"], "gn": row["grad_norm"], "r": row["reward"]} for row in _rows()]
    path = _log(tmp_path / "own.jsonl", rows)
    assert main(["triage", str(path)]) == 2
    assert "columns i, gn, r" in capsys.readouterr().out
    assert main(["triage", str(path), "--step", "i", "--map", "gn=grad_norm", "r=reward_mean"]) == 0
    assert "2 signals over 200 steps" in capsys.readouterr().out


def test_priors_hold_what_is_shipped() -> None:
    shipped = Priors.load()
    assert shipped.n_runs >= 100
    assert set(shipped.reach) <= set(shipped.contrast)
