"""The fidelity study on synthetic runs of known answer, and on the recorded ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moeproxy.errors import ComparisonError
from moeproxy.files import sha256_file
from moeproxy.traces import Trace, load_dir
from moeproxy.traces.pack import load_bench, save_pack
from moeproxy.triage.study import PAGE, RESULT, Study, main, study, study_folder
from moeproxy.triage.study_page import page, unfound
from moeproxy.triage.study_protocol import FAMILIES, Protocol
from moeproxy.triage.study_signals import signal_table
from moeproxy.triage.study_spread import calibrate, healthy_means
from tests.triage import study_synthetic as made

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def original() -> list[Trace]:
    return made.runs("original", made.FAULTS, method="original")


@pytest.fixture(scope="module")
def traces(original: list[Trace]) -> list[Trace]:
    return [
        *original,
        *made.runs("cluster-16", made.FAULTS, scale=0.01),
        *made.runs("random-16", made.unrelated(made.FAULTS)),
        *made.runs("merge-16", {fault: {} for fault in made.FAULTS}),
        *made.runs("first-16", made.permuted(made.FAULTS)),
    ]


@pytest.fixture(scope="module")
def result(traces: list[Trace]) -> Study:
    return study(traces, made.PROTOCOL)


def test_a_proxy_that_responds_alike_is_found_every_time(result: Study) -> None:
    for measure in ("top1", "top3", "reciprocal_rank", "detected", "departs"):
        assert result.value("cluster-16", "clear", measure)[0] == 1, measure
    assert result.value("cluster-16", "clear", "direction")[0] == 1
    assert result.value("cluster-16", "clear", "onset_difference")[0] == pytest.approx(0, abs=0.2)
    own, other = (result.value("cluster-16", "clear", name)[0] for name in ("rank", "rank_other"))
    assert own > other + 0.15


def test_the_original_is_found_among_its_own_other_seeds(result: Study) -> None:
    assert result.value("original", "clear", "top1") == (1.0, 1.0, 1.0)


def test_an_unrelated_model_is_right_by_chance_only(result: Study) -> None:
    assert result.chance("clear") == pytest.approx(1 / 6)
    assert result.value("random-16", "clear", "detected")[0] == 1
    assert result.value("random-16", "clear", "top1")[0] <= 0.4


def test_a_model_without_response_answers_none(result: Study) -> None:
    cells = result.cells[result.cells["model"] == "merge-16"]
    # Its broken runs differ from the healthy ones by fresh noise only, as any two healthy runs do.
    assert (cells["nearest"] == "none").mean() >= 0.9
    assert result.value("merge-16", "clear", "top1")[0] <= 0.1
    told = unfound(result, "merge-16", "clear")
    assert (told["why"] == "the runs do not differ from healthy").sum() >= 5


def test_swapped_labels_swap_the_confusion(result: Study) -> None:
    confusion = result.confusion("first-16", "clear")
    names = list(made.FAULTS)
    for fault, shown in zip(names, [*names[1:], names[0]], strict=True):
        assert confusion.loc[fault, shown] == 3
    assert result.value("first-16", "clear", "top1")[0] == 0


def test_false_responses_stay_near_the_declared_level(result: Study) -> None:
    assert (result.false["judged_runs"] == len(made.CALIBRATION) + len(made.SEEDS)).all()
    assert result.false["false_responses"].mean() < 0.02
    assert result.false["false_entries"].mean() == pytest.approx(made.PROTOCOL.alpha, abs=0.01)


def test_the_size_of_a_model_moves_nothing(original: list[Trace], result: Study) -> None:
    rescaled = [_norms_times(trace, 1000.0) for trace in original]
    again = study(rescaled, made.PROTOCOL)
    ours = result.cells[result.cells["model"] == "original"].reset_index(drop=True)
    pd.testing.assert_frame_equal(again.cells, ours, atol=1e-9, rtol=1e-6)


def test_controls_are_subtracted_fault_by_fault(result: Study) -> None:
    gaps = result.differences.set_index(["control", "measure"])
    assert set(result.differences["proxy"]) == {"cluster-16"}
    worst = gaps.loc[("first-16", "top1")]
    assert (worst["mean"], worst["better"], worst["worse"]) == (1.0, 6, 0)
    assert worst["p_sign"] == pytest.approx(2 * 0.5**6)


def test_onsets_differ_and_responses_are_aligned_to_them(result: Study) -> None:
    assert result.cells["onset"].nunique() > 5
    first = result.responses[
        (result.responses["model"] == "original")
        & (result.responses["fault"] == "update_freeze")
        & (result.responses["signal"] == "update_norm")
    ]
    assert list(first["window"]) == ["0–4", "5–29"]
    assert (first["high"] < -1).all()


def test_what_is_not_logged_is_named(original: list[Trace]) -> None:
    bare = [_without(trace, "entropy") for trace in original]
    dense = [_without(trace, "router_load_entropy") for trace in made.runs("dense", made.FAULTS, with_table=False)]
    told = study([*bare, *dense], made.PROTOCOL)
    reasons = dict(told.skipped)
    assert "entropy" not in told.signals
    assert reasons["entropy"].startswith("skipped: not logged in original")
    assert "tool_calls" in reasons
    assert "router_load_entropy" in reasons["dense"]
    assert "advantage_reward" in reasons["dense"]
    assert told.value("dense", "clear", "top1")[0] > 0.9


def test_a_run_that_is_no_longer_finite_is_a_strong_response(original: list[Trace]) -> None:
    dead = [_dead(trace) if trace.provenance.fault == "entropy_collapse" else trace for trace in original]
    proxy = made.runs("cluster-16", made.FAULTS)
    dead += [_dead(trace) if trace.provenance.fault == "entropy_collapse" else trace for trace in proxy]
    told = study(dead, made.PROTOCOL)
    cells = told.cells[(told.cells["model"] == "cluster-16") & (told.cells["fault"] == "entropy_collapse")]
    assert (cells["top1"] == 1).all()
    assert (cells["signals"] > 20).all()


def test_crashes_and_faults_without_effect_count_and_are_named(original: list[Trace]) -> None:
    proxy = [_harmless(trace) for trace in made.runs("dense", made.FAULTS)]
    proxy = [trace for trace in proxy if not _is(trace, "update_freeze", 1)]
    proxy = [trace for trace in proxy if not _is(trace, "reward_spike", 2)]
    told = study([*original, *proxy], made.PROTOCOL, crashed={("dense", "update_freeze", "clear", 1): "exit code 1"})
    cells = told.cells[told.cells["model"] == "dense"].set_index(["fault", "seed"])
    assert cells.loc[("router_frozen", 0), "status"] == "no effect"
    assert cells.loc[("router_frozen", 0), "nearest"] == "none"
    assert cells.loc[("router_frozen", 0), "top1"] == 0
    assert cells.loc[("update_freeze", 1), "status"] == "crashed"
    assert cells.loc[("update_freeze", 1), "top1"] == 0
    assert cells.loc[("reward_spike", 2), "status"] == "not recorded"
    assert np.isnan(cells.loc[("reward_spike", 2), "top1"])
    spikes = told.faults[(told.faults["model"] == "dense") & (told.faults["fault"] == "reward_spike")]
    assert spikes["answers"].tolist() == ["reward_spike, reward_spike"]
    assert ("dense", "crashed: update_freeze/clear/1 (exit code 1)") in told.skipped
    assert "it changes nothing on this model" in set(unfound(told, "dense", "clear")["why"])
    assert "3 runs without any effect, 1 crashed" in page(told)


def test_a_model_without_experts_cannot_show_faults_of_experts(original: list[Trace]) -> None:
    shown = {fault: effect for fault, effect in made.FAULTS.items() if fault != "router_frozen"}
    dense = [_without_experts(trace) for trace in made.runs("dense", shown)]
    cells = study([*original, *dense], made.PROTOCOL).cells
    lost = cells[(cells["model"] == "dense") & (cells["fault"] == "router_frozen")]
    assert set(lost["status"]) == {"no effect"}
    assert (lost["top1_forced"] == 0).all()


def test_a_folder_with_a_registry_is_read_by_it(original: list[Trace], tmp_path: Path) -> None:
    save_pack(original, tmp_path / "original" / "all.parquet")
    broken = [trace.provenance for trace in original if trace.provenance.fault]
    runs = [
        {"model": r.model, "fault": r.fault, "family": "XX", "level": "faint", "strength": r.strength} for r in broken
    ]
    table = pd.DataFrame(runs).assign(seed=[run.seed for run in broken], pack="original/all.parquet", key="k")
    table.to_csv(tmp_path / "registry.csv", index=False)
    told = study_folder(tmp_path, made.PROTOCOL)
    assert told.levels == ("faint",)
    assert set(told.cells["family"]) == {"XX"}
    assert told.provenance["registry_hash"] == sha256_file(tmp_path / "registry.csv")
    assert told.value("original", "faint", "top1")[0] == 1


def test_thresholds_hold_for_runs_that_never_calibrated() -> None:
    names = ("grad_norm", "reward_mean", "entropy")
    values = np.stack([signal_table(made.run("original", seed), names, np.arange(60)) for seed in range(200, 240)])
    spread = calibrate(values[:20], np.arange(60), names, made.PROTOCOL)
    means = healthy_means(values[20:], np.arange(60), made.PROTOCOL)
    scores = spread.scores(means[:, ::2], means[:, 1::2])
    assert (np.abs(scores) > 1).mean() < 0.03
    moved = spread.scores(means + np.array([1.0, 0, 0])[:, None], means)
    assert (np.abs(moved[..., 0, :]) > 1).all()
    assert (moved[..., 1:, :] == 0).all()


def test_signals_made_from_trajectories_have_known_values() -> None:
    table = made.trajectories("original", 0, "")
    late = table.assign(advantage=table.groupby(table.index % 8)["advantage"].shift(1).fillna(0.0))
    run = made.run("original", 0)
    names = ("advantage_reward", "advantage_before", "advantage_group_mean", "length_longest", "update_per_gradient")
    own = dict(zip(names, signal_table(run, names, np.arange(60)), strict=True))
    delayed = dict(zip(names, signal_table(replace(run, trajectories=late), names, np.arange(60)), strict=True))
    np.testing.assert_allclose(own["advantage_reward"][np.isfinite(own["advantage_reward"])], 1)
    np.testing.assert_allclose(delayed["advantage_before"][1:][np.isfinite(delayed["advantage_before"][1:])], 1)
    assert np.isnan(own["advantage_before"][0])
    np.testing.assert_allclose(own["advantage_group_mean"], np.log(1e-2))
    np.testing.assert_allclose(own["length_longest"], np.log(table.groupby("step")["length"].max()))
    ratio = np.log(run.values("update_norm")) - np.log(run.values("grad_norm"))
    np.testing.assert_allclose(own["update_per_gradient"], ratio)


def test_levels_are_judged_apart(original: list[Trace]) -> None:
    both = made.runs("original", made.FAULTS, method="original", strengths=(1.0, 0.25))
    told = study([*both, *made.runs("cluster-16", made.FAULTS)], made.PROTOCOL)
    assert told.levels == ("clear", "subtle")
    assert set(told.cells.loc[told.cells["level"] == "subtle", "model"]) == {"original"}
    assert told.value("original", "subtle", "detected")[0] <= 1
    ours = told.cells[(told.cells["model"] == "original") & (told.cells["level"] == "clear")]
    assert (ours["top1"] == 1).all()


def test_other_settings_do_not_calibrate(original: list[Trace]) -> None:
    usual = {"learning_rate": 3e-4, "temperature": 1.0}
    hot = [made.run("original", seed, config=usual | {"temperature": 1.5}) for seed in made.CALIBRATION[:3]]
    named = [_with_config(trace, usual) for trace in original]
    told = study([*named, *hot], made.PROTOCOL)
    assert told.false.loc[0, "calibration_runs"] == len(made.CALIBRATION)
    assert told.false.loc[0, "other_runs"] == 3


def test_what_cannot_be_scored_is_refused(original: list[Trace]) -> None:
    with pytest.raises(ComparisonError, match="no run of 'original'"):
        study(made.runs("cluster-16", made.FAULTS), made.PROTOCOL)
    with pytest.raises(ComparisonError, match="two traces of the same run"):
        study([*original, original[0]], made.PROTOCOL)
    few = [trace for trace in original if trace.provenance.seed < 102]
    with pytest.raises(ComparisonError, match="original: 2 healthy calibration runs"):
        study(few, made.PROTOCOL)
    healthy = [trace for trace in original if trace.provenance.healthy]
    with pytest.raises(ComparisonError, match="no broken run"):
        study(healthy, made.PROTOCOL)


def test_a_study_comes_back_from_its_file(result: Study, tmp_path: Path) -> None:
    again = Study.load(result.save(tmp_path / "fidelity.parquet"))
    assert again.protocol == result.protocol
    assert (again.signals, again.skipped) == (result.signals, result.skipped)
    assert again.provenance == result.provenance
    for name in ("models", "faults", "families", "differences", "false", "cells", "responses"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(result, name), check_exact=True)
    assert repr(again) == repr(result)
    assert "cluster-16 1.00" in repr(result)
    assert result.protocol.hash in result._repr_html_()
    assert page(again) == page(result)


def test_a_broken_file_is_refused(result: Study, tmp_path: Path) -> None:
    path = result.save(tmp_path / "fidelity.parquet")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ComparisonError, match="unreadable"):
        Study.load(path)
    with pytest.raises(ComparisonError, match="unreadable"):
        Study.load(tmp_path / "absent.parquet")


def test_the_hash_follows_every_declaration() -> None:
    assert Protocol().hash == Protocol().hash
    changed = [
        replace(Protocol(), alpha=0.02),
        replace(Protocol(), windows=((0, 5),)),
        replace(Protocol(), derived=Protocol().derived[1:]),
        replace(Protocol(), by_definition=()),
    ]
    assert len({Protocol().hash, *(protocol.hash for protocol in changed)}) == 5
    assert Protocol.from_dict(Protocol().to_dict()) == Protocol()


def test_the_protocol_knows_the_catalogue() -> None:
    from moeproxy.lab.faults import FAULTS

    known = {fault.id: fault.family for fault in FAULTS.values()}
    assert known == FAMILIES
    assert dict(Protocol().by_definition).keys() <= FAMILIES.keys()
    assert set(Protocol().need_experts) == {fault.id for fault in FAULTS.values() if fault.needs_experts}
    names = {*Protocol().signals, *Protocol().derived}
    assert Protocol().all_defined <= names


def test_the_command_scores_recorded_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for i, trace in enumerate(made.runs("original", dict(list(made.FAULTS.items())[:2]), method="original")):
        trace.save(folder / f"{i}.parquet")
    assert main(["--bench", str(folder), "--out", str(tmp_path)]) == 0
    told = Study.load(tmp_path / RESULT)
    text = (tmp_path / PAGE).read_text("utf-8")
    assert told.protocol == Protocol()
    assert told.protocol.hash in text
    assert main(["--bench", str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 1


def test_the_page_says_what_came_out(result: Study) -> None:
    text = page(result)
    for wanted in ("# Do the proxies", "## Protocol", "## Limits", "| cluster-16 | 1.00 [1.00, 1.00] |", "chance"):
        assert wanted in text
    assert "tool_calls: skipped: not logged" in text
    assert not re.search(r"\bnan\b", text.replace("NaN or infinite", ""), re.IGNORECASE)


@pytest.mark.slow
def test_the_recorded_runs_can_be_scored() -> None:
    told = study(load_dir(ROOT / "data" / "runs"))
    assert told.value("original", "clear", "top1")[0] == 1
    assert told.value("cluster-16", "clear", "top1")[0] == 1


@pytest.mark.slow
def test_the_shipped_study_belongs_to_the_shipped_runs() -> None:
    bench = ROOT / "data" / "bench"
    if not (bench / RESULT).is_file():
        pytest.skip("the benchmark has not been scored here: python -m moeproxy.triage.study")
    shipped = Study.load(bench / RESULT)
    assert shipped.protocol == Protocol()
    assert shipped.provenance["registry_hash"] == sha256_file(bench / "registry.csv")
    assert (bench / PAGE).read_text("utf-8") == page(shipped)
    again = study(load_bench(bench, models=["original"]))
    ours = shipped.cells[shipped.cells["model"] == "original"].reset_index(drop=True)
    pd.testing.assert_frame_equal(again.cells[["fault", "seed", "nearest"]], ours[["fault", "seed", "nearest"]])


def _norms_times(trace: Trace, factor: float) -> Trace:
    norms = [name for name in trace.steps if str(name).startswith("grad_norm") or name == "update_norm"]
    return replace(trace, steps=trace.steps.assign(**{name: trace.steps[name] * factor for name in norms}))


def _without(trace: Trace, signal: str) -> Trace:
    return replace(trace, steps=trace.steps[[c for c in trace.steps if str(c).partition("/")[0] != signal]])


def _dead(trace: Trace) -> Trace:
    late = trace.steps.index >= trace.provenance.onset + 2
    return replace(trace, steps=trace.steps.mask(np.broadcast_to(late[:, None], trace.steps.shape)))


def _is(trace: Trace, fault: str, seed: int) -> bool:
    return (trace.provenance.fault, trace.provenance.seed) == (fault, seed)


def _harmless(trace: Trace) -> Trace:
    if trace.provenance.fault != "router_frozen":
        return trace
    healthy = made.run("dense", trace.provenance.seed)
    return replace(trace, steps=healthy.steps, trajectories=healthy.trajectories)


def _without_experts(trace: Trace) -> Trace:
    return replace(trace, provenance=replace(trace.provenance, n_experts=0))


def _with_config(trace: Trace, config: dict[str, float]) -> Trace:
    return replace(trace, provenance=replace(trace.provenance, config=config))
