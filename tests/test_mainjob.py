"""The main job: live on a short loop, and what the shipped runs say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moeproxy import mainjob
from moeproxy.__main__ import main
from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.record import CALIBRATION_SEEDS, PROXIES, SCORED_SEEDS
from moeproxy.lab.settings import GRPOSettings
from moeproxy.places import data_dir
from moeproxy.proxy.cluster import select
from moeproxy.traces.trace import Trace
from moeproxy.triage.compare import Comparison


@pytest.fixture(scope="module")
def recorded() -> tuple[Trace, ...]:
    return mainjob.recorded_runs()


@pytest.fixture(scope="module")
def comparisons(recorded: tuple[Trace, ...]) -> dict[str, Comparison]:
    return {item.fault: item for item in mainjob.compare_faults(recorded)}


def test_every_model_was_recorded_with_every_seed_and_fault(recorded: tuple[Trace, ...]) -> None:
    runs = [trace.provenance for trace in recorded]
    assert {run.source for run in runs} == {"recorded"}
    for model in ("original", *(choice.label for choice in PROXIES)):
        healthy = {run.seed for run in runs if run.model == model and run.healthy}
        assert healthy == {*CALIBRATION_SEEDS, *SCORED_SEEDS}
        for fault in ("rollout_logp_precision", "update_freeze"):
            assert {run.seed for run in runs if run.model == model and run.fault == fault} == {*SCORED_SEEDS}


def test_grpo_raises_the_reward_of_original_and_proxy(recorded: tuple[Trace, ...]) -> None:
    for model, least in (("original", 0.15), ("cluster-16", 0.10)):
        healthy = [t.values("reward_mean") for t in recorded if t.provenance.model == model and t.provenance.healthy]
        gains = [reward[-10:].mean() - reward[:5].mean() for reward in healthy]
        assert sum(gains) / len(gains) >= least, (model, gains)


def test_the_shipped_runs_give_the_stated_verdicts(comparisons: dict[str, Comparison]) -> None:
    precision, freeze = comparisons["rollout_logp_precision"], comparisons["update_freeze"]
    assert precision.visible
    assert precision.proxy("cluster-16").verdict == "reproduced"
    assert freeze.visible
    assert freeze.proxy("cluster-16").verdict == "partly"
    assert "update_norm" not in freeze.signals, "the fault sets it by definition"
    for comparison in comparisons.values():
        assert comparison.control.false_response_rate < 0.03
        assert comparison.control.false_signals == 0


def test_recorded_runs_are_cut_to_a_shorter_loop_and_refused_for_another(recorded: tuple[Trace, ...]) -> None:
    short = mainjob.recorded_runs(GRPOSettings(steps=30))
    assert len(short) == len(recorded)
    assert {len(trace.steps) for trace in short} == {30}
    assert mainjob.recorded_runs(GRPOSettings(learning_rate=1e-5)) == ()
    assert mainjob.recorded_runs(GRPOSettings(steps=61)) == ()


def test_live_runs_take_the_place_of_their_recorded_twins(recorded: tuple[Trace, ...]) -> None:
    first = recorded[0]
    live = Trace(first.steps, first.trajectories, replace(first.provenance, source="live"))
    both = mainjob.joined([live], recorded)
    assert len(both) == len(recorded)
    assert both[0] is live
    assert first not in both
    assert mainjob.twins([live], recorded).startswith("1 of 1 live runs equal")


def test_build_afresh_replaces_a_proxy_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(data_dir() / "models" / mainjob.MODEL)
    plan = select(profile(checkpoint, calibration_texts(0, 16)), 8)
    target = tmp_path / "proxy"
    mainjob.build_afresh(checkpoint, plan, target)
    mainjob.build_afresh(checkpoint, plan, target)
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("mine")
    with pytest.raises(MoeproxyError, match="is no proxy"):
        mainjob.build_afresh(checkpoint, plan, other)
    assert (other / "chapter.txt").read_text() == "mine"


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEPROXY_DATA", str(tmp_path))
    with pytest.raises(MoeproxyError, match="MOEPROXY_DATA"):
        data_dir()


def test_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["run", "--out", str(file)]) == 1
    assert str(file) in capsys.readouterr().err
    assert file.read_text() == "mine"
    with pytest.raises(SystemExit):
        main(["typo"])
    with pytest.raises(SystemExit):
        main(["run", "--workers", "0"])


def test_what_would_fail_after_training_fails_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: tuple[Trace, ...]
) -> None:
    monkeypatch.setattr(mainjob, "profile", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(MoeproxyError, match=r"no runs of 'cluster-12'.*cluster-16"):
        mainjob.run_main_job(tmp_path, choice=replace(PROXIES[0], n_keep=12))
    (tmp_path / "report").write_text("mine")
    with pytest.raises(MoeproxyError, match="is a file"):
        mainjob.run_main_job(tmp_path)
    assert (tmp_path / "report").read_text() == "mine"


def test_runs_of_another_checkpoint_are_not_mixed_in(recorded: tuple[Trace, ...]) -> None:
    first = next(trace for trace in recorded if trace.provenance.seed == SCORED_SEEDS[0])
    other = replace(first.provenance, source="live", checkpoint_fingerprint="another")
    live = Trace(first.steps, first.trajectories, other)
    with pytest.raises(MoeproxyError, match="different checkpoints"):
        mainjob.compare_faults(mainjob.joined([live], recorded))


@pytest.mark.slow
def test_main_job_live(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    result = mainjob.run_main_job(
        tmp_path, settings=GRPOSettings(steps=39), progress=lambda stage, share: seen.append((stage, share))
    )
    assert [stage for stage, _ in result.seconds] == [stage for stage, _ in mainjob.STAGES]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert seen[-1] == ("done", 1.0)
    assert len(result.live) == 6
    assert len(list((tmp_path / "runs").iterdir())) == 6
    assert {trace.provenance.source for trace in result.live} == {"live"}
    assert result.proxy.check is not None
    assert result.proxy.check.max_difference <= 1e-5
    precision = next(item for item in result.comparisons if item.fault == "rollout_logp_precision")
    assert "live" in precision.proxy("cluster-16").sources
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written
    page = result.report.read_text()
    assert "<script src=" not in page
    assert "live" in page
    assert "recorded" in page
