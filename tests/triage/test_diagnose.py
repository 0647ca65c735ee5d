"""Diagnosis: the learned fingerprints name held-out recorded runs, and say what they do not know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moeproxy.__main__ import main
from moeproxy.errors import ComparisonError
from moeproxy.places import data_dir
from moeproxy.traces import RunInfo, Trace
from moeproxy.traces.pack import load_bench
from moeproxy.traces.reading import read
from moeproxy.triage.baselines import EVERY
from moeproxy.triage.catalogue import load_catalogue
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, detect
from moeproxy.triage.diagnose import Diagnosis, Evidence, diagnose
from moeproxy.triage.evaluate import diagnosis_scores
from moeproxy.triage.fingerprint import SPANS, Units
from moeproxy.triage.jsonable import sure
from moeproxy.triage.learn import catalogue_entries
from moeproxy.triage.learned import load_library, save_library
from moeproxy.triage.library import FLOORS, Library
from moeproxy.triage.metric_checks import at_rest, wrong_metrics
from moeproxy.view.apps.log_verdict_text import evidence_table
from moeproxy.view.incident import open_incidents
from moeproxy.view.render_text import render_markdown
from moeproxy.view.report import ReportInput, compose

FAULTS = ("stale_rollout", "reward_collapse", "nan_poison", "update_freeze")


@pytest.fixture(scope="module")
def recorded() -> dict[str | None, list[Trace]]:
    traces = load_bench(data_dir() / "bench", models=["original"], faults=[*FAULTS, None])
    found: dict[str | None, list[Trace]] = {}
    for trace in traces:
        run = trace.provenance
        usual = run.config["learning_rate"] == 1.5e-4 and run.config["temperature"] == 1.0
        if (run.fault is None and usual and run.seed >= 100) or run.strength == 1:
            found.setdefault(run.fault, []).append(trace)
    return found


@pytest.mark.parametrize("mode", [BESIDE, ALONE])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_fault_is_named_by_runs_of_other_seeds(recorded, fault: str, mode: str) -> None:
    library = load_library(mode)
    trace = recorded[fault][0]
    healthy = recorded[None][:12] if mode == BESIDE else ()
    found = diagnose(trace, healthy, library=library.only(library.seed_N != trace.provenance.seed))
    assert found.detection.verdict == ALARM
    assert found.causes[0].fault == fault
    assert mode == ALONE or not found.unknown
    assert 0 < found.causes[0].confidence <= 1
    assert found.causes[0].check == load_catalogue()[fault].check
    assert any(fault in sentence for sentence in found.sentences)


def test_a_fault_that_nobody_recorded_is_unknown(recorded) -> None:
    library = load_library(BESIDE)
    left_out = library.only(library.fault_N != "reward_collapse")
    found = diagnose(recorded["reward_collapse"][0], recorded[None][:12], library=left_out)
    assert found.unknown
    assert found.distance > found.farthest
    assert any("Unknown" in sentence for sentence in found.sentences)


def test_signals_that_are_not_logged_are_named_and_not_guessed(recorded) -> None:
    trace = recorded["stale_rollout"][0]
    few = [name for name in trace.signals if not name.startswith(("router_agreement", "logprob_diff", "prob_"))]
    found = diagnose(Trace(trace.steps[few], None, trace.provenance), recorded[None][:12])
    if found.detection.verdict == ALARM:
        cause = next((one for one in found.causes if one.fault == "stale_rollout"), None)
        assert cause is None or "router_agreement" in cause.missing
    whole = diagnose(trace, recorded[None][:12])
    assert not whole.causes[0].missing


def test_a_healthy_run_has_no_cause(recorded) -> None:
    found = diagnose(recorded[None][20], recorded[None][:12])
    assert found.causes == ()
    assert not found.unknown


def test_what_is_saved_is_read_back(recorded, tmp_path: Path) -> None:
    found = diagnose(recorded["reward_collapse"][0], recorded[None][:12])
    assert Diagnosis.load(found.save(tmp_path / "found.json")).to_dict() == found.to_dict()
    with pytest.raises(ComparisonError, match="no diagnosis"):
        Diagnosis.load(tmp_path / "absent.json")


def _library(n_faults: int = 3, n_seeds: int = 6, size: float = 5.0, noise: float = 1.0) -> Library:
    rng = np.random.default_rng(0)
    names = tuple(f"s{i}" for i in range(4))
    centre = rng.normal(size=(n_faults, 4 * (len(SPANS) + 1))) * size
    rows = [
        (f, s, centre[f] + noise * rng.normal(size=centre.shape[1])) for f in range(n_faults) for s in range(n_seeds)
    ]
    return Library(
        mode=BESIDE,
        signals=names,
        units=Units(dict.fromkeys(names, (1.0, 1.0))),
        fault_N=np.array([f"fault{f}" for f, _, _ in rows]),
        model_N=np.array(["original"] * len(rows)),
        level_N=np.array(["clear"] * len(rows)),
        seed_N=np.array([s for _, s, _ in rows]),
        features_NF=np.stack([features for _, _, features in rows]),
    )


def test_missing_features_are_left_out_of_mean_and_covariance() -> None:
    library = _library()
    features_F = library.features_NF[0].copy()
    features_F[[0, 5]] = np.nan
    smaller = [f for f in range(len(features_F)) if f not in (0, 5)]
    precision = np.linalg.inv(library.covariance_FF[np.ix_(smaller, smaller)])
    off = features_F[smaller] - library.mean_KF[:, smaller]
    assert library.distances(features_F) == pytest.approx(np.einsum("kf,fg,kg->k", off, precision, off))
    assert library.nearest(features_F) == "fault0"
    assert library.confidences(features_F).sum() == pytest.approx(1)


def test_what_is_like_no_fault_lies_beyond_the_farthest() -> None:
    library = _library().calibrated()
    assert np.isfinite(library.farthest)
    near = [library.per_feature(features) <= library.farthest for features in library.features_NF]
    assert np.mean(near) > 0.9
    assert library.per_feature(np.full(library.features_NF.shape[1], 40.0)) > library.farthest


def test_the_floor_follows_from_how_far_faults_lie_apart() -> None:
    """A variance that is far above the noise hides faults that differ by a little more than the noise."""
    fine = replace(_library(n_faults=12, size=0.12, noise=0.05), floor=FLOORS[0])
    chosen = fine.calibrated()
    assert chosen.floor < FLOORS[0]
    assert _loss(chosen) < _loss(replace(fine, temperature=chosen.temperature))


def _loss(library: Library) -> float:
    """Return the mean loss of runs of the last seed, by those of the others."""
    last_N = library.seed_N == library.seed_N.max()
    rest = library.only(~last_N)
    chances = [
        rest.confidences(features)[rest.faults.index(fault)]
        for features, fault in zip(library.features_NF[last_N], library.fault_N[last_N], strict=True)
    ]
    return float(-np.log(chances).mean())


def test_scores_of_all_models_together_are_of_all_their_runs() -> None:
    one = _library()
    other = replace(one, model_N=np.full(len(one.model_N), "cluster-4"), features_NF=one.features_NF[::-1])
    both = replace(
        one,
        **{
            name: np.concatenate([getattr(one, name), getattr(other, name)])
            for name in ("fault_N", "model_N", "level_N", "seed_N", "features_NF")
        },
    )
    rows = {(row["tested"], row["trained"]): row for row in diagnosis_scores(both, "clear")}
    for trained in ("all models", "the same model", "other models only"):
        each = [rows[tested, trained]["accuracy"] for tested in ("original", "cluster-4")]
        assert rows[EVERY, trained]["accuracy"] == pytest.approx(np.mean(each))
    # What the other model calls fault0 is fault2 here: nothing is right, and fault1 alone lies in the same place.
    assert rows[EVERY, "the same model"]["accuracy"] == 1
    assert rows[EVERY, "other models only"]["accuracy"] == pytest.approx(1 / 3)


def test_a_library_comes_back_from_its_files(tmp_path: Path) -> None:
    library = _library().calibrated()
    save_library(library, tmp_path)
    again = load_library(BESIDE, tmp_path)
    assert again.faults == library.faults
    assert again.features_NF == pytest.approx(library.features_NF, rel=1e-3)
    kept = ("floor", "temperature", "farthest", "units")
    assert [getattr(again, name) for name in kept] == [getattr(library, name) for name in kept]
    with pytest.raises(ComparisonError, match="no fingerprints"):
        load_library(BESIDE, tmp_path / "absent")


def test_the_written_catalogue_is_the_labs() -> None:
    assert dict(load_catalogue()) == catalogue_entries()
    assert set(load_library(BESIDE).faults) <= set(load_catalogue())


def _trace(**signals: list[float]) -> Trace:
    return Trace(pd.DataFrame(signals), None, RunInfo("original", "original", 32, 0))


def test_metrics_that_cannot_be_right_are_named() -> None:
    (sentence,) = wrong_metrics(_trace(kl=[0.1, -0.2, 0.1]))
    assert sentence.startswith("kl cannot be negative")
    assert "-0.2 at step 1" in sentence
    assert "outside 0 to 1" in wrong_metrics(_trace(clip_fraction_low=[0.1, 1.4]))[0]
    assert "exceeds 1" in wrong_metrics(_trace(prob_pearson=[0.9, 1.2]))[0]
    assert wrong_metrics(_trace(kl=[0.1, 0.2], reward_mean=[-1.0, 2.0], grad_norm=[1.0, 2.0])) == ()


def test_a_metric_that_repeats_itself_to_the_last_bit_is_named() -> None:
    moving = list(np.linspace(0.1, 0.9, 15))
    assert "repeats 0.9 to the last bit for 21 steps" in wrong_metrics(_trace(entropy=[*moving, *([0.9] * 20)]))[0]
    assert wrong_metrics(_trace(entropy=moving)) == ()
    assert wrong_metrics(_trace(aux_loss=[0.0] * 30)) == ()


def test_a_share_may_stay_at_its_bound() -> None:
    """As in a healthy recorded run, whose router agreed with itself to the end."""
    share = [*np.linspace(0.9, 0.99, 20), *([1.0] * 20)]
    (said,) = wrong_metrics(_trace(**{"router_agreement/0": share, "entropy": share}))
    assert said.startswith("entropy repeats 1")


def test_a_bound_that_is_reached_is_no_wrong_metric() -> None:
    rising, at_cap = [float(n) for n in range(4, 8)], [8.0] * 20
    assert wrong_metrics(_trace(response_length=[*rising, *at_cap], truncated=[0.5] * 4 + [1.0] * 20)) == ()
    assert wrong_metrics(_trace(response_length=[*rising, *at_cap])) == ()
    assert "repeats 8" in wrong_metrics(_trace(response_length=[*rising, *at_cap], truncated=[0.5] * 24))[0]
    assert "repeats 7.3" in wrong_metrics(_trace(response_length=[*rising, *([7.3] * 20)]))[0]
    solved = [0.2, 0.5, 0.7, 0.9, *([1.0] * 20)]
    assert wrong_metrics(_trace(reward_mean=solved, reward_std=[0.3] * 4 + [0.0] * 20)) == ()
    assert wrong_metrics(_trace(reward_mean=solved, zero_variance_groups=[0.3] * 4 + [1.0] * 20)) == ()
    assert "repeats 1" in wrong_metrics(_trace(reward_mean=solved, reward_std=[0.3] * 24))[0]


@pytest.mark.parametrize(
    ("definition", "may"),
    [
        ("as the reward's penalty: with its sign and coefficient", True),
        ("the estimate that kl_estimator names, mean over sequences", True),
        ("mean over the batches since the last log; k3 estimate", False),
        ("", False),
    ],
)
def test_a_kl_may_be_negative_where_its_definition_says_so(definition: str, may: bool) -> None:
    trace = _trace(kl=[0.1, -0.2, 0.1])
    info = replace(trace.provenance, config={"log": {"definitions": {"kl": definition}}})
    assert (wrong_metrics(Trace(trace.steps, None, info)) == ()) == may


def test_metrics_that_never_move_are_told() -> None:
    moving = [float(n % 7) for n in range(20)]
    (told,) = at_rest(_trace(entropy=[0.5] * 20, kl=[0.0] * 20, truncated=[0.0] * 20, reward_mean=moving))
    assert "at all 20 steps" in told
    assert told.endswith("entropy (0.5).")
    (zeros,) = at_rest(_trace(entropy=[0.0] * 20, grad_norm=[0.0] * 20))
    assert "entropy (0), grad_norm (0)" in zeros
    assert at_rest(_trace(reward_mean=moving)) == ()
    assert at_rest(_trace(entropy=[0.5] * 5)) == ()


def test_the_command_tells_scripts_by_its_exit_code(recorded, tmp_path: Path, capsys) -> None:
    good = [trace.save(tmp_path / f"good{i}.parquet") for i, trace in enumerate(recorded[None][:8])]
    broken = recorded["reward_collapse"][0].save(tmp_path / "broken.parquet")
    healthy = ["--healthy", *map(str, good)]
    assert main(["triage", str(broken), *healthy]) == 1
    assert "reward_collapse" in capsys.readouterr().out
    assert main(["triage", str(broken), "--json", *healthy]) == 1
    assert '"verdict": "alarm"' in capsys.readouterr().out
    fine = recorded[None][20].save(tmp_path / "fine.parquet")
    assert main(["triage", str(fine), *healthy]) == 0
    (tmp_path / "crash.log").write_text("Traceback (most recent call last):\nRuntimeError: boom\n")
    assert main(["triage", str(tmp_path / "crash.log")]) == 2
    assert "could not judge" in capsys.readouterr().out
    assert main(["triage", str(tmp_path / "absent.log")]) == 2


def test_values_that_are_not_finite_are_evidence(tmp_path: Path) -> None:
    """A cause is never named with nothing that speaks for it; nothing is said to be beyond doubt."""
    rows = [
        {
            "step": n,
            "grad_norm": 1 + n * 37 % 11 / 100,
            "reward_mean": 0.5 + n * 53 % 7 / 100,
            "entropy": 1 + n % 3 / 50,
        }
        for n in range(1, 41)
    ]
    for row in rows[25:]:
        row["grad_norm"] = float("inf")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = diagnose(read(tmp_path / "a.jsonl")[0])
    first = found.causes[0]
    assert "grad_norm is not finite (in recorded runs too)" in [one.sentence for one in first.supports]
    assert ("not finite", "not finite") in [one.cells for one in first.supports]
    text = " ".join(found.sentences)
    assert "for: grad_norm is not finite" in text
    assert "100%" not in text
    assert Diagnosis.load(found.save(tmp_path / "d.json")).sentences == found.sentences
    shown = " ".join(evidence_table(first).astype(str).to_numpy().ravel())
    assert "for grad norm not finite not finite not finite" in shown
    report = render_markdown(compose(ReportInput(incidents=open_incidents(tmp_path / "a.jsonl"))))
    assert "grad_norm is not finite (in recorded runs too)" in report


def test_what_others_show_and_this_run_does_not_speaks_against() -> None:
    one, other = Evidence("kl", "not finite", 0.0, 1.0), Evidence("kl", "not finite", 1.0, 0.0)
    assert one.sentence == "kl is finite (in recorded runs it is not)"
    assert other.sentence == "kl is not finite (in recorded runs it is)"


@pytest.mark.bad_types
@pytest.mark.parametrize("judge", [detect, diagnose])
def test_one_run_in_place_of_healthy_ones_is_refused(recorded, judge) -> None:
    with pytest.raises(ComparisonError, match=r"one Trace in place of several runs.*a list of runs"):
        judge(recorded["nan_poison"][0], recorded[None][0])


def test_one_healthy_run_is_too_few_and_equal_ones_are_counted(recorded) -> None:
    with pytest.raises(ComparisonError, match="1 healthy run that serves; 5 left out: equal to another one"):
        diagnose(recorded["nan_poison"][0], recorded[None][:1] * 6)


def test_no_confidence_is_full() -> None:
    said = [sure(value) for value in (1.0, 0.996, 0.99, 0.5, 0.004)]
    assert said == ["over 99%", "over 99%", "99%", "50%", "below 1%"]
