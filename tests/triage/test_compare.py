"""compare on synthetic runs of known answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import ComparisonError
from moeproxy.traces import Trace
from moeproxy.triage.compare import Comparison, compare, compare_all
from tests.triage.synthetic import CALIBRATION, FAULTS, SCORED, noise, run, runs, scaled

SEEDS: dict[str, Any] = {"calibration_seeds": CALIBRATION, "scored_seeds": SCORED}
SILENT = {fault: {} for fault in FAULTS}


@pytest.fixture(scope="module")
def original() -> list[Trace]:
    return runs("original", 32, FAULTS)


@pytest.fixture(scope="module")
def zoo(original: list[Trace]) -> list[Trace]:
    """Return the original, a faithful proxy of another scale, a deaf one and a contrary one."""
    return [
        *original,
        *runs("cluster-16", 16, FAULTS, scale=0.3),
        *runs("random-16-s0", 16, SILENT, method="random"),
        *runs("first-16", 16, scaled(FAULTS, -1), method="first"),
    ]


def changed(trace: Trace, **columns: object) -> Trace:
    return Trace(trace.steps.assign(**columns), None, trace.provenance)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_answers_are_found(zoo: list[Trace], fault: str) -> None:
    result = compare(zoo, fault, **SEEDS)
    verdicts = {proxy.model: proxy.verdict for proxy in result.proxies}
    assert verdicts == {
        "cluster-16": "reproduced",
        "random-16-s0": "not reproduced",
        "first-16": "not reproduced",
    }
    assert set(result.significant) == set(FAULTS[fault])
    assert result.visible
    good, deaf, wrong = (result.proxy(model) for model in ("cluster-16", "random-16-s0", "first-16"))
    assert good.direction.mean == 1.0
    assert good.rank.mean > good.rank_null_high
    assert good.retrieved == (fault,) * 3
    assert abs(good.onset_difference.mean) <= 3
    assert deaf.rank.mean < deaf.rank_null_high
    assert deaf.found.mean == 0
    assert wrong.direction.mean == 0
    assert wrong.rank.mean < 0
    assert result.chance == pytest.approx(1 / 3)
    assert result.control.false_signals == 0
    assert result.control.false_response_rate < 0.05
    assert "no uninformed proxy reproduces it fully" in " ".join(result.statements)
    assert "higher in 3 of 3 seeds (sign test p = 0.25): no difference shown" in " ".join(result.statements)


def test_weak_response_is_partly_or_not_reproduced(original: list[Trace]) -> None:
    faint = runs("frequency-8", 8, scaled(FAULTS, 0.1), method="frequency")
    proxy = compare([*original, *faint], "quiet_update", **SEEDS).proxies[0]
    assert proxy.verdict in ("partly", "not reproduced")
    assert proxy.reason.startswith("fails: ")


def test_random_proxies_that_do_as_well_are_said_to(original: list[Trace]) -> None:
    twins = runs("cluster-16", 16, FAULTS) + runs("random-16-s0", 16, FAULTS, method="random")
    result = compare([*original, *twins], "quiet_update", **SEEDS)
    said = " ".join(result.statements)
    assert "random proxies reproduce it as well (1 of 1 uninformed proxies)" in said
    assert "the choice of experts matters" in said
    alone = compare([*original, *twins[:12]], "quiet_update", **SEEDS)
    assert "nothing is said about the choice" in " ".join(alone.statements)


def test_healthy_twins_are_not_visible(zoo: list[Trace]) -> None:
    silent = [trace for trace in zoo if trace.provenance.model != "original"] + runs("original", 32, SILENT)
    result = compare(silent, "wrong_logp", **SEEDS)
    assert not result.visible
    assert {proxy.verdict for proxy in result.proxies} == {"fault not visible on the original"}
    assert result.statements[0].startswith("The original does not move beyond what healthy runs differ by")


def test_visible_is_rarely_claimed_without_a_fault() -> None:
    claims = []
    for trial in range(20):
        seeds = tuple(range(100 + 10 * trial, 106 + 10 * trial))
        traces = runs("original", 32, {"none": {}}, seeds=seeds[:3], calibration=seeds[3:])
        claims.append(compare(traces, "none", calibration_seeds=seeds[3:], scored_seeds=seeds[:3]).visible)
    assert np.mean(claims) <= 0.15


def test_rescaling_a_model_moves_no_verdict(zoo: list[Trace]) -> None:
    names = ["grad_norm", "grad_norm_router", "update_norm", "policy_loss", "aux_loss", "reward_mean"]
    moved = [
        changed(trace, **{name: 37.0 * trace.steps[name] for name in names})
        if trace.provenance.model == "cluster-16"
        else trace
        for trace in zoo
    ]
    before, after = compare(zoo, "quiet_update", **SEEDS), compare(moved, "quiet_update", **SEEDS)
    assert [proxy.verdict for proxy in before.proxies] == [proxy.verdict for proxy in after.proxies]
    np.testing.assert_allclose(before.proxy("cluster-16").response, after.proxy("cluster-16").response, rtol=1e-6)


def test_result_depends_on_neither_order_nor_other_proxies(zoo: list[Trace]) -> None:
    whole = compare(zoo, "wrong_logp", **SEEDS)
    shuffled = [zoo[i] for i in noise("order").permutation(len(zoo))]
    # repr: a NaN does not equal itself
    assert repr(compare(shuffled, "wrong_logp", **SEEDS).proxies) == repr(whole.proxies)
    few = [trace for trace in zoo if trace.provenance.model in ("original", "cluster-16")]
    assert compare(few, "wrong_logp", **SEEDS).proxy("cluster-16") == whole.proxy("cluster-16")


def test_thresholds_do_not_see_scored_runs(zoo: list[Trace]) -> None:
    def loud(trace: Trace) -> Trace:
        scored = trace.provenance.seed in SCORED
        return changed(trace, entropy=trace.steps["entropy"] * 50) if scored else trace

    before, after = (compare(each, "wrong_logp", **SEEDS) for each in (zoo, [loud(trace) for trace in zoo]))
    assert before.control.threshold == after.control.threshold
    assert before.response != after.response


def test_not_finite_counts_and_missing_is_skipped(original: list[Trace]) -> None:
    def edited(trace: Trace) -> Trace:
        nan = trace.steps["grad_norm"].where(trace.steps.index < 25, np.nan)
        broken = {} if trace.provenance.healthy else {"grad_norm": nan}
        out = changed(trace, **broken)
        return Trace(out.steps.drop(columns="kl"), None, out.provenance)

    result = compare([edited(trace) for trace in original], "wrong_logp", **SEEDS)
    assert "grad_norm" in result.significant
    assert result.response[result.signals.index("grad_norm")][1] == 1000.0
    assert dict(result.skipped)["kl"].startswith("skipped: needs kl")


def test_healthy_run_that_is_not_finite_drops_the_signal(original: list[Trace]) -> None:
    traces = [changed(original[0], entropy=np.inf), *original[1:]]
    result = compare(traces, "wrong_logp", **SEEDS)
    assert "not finite in a healthy run" in dict(result.skipped)["entropy"]


def test_proxy_without_a_signal_is_judged_by_the_others(zoo: list[Trace]) -> None:
    def poorer(trace: Trace) -> Trace:
        layered = [name for name in trace.signals if name.startswith("router_")]
        return Trace(trace.steps.drop(columns=layered), None, trace.provenance)

    traces = [poorer(trace) if trace.provenance.model == "cluster-16" else trace for trace in zoo]
    proxy = compare(traces, "wrong_logp", **SEEDS).proxy("cluster-16")
    assert proxy.verdict == "reproduced"
    assert "skipped: cluster-16 needs router_load_entropy" in proxy.notes


def test_constant_signal_is_dropped_and_named_but_a_tell_tale_is_not(zoo: list[Trace]) -> None:
    def still(trace: Trace) -> Trace:
        loud = trace.provenance.fault == "wrong_logp"
        diff = np.where((trace.steps.index >= 20) & loud, 0.05, 0.0)
        return changed(trace, aux_loss=0.0, logprob_diff_mean=diff)

    result = compare([still(trace) for trace in zoo], "wrong_logp", **SEEDS)
    assert result.constant == ("aux_loss",)
    assert result.significant[0] == "logprob_diff_mean"


def test_excluded_signals_are_left_out(zoo: list[Trace]) -> None:
    result = compare(zoo, "wrong_logp", exclude=["logprob_diff_mean"], **SEEDS)
    assert ("logprob_diff_mean", "left out on request") in result.skipped
    assert "logprob_diff_mean" not in result.signals
    assert "seconds_per_step" not in result.signals


def test_one_seed_is_called_an_indication(zoo: list[Trace]) -> None:
    result = compare(zoo, "quiet_update", calibration_seeds=CALIBRATION, scored_seeds=[0])
    assert result.proxy("cluster-16").verdict == "reproduced"
    assert "an indication, not a result" in result.proxy("cluster-16").reason
    assert np.isnan(result.proxy("cluster-16").rank.low)
    assert "sign test p = 1" in " ".join(result.statements)


def test_default_seeds(zoo: list[Trace]) -> None:
    result = compare(zoo, "quiet_update")
    assert (result.calibration_seeds, result.scored_seeds) == (CALIBRATION, SCORED)
    assert len(compare_all(zoo, **SEEDS)) == 2


def test_a_run_of_two_faults_is_no_run_of_the_first(zoo: list[Trace]) -> None:
    one = next(trace for trace in zoo if trace.provenance.fault == "wrong_logp")
    two = Trace(one.steps, None, replace(one.provenance, further=(("quiet_update", 1.0, 3),)))
    for traces in ([*zoo, two], [two if trace is one else trace for trace in zoo]):
        with pytest.raises(ComparisonError, match=r"2 faults at once.*not trace\.provenance\.further"):
            compare(traces, "wrong_logp", **SEEDS)


def test_model_that_cannot_be_judged_is_named(zoo: list[Trace]) -> None:
    lone = run("merge-8", 0, n_experts=8)
    result = compare([*zoo, lone], "quiet_update", **SEEDS)
    assert dict(result.skipped)["merge-8"].startswith("skipped: 'merge-8' has no healthy and faulty run")


def test_live_pairs_are_preferred_and_mixed_ones_noted(zoo: list[Trace]) -> None:
    broken = {"fault": "wrong_logp", "effect": FAULTS["wrong_logp"]}
    live = [run("original", 0, n_experts=32, source="live", **options) for options in ({}, broken)]
    assert compare([*zoo, *live], "wrong_logp", **SEEDS).sources == ("live", "recorded")
    gone = ("original", "wrong_logp", 0)
    rest = [t for t in zoo if (t.provenance.model, t.provenance.fault, t.provenance.seed) != gone]
    notes = compare([*rest, live[1]], "wrong_logp", **SEEDS).notes
    assert notes == ("original, seed 0: a live and a recorded run are paired",)


def test_pairs_that_differ_before_the_onset_are_noted(original: list[Trace]) -> None:
    seed0 = next(t for t in original if t.provenance.healthy and t.provenance.seed == 0)
    other = changed(seed0, entropy=seed0.steps["entropy"] + 1e-9)
    traces = [other if trace is seed0 else trace for trace in original]
    assert compare(traces, "wrong_logp", **SEEDS).notes == (
        "original, seed 0: the two runs differ before the onset already",
    )


def test_faulty_run_that_died_early(zoo: list[Trace]) -> None:
    def short(trace: Trace) -> Trace:
        cut = trace.steps.loc[:38] if trace.provenance.fault == "wrong_logp" else trace.steps
        return Trace(cut, None, trace.provenance)

    result = compare([short(trace) for trace in zoo], "wrong_logp", **SEEDS)
    assert np.isnan(result.response[0][3])
    assert result.proxy("cluster-16").verdict == "reproduced"


def test_round_trip(zoo: list[Trace], tmp_path: Path) -> None:
    result = compare(zoo, "quiet_update", **SEEDS)
    path = result.save(tmp_path / "a.json")
    again = Comparison.load(path)
    assert repr(again) == repr(result)
    assert again.to_frame().equals(result.to_frame())
    assert again.significant == result.significant
    assert repr(again.proxies) == repr(result.proxies)
    assert "NaN" not in path.read_text()
    frame = result.to_frame()
    assert frame["n_experts"].tolist() == sorted(frame["n_experts"], reverse=True)
    assert "<table" in result._repr_html_()
    path.write_text(path.read_text()[:100])
    with pytest.raises(ComparisonError, match=r"a\.json.*compare again"):
        Comparison.load(path)
    path.write_text('{"format": "moeproxy.comparison", "version": 99}')
    with pytest.raises(ComparisonError, match="version 99"):
        Comparison.load(path)
    with pytest.raises(ComparisonError, match=r"none\.json"):
        Comparison.load(tmp_path / "none.json")
    with pytest.raises(ComparisonError, match="no result for 'x'"):
        result.proxy("x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fault": "typo"}, "no run with the fault 'typo'.*quiet_update"),
        ({"strength": 0.5}, "not run at strength 0.5"),
        ({"calibration_seeds": (0, 1), "scored_seeds": (1, 2)}, r"seeds \[1\] both calibrate"),
        ({"calibration_seeds": (10,)}, "at least two that calibrate"),
        ({"calibration_seeds": (90, 91)}, "0 healthy calibration runs"),
        ({"scored_seeds": (90,)}, "no healthy and faulty run"),
        ({"original": "other"}, "no healthy run of 'other'"),
        ({"window": 100}, "40 steps after the onset"),
    ],
)
def test_bad_questions(zoo: list[Trace], options: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"fault": "quiet_update", **SEEDS, **options}
    with pytest.raises(ComparisonError, match=message):
        compare(zoo, **asked)


def test_ambiguous_traces(zoo: list[Trace]) -> None:
    with pytest.raises(ComparisonError, match="two traces of the same run"):
        compare([*zoo, zoo[0]], "quiet_update", **SEEDS)
    faulty = next(trace for trace in zoo if not trace.provenance.healthy)
    weak = Trace(faulty.steps, None, replace(faulty.provenance, strength=0.5))
    with pytest.raises(ComparisonError, match="strengths"):
        compare([*zoo, weak], "quiet_update", **SEEDS)
    late = Trace(faulty.steps, None, replace(faulty.provenance, onset=30, seed=77))
    with pytest.raises(ComparisonError, match="onsets"):
        compare([*zoo, late], "quiet_update", **SEEDS)


def test_imports_no_torch() -> None:
    code = "import sys, moeproxy.triage.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
