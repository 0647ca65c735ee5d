"""The real loop on the shipped models: determinism, faults, the two engines, the parts of the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moeproxy.errors import CheckpointError, FaultError, LabError
from moeproxy.lab.identity import identify
from moeproxy.lab.run import _quiet, _trainer, run
from moeproxy.lab.seams import Seams
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.traces.partial import load_partial
from moeproxy.traces.trace import Trace

ONSET = 4


@pytest.fixture(scope="module")
def healthy(shipped: Path, short: GRPOSettings) -> Trace:
    return run(RunSpec(shipped, seed=5, settings=short))


def _broken(path: Path, settings: GRPOSettings, fault: str, strength: float) -> Trace:
    return run(RunSpec(path, seed=5, settings=settings, injection=Injection(fault, strength, ONSET)))


def test_same_seed_same_trace_bit_for_bit(healthy: Trace, shipped: Path, short: GRPOSettings) -> None:
    assert healthy.equals(run(RunSpec(shipped, seed=5, settings=short)))
    assert not healthy.equals(run(RunSpec(shipped, seed=6, settings=short)))


@pytest.mark.parametrize("fault", ["rollout_logp_precision", "update_freeze"])
def test_strength_zero_is_healthy_bit_for_bit(healthy: Trace, shipped: Path, short: GRPOSettings, fault: str) -> None:
    assert healthy.equals(_broken(shipped, short, fault, 0.0))


def test_low_precision_shows_from_its_onset_in_the_rollout_only(
    healthy: Trace, shipped: Path, short: GRPOSettings
) -> None:
    broken = _broken(shipped, short, "rollout_logp_precision", 1.0)
    before = broken.steps.index < ONSET
    for name in ("reward_mean", "grad_norm", "logprob_diff_mean"):
        assert np.array_equal(broken.values(name)[before], healthy.values(name)[before])
    ratio = broken.values("logprob_diff_mean")[~before] / healthy.values("logprob_diff_mean")[~before]
    assert ratio.min() > 5
    assert (broken.values("prob_pearson") < healthy.values("prob_pearson"))[~before].all()


def test_freeze_stops_the_weights_and_nothing_else(healthy: Trace, shipped: Path, short: GRPOSettings) -> None:
    broken = _broken(shipped, short, "update_freeze", 1.0)
    after = broken.steps.index >= ONSET
    assert (broken.values("update_norm")[after] == 0).all()
    assert (broken.values("update_norm")[~after] > 0).all()
    assert (broken.values("grad_norm")[after] > 0).all()
    # The step at the onset still starts from healthy weights: all it logs but the update is healthy.
    at = list(broken.steps.index).index(ONSET)
    assert broken.values("reward_mean")[at] == healthy.values("reward_mean")[at]


def test_two_faults_act_each_as_alone_and_are_recorded(shipped: Path, short: GRPOSettings) -> None:
    first, second = Injection("rollout_logp_precision", 1.0, ONSET), Injection("update_freeze", 1.0, 2)
    both = run(RunSpec(shipped, seed=5, settings=short, injection=first, further=(second,)))
    frozen = run(RunSpec(shipped, seed=5, settings=short, injection=second))
    assert Trace(both.steps[: ONSET - 1], None, both.provenance).equals(
        Trace(frozen.steps[: ONSET - 1], None, frozen.provenance)
    )
    assert (both.values("update_norm") > 0).tolist() == [True] + [False] * (short.steps - 1)
    worse = both.values("logprob_diff_mean") / frozen.values("logprob_diff_mean")
    assert worse[ONSET - 1 :].min() > 5
    assert both.provenance.faults == (("rollout_logp_precision", 1.0, ONSET), ("update_freeze", 1.0, 2))


def test_a_growing_trace_changes_nothing_and_ends_as_the_trace(
    healthy: Trace, shipped: Path, short: GRPOSettings, tmp_path: Path
) -> None:
    partial, grown = tmp_path / "a.partial", []
    trace = run(
        RunSpec(shipped, seed=5, settings=short),
        partial=partial,
        progress=lambda step, _steps, _row: grown.append(len(load_partial(partial).steps) - step),
    )
    assert trace.equals(healthy)
    assert grown == [0] * short.steps
    last = load_partial(partial)
    assert last.equals(trace, ignore=())
    assert replace(trace.provenance, wall_seconds=0.0, peak_memory_bytes=0) == last.provenance


def test_loss_parts_add_up(healthy: Trace, short: GRPOSettings) -> None:
    parts = healthy.values("policy_loss") + short.beta * healthy.values("kl")
    if "aux_loss" in healthy.signals:
        parts = parts + 0.001 * healthy.values("aux_loss")
    assert parts == pytest.approx(healthy.values("total_loss"), abs=1e-7)


def test_trajectories_agree_with_the_steps(healthy: Trace, short: GRPOSettings) -> None:
    rows = healthy.trajectories
    assert rows is not None
    assert len(rows) == short.steps * short.prompts * short.samples
    by_step = rows.groupby("step")
    assert by_step["reward"].mean().to_numpy() == pytest.approx(healthy.values("reward_mean"))
    assert by_step["length"].mean().to_numpy() == pytest.approx(healthy.values("response_length"))
    assert by_step["advantage"].mean().abs().max() < 1e-5


def test_router_signals_of_every_moe_layer(healthy: Trace) -> None:
    layers = [name for name in healthy.signals if name.startswith("router_load_entropy/")]
    assert len(layers) in (3, 4)
    for name in layers:
        assert ((healthy.values(name) > 0) & (healthy.values(name) <= 1)).all()


def test_engine_owns_its_weights_and_its_forward(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    """Ruin the trainer's weights: what the engine writes changes only after a sync."""
    with _quiet():
        trainer = _trainer(RunSpec(qwen3, settings=short), identify(qwen3, "original"), Seams(), str(tmp_path), None)
    engine, trained = trainer._engine, trainer.model
    engine.sync(trained)
    before = engine.generate(["12+34="] * 4, step=1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(0.1)
    assert engine.generate(["12+34="] * 4, step=1) == before
    engine.sync(trained)
    assert engine.generate(["12+34="] * 4, step=1).logprobs != before.logprobs
    trainer.close()


def test_weights_travel_in_bfloat16(qwen3: Path, short: GRPOSettings) -> None:
    exact = run(RunSpec(qwen3, settings=replace(short, steps=1, sync_dtype="float32")))
    sent = run(RunSpec(qwen3, settings=replace(short, steps=1)))
    assert exact.values("logprob_diff_max")[0] < 1e-4
    assert sent.values("logprob_diff_max")[0] > 10 * exact.values("logprob_diff_max")[0]


def test_bad_input(tmp_path: Path, qwen3: Path, short: GRPOSettings) -> None:
    with pytest.raises(CheckpointError):
        run(RunSpec(tmp_path / "nothing", settings=short))
    with pytest.raises(FaultError, match="unknown fault"):
        run(RunSpec(qwen3, settings=short, injection=Injection("typo", 1.0, 1)))
    for wrong in ({"steps": 0}, {"samples": 1}, {"temperature": 0.0}, {"sync_dtype": "float8"}, {"tasks": 8}):
        with pytest.raises(LabError):
            GRPOSettings(**wrong)


def test_what_a_dense_control_is(qwen3: Path, shipped_models: Path) -> None:
    dense = identify(shipped_models / "dense-tools", "dense")
    assert dense.n_experts == 0
    assert dense.fingerprint
    with pytest.raises(CheckpointError, match="has experts"):
        identify(qwen3, "dense")
    with pytest.raises(CheckpointError, match="is dense"):
        identify(shipped_models / "dense-tools", "original")


@pytest.mark.slow
def test_a_tool_run_records_calls_and_routing(shipped_models: Path, short: GRPOSettings) -> None:
    settings = replace(short, environment="calculator", max_new_tokens=8, steps=3)
    trace = run(RunSpec(shipped_models / "qwen3-moe-tools", settings=settings))
    assert trace.values("tool_call_rate").mean() == pytest.approx(0.5, abs=0.1)
    agreement = [trace.values(name) for name in trace.signals if name.startswith("router_agreement")]
    # The engines route alike but for rounding: what travels as bfloat16 tips a few near ties.
    assert len(agreement) == 4
    assert np.mean(agreement) > 0.95
    assert trace.trajectories is not None
    assert set(trace.trajectories["tool_calls"]) == {0, 1}
    assert trace.equals(run(RunSpec(shipped_models / "qwen3-moe-tools", settings=settings)))
    exact = run(RunSpec(shipped_models / "qwen3-moe-tools", settings=replace(settings, steps=1, sync_dtype="float32")))
    assert exact.values("router_agreement/3")[0] == 1
    # Environment tokens are in no signal of the mismatch: with exact weights nothing differs.
    assert exact.values("logprob_diff_max")[0] < 1e-4
