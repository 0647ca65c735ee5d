"""What each remedy does at its seam, on inputs of known answer; the fault, where there is one, lies inside."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moeproxy.errors import LabError
from moeproxy.lab.calculator import ToolTurn, answer_call
from moeproxy.lab.faults import FAULTS, inject
from moeproxy.lab.remedies import CANDIDATES, REMEDIES, candidates, check_application, treat
from moeproxy.lab.remedies.mismatch import in_band, truncated
from moeproxy.lab.replay import sent_to
from moeproxy.lab.seams import SEAMS, Batch, Coefficients, Correction, Routing, Seams, Update
from moeproxy.lab.settings import Application, GRPOSettings, Injection, RunSpec, Snapshots
from moeproxy.lab.tokens import EOS_ID

SETTINGS = GRPOSettings(steps=99, prompts=2, samples=4)
MODEL = Path("model")


def spec(*remedies: str, fault: str | None = None, start: int = 1) -> RunSpec:
    injection = Injection(fault, 1.0, 1) if fault else None
    applied = tuple(Application(name, start) for name in remedies)
    return RunSpec(MODEL, injection=injection, settings=SETTINGS, remedies=applied)


def act(seam: str, *args: Any, remedy: str, fault: str | None = None, step: int = 1, seams: Seams | None = None) -> Any:
    """The output of a seam with a fault inside and a remedy around it."""
    run, loop = spec(remedy, fault=fault), seams or Seams()
    with inject(loop, run.injections, steps=99), treat(loop, run):
        return getattr(loop, seam)(*args, step=step)


def parameters(**grads: float) -> list[tuple[str, nn.Parameter]]:
    named = [(name.replace("__", "."), nn.Parameter(torch.ones(3))) for name in grads]
    for (_, parameter), grad in zip(named, grads.values(), strict=True):
        parameter.grad = torch.full((3,), grad)
    return named


def update(*named: nn.Parameter, lr: float = 0.1, kind: Any = torch.optim.SGD) -> Update:
    optimizer = kind(list(named), lr=lr)
    return Update(optimizer.step, optimizer)


@pytest.mark.parametrize("name", REMEDIES)
def test_entry_is_complete_and_acts_where_it_says(name: str) -> None:
    item = REMEDIES[name]
    assert item.kind in ("mitigation", "repair")
    assert all((item.title, item.what, item.source))
    assert set(item.plan(SETTINGS)) == set(item.seams) <= set(SEAMS)


def test_every_fault_has_remedies_that_exist_and_every_remedy_has_a_fault() -> None:
    assert set(CANDIDATES) == set(FAULTS)
    assert {name for names in CANDIDATES.values() for name in names} == set(REMEDIES)
    assert candidates("kl_sign", "repair") == ("correct_signs",)
    assert candidates("kl_sign")[0] == "kl_off"
    with pytest.raises(LabError, match="typo"):
        candidates("typo")


def test_no_remedy_touches_nothing_and_all_are_unwrapped_after_an_exception() -> None:
    seams = Seams()
    with treat(seams, spec()):
        assert vars(seams) == {}

    def fail() -> None:
        with treat(seams, spec("tis", "resync")):
            assert set(vars(seams)) == {"correction", "sync"}
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert vars(seams) == {}


def test_a_remedy_acts_from_its_first_step_on() -> None:
    seams = Seams()
    with treat(seams, spec("kl_off", start=5)):
        betas = [seams.coefficients(Coefficients(0.02), step=step).beta for step in (4, 5)]
    assert betas == [0.02, 0.0]


@pytest.mark.parametrize(
    ("application", "message"),
    [(Application("typo"), "unknown remedy"), (Application("tis", 0), "step 0"), (Application("tis", 100), "step 100")],
)
def test_impossible_applications_are_refused(application: Application, message: str) -> None:
    with pytest.raises(LabError, match=message):
        check_application(application, SETTINGS)


def test_what_needs_experts_or_the_labs_engine_says_so() -> None:
    with pytest.raises(LabError, match="no experts"):
        check_application(Application("routing_replay"), SETTINGS, experts=False)
    vllm = replace(SETTINGS, engine="vllm", device="cuda")
    with pytest.raises(LabError, match="rollout engine"):
        check_application(Application("resync"), vllm)
    assert check_application(Application("tis"), vllm).id == "tis"


def test_content_keys_of_runs_without_remedies_stay_and_others_differ() -> None:
    plain = RunSpec(MODEL, seed=1)
    assert plain.to_dict().keys() == {"model", "label", "method", "n_experts", "seed", "injection", "settings"}
    assert plain.key("f") == "029025abf9573657"  # as it was before there were remedies
    treated = replace(plain, remedies=(Application("tis", 3),))
    kept = replace(treated, snapshots=Snapshots(Path("somewhere"), (1, 2)))
    assert len({plain.key("f"), treated.key("f"), replace(plain, remedies=(Application("tis", 4),)).key("f")}) == 3
    assert kept.key("f") == treated.key("f")
    assert RunSpec.from_dict(kept.to_dict()) == kept
    assert treated.fault_name == "healthy~tis-from3"


# The rollout engine


def test_resync_sends_at_every_step_in_full_precision_although_the_schedule_does_not() -> None:
    sent: list[str | None] = []
    act("sync", lambda dtype=None: sent.append(dtype), remedy="resync", fault="stale_rollout")
    assert sent == ["float32"]


def test_reconvert_copies_again_after_the_engine_has_its_weights() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterDict({"gate_up_proj": nn.Parameter(torch.arange(8.0).reshape(1, 4, 2))})

    model, seams, run = Experts(), Seams(), spec("reconvert", fault="weight_conversion_wrong")
    right = model.experts["gate_up_proj"].detach().clone()
    with torch.no_grad(), inject(seams, run.injections, steps=99):
        seams.rollout_weights(model, step=1)
        assert not torch.equal(model.experts["gate_up_proj"], right)
        with treat(seams, run):
            seams.sync(lambda: model.experts["gate_up_proj"].copy_(right), step=1)
            seams.rollout_weights(model, step=1)
    assert torch.equal(model.experts["gate_up_proj"], right)


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("rollout_logp_precision", "reference_attention"),
        ("attention_tail", "reference_attention"),
        ("position_shift", "reference_positions"),
        ("router_precision", "fp32_router"),
        ("lm_head_precision", "fp32_head"),
        ("sampling_semantics", "plain_sampling"),
        ("response_too_long", "plain_sampling"),
        ("loss_mask_wrong", "rebuild_mask"),
    ],
)
def test_a_repair_puts_the_loops_own_code_in_place(fault: str, remedy: str) -> None:
    seam = FAULTS[fault].seam
    noise = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    inputs: dict[str, tuple[Any, ...]] = {
        "attention_scale": (0.17677,),
        "attention_input": (noise[None], torch.arange(6)[None]),
        "position_ids": (torch.full((4, 1), 7),),
        "router_input": (noise,),
        "head_logits": (noise,),
        "sampling_logits": (noise, torch.ones(6, 1, dtype=torch.long)),
        "loss_mask": (torch.ones(6, 4).tril(),),
    }
    args = inputs[seam]
    broken, mended = (act(seam, *args, remedy=name, fault=fault) for name in ("restart", remedy))
    assert not _same(broken, args[0])
    assert _same(mended, args[0])


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_sampler_guards() -> None:
    logits = torch.zeros(2, 8)
    for drawn, allowed in ((0, False), (1, False), (2, True)):
        out = act("sampling_logits", logits, torch.full((2, drawn), 5), remedy="min_tokens", fault="empty_response")
        assert bool((out[:, EOS_ID] > -1).all()) == allowed
    out = act(
        "sampling_logits", logits, torch.tensor([[4, 5], [5, 6]]), remedy="no_repeat", fault="repetition_collapse"
    )
    assert out.argmin(-1).tolist() == [5, 6]
    assert act("response_limit", 8, remedy="raise_cap") == 16


# What lies between the engines


def test_token_weights_of_known_ratios() -> None:
    ratio = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 6.0])
    assert truncated(ratio).tolist() == pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0])
    assert in_band(ratio).tolist() == pytest.approx([0, 0.5, 1.0, 2.0, 3.0, 5.0, 0])


def test_corrections_take_the_trainers_log_probs_as_old_ones() -> None:
    sampled, trained, mask = (
        torch.log(torch.tensor([[0.2, 0.9]])),
        torch.log(torch.tensor([[0.8, 0.1]])),
        torch.ones(1, 2),
    )
    mask[0, 1] = 0
    args = (lambda: trained, sampled, mask)
    assert act("correction", *args, remedy="restart") == Correction(sampled)
    assert act("correction", *args, remedy="recomputed_logprobs") == Correction(None)
    tis, icepop = (act("correction", *args, remedy=name) for name in ("tis", "icepop"))
    assert tis.old_BT is None
    assert tis.weight_BT.tolist() == [pytest.approx([2.0, 1.0])]  # a token that does not count has weight 1
    assert icepop.weight_BT.tolist() == [pytest.approx([4.0, 1.0])]


def test_replay_takes_the_engines_choices_and_the_trainers_scores() -> None:
    logits_TE = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])).requires_grad_()
    scores_TE = logits_TE.softmax(-1)
    weights_TK, index_TK = scores_TE.topk(2)
    own = Routing(0, logits_TE, weights_TK / weights_TK.sum(-1, keepdim=True), index_TK, sigmoid=False)
    replayed = sent_to(own, torch.tensor([[0, 3], [-1, -1]], dtype=torch.int16), True)
    assert replayed.index_TK.tolist() == [[0, 3], own.index_TK[1].tolist()]
    assert replayed.weights_TK[0].tolist() == pytest.approx([0.5 / 0.55, 0.05 / 0.55])
    assert torch.equal(replayed.weights_TK[1], own.weights_TK[1])
    replayed.weights_TK[0, 1].backward()
    assert logits_TE.grad is not None
    assert float(logits_TE.grad[0, 3]) > 0  # an expert that the trainer would not have chosen learns too
    raw = replace(own, weights_TK=1.5 * weights_TK.detach(), logits_TE=logits_TE.detach())
    free = sent_to(raw, torch.tensor([[0, 3], [-1, -1]]), False)
    assert free.weights_TK[0].tolist() == pytest.approx([0.75, 0.075])


# The objective


def test_coefficients() -> None:
    plain = Coefficients(0.02)

    def used(remedy: str, fault: str | None = None) -> Coefficients:
        return act("coefficients", plain, remedy=remedy, fault=fault)

    assert used("stronger_kl").beta == pytest.approx(0.1)
    assert used("stronger_kl", "kl_sign").beta == pytest.approx(-0.1)  # it makes a wrong sign worse
    assert used("kl_off", "kl_sign").beta == 0
    assert used("correct_signs", "kl_sign").beta == pytest.approx(0.02)
    assert used("entropy_off", "entropy_collapse") == plain
    assert used("entropy_bonus", "entropy_collapse").entropy == -0.5
    assert used("balance_off", "aux_loss_interference") == plain


def test_rewards_outside_the_range() -> None:
    rewards = [0.0, 1.0, 6.0, 0.0, 5.0, 5.0, 5.0, 5.0]
    args = (rewards, [""] * 8, [""] * 8)
    assert act("reward", *args, remedy="clip_rewards") == [0, 1, 1, 0, 1, 1, 1, 1]
    assert act("reward", *args, remedy="drop_outlier_rewards") == pytest.approx([0, 1, 1 / 3, 0, 0, 0, 0, 0])
    right = [0.0, 1.0, 1.0, 0.0]
    assert act("reward", right, [""] * 4, [""] * 4, remedy="rescore", fault="reward_collapse") == right


def test_advantages() -> None:
    batch = Batch([1, 0, 0, 0, 1, 1, 0, 0], 4)
    rewards = torch.tensor(batch.rewards, dtype=torch.float32).reshape(2, 4)
    healthy = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)
    for fault in ("value_mismatch", "advantage_instability", "delayed_credit"):
        assert not torch.allclose(act("advantages", healthy, batch, remedy="restart", fault=fault), healthy)
        assert torch.allclose(act("advantages", healthy, batch, remedy="regroup", fault=fault), healthy)
    centred = act("advantages", healthy, batch, remedy="centre_advantages", fault="value_mismatch")
    assert torch.allclose(centred, healthy, atol=1e-6)
    wild = act("advantages", 100 * healthy, batch, remedy="clip_advantages")
    assert wild.abs().max() == pytest.approx(1.5)  # (4 - 1) / sqrt(4)


def test_masks_of_responses() -> None:
    call = "[2*3]"
    good, wrong = answer_call(call), replace(answer_call(call), result="9")
    turns = [None, good, wrong, replace(good, done=True)]
    batch = Batch([0.0] * 4, 4, turns, [True, False, False, False])
    ones = torch.ones(4)
    assert act("advantages", ones, batch, remedy="mask_bad_turns").tolist() == [1, 1, 0, 0]
    assert act("advantages", ones, batch, remedy="mask_truncated").tolist() == [0, 1, 1, 1]


def test_tools() -> None:
    turns = [answer_call("[2*3]"), answer_call("[12+7]"), answer_call("[nonsense]")]

    def heard(remedy: str, fault: str) -> list[ToolTurn]:
        return list(act("tool_turns", turns, remedy=remedy, fault=fault))

    assert heard("local_tool", "tool_call_error") == heard("local_tool", "observation_corruption") == turns
    assert heard("continue_episodes", "termination_error") == turns
    assert all(turn.failed for turn in heard("retry_calls", "tool_call_error"))  # at full strength retrying is in vain
    seams, run = Seams(), spec("retry_calls")
    half = Injection("tool_call_error", 0.5, 1)
    with inject(seams, [half], steps=9):
        failed = [turn.failed for turn in seams.tool_turns(turns * 20, step=1)]
        with treat(seams, run):
            again = [turn.failed for turn in seams.tool_turns(turns * 20, step=1)]
    assert sum(again) < sum(failed)
    assert sum(again) >= 20  # what cannot be read fails always


# Gradients and updates


def test_a_lower_rate_lasts_one_step() -> None:
    (_, parameter), *_ = parameters(a=1.0)
    whole = update(parameter)
    act("optimizer_step", whole, remedy="lower_rate", fault="kl_explosion")
    assert parameter.tolist() == pytest.approx([0.9] * 3)  # a tenth of ten times 0.1
    assert whole.optimizer.param_groups[0]["lr"] == 0.1


def test_gradients_are_clipped_after_they_were_measured() -> None:
    (_, parameter), *_ = parameters(a=1.0)
    act("optimizer_step", update(parameter, lr=1.0), remedy="clip_gradients")
    assert (1 - parameter).norm().item() == pytest.approx(0.1, rel=1e-4)


def test_not_finite_gradients_do_not_reach_the_weights() -> None:
    for remedy, expected in (("finite_gate", [1.0, 1.0, 1.0]), ("zero_not_finite", [1.0, 0.9, 0.9])):
        (_, parameter), *_ = parameters(a=1.0)
        act("optimizer_step", update(parameter), remedy=remedy, fault="nan_poison")
        assert parameter.tolist() == pytest.approx(expected)
    (_, parameter), *_ = parameters(a=1.0)
    act("optimizer_step", update(parameter), remedy="restart", fault="nan_poison")
    assert math.isnan(parameter[0].item())


def test_a_loss_scale_backs_off_until_gradients_are_finite() -> None:
    named = parameters(a=1.0, b=1e-3)
    act("gradients", named, remedy="dynamic_loss_scale", fault="gradient_overflow")
    assert [p.grad.tolist() for _, p in named] == [pytest.approx([g] * 3, rel=1e-3) for g in (1.0, 1e-3)]
    act("gradients", named, remedy="restart", fault="gradient_overflow")
    assert not any(p.grad.isfinite().any() for _, p in named)


@pytest.mark.parametrize(
    ("fault", "remedy", "name"),
    [
        ("grad_scale_constant", "right_group_size", "layers.0.mlp.experts.gate_up_proj"),
        ("router_frozen", "dense_router_gradients", "layers.0.mlp.gate.weight"),
    ],
)
def test_gradients_of_one_module_are_put_right(fault: str, remedy: str, name: str) -> None:
    named = parameters(**{name.replace(".", "__"): 1.0, "other": 1.0})
    act("gradients", named, remedy="restart", fault=fault)
    assert named[0][1].grad.tolist() != [1.0] * 3
    named = parameters(**{name.replace(".", "__"): 1.0, "other": 1.0})
    act("gradients", named, remedy=remedy, fault=fault)
    assert [p.grad.tolist() for _, p in named] == [[1.0] * 3] * 2


def test_routers_stay_frozen_and_all_else_moves() -> None:
    named = parameters(layers__0__mlp__gate__weight=1.0, other=1.0)
    seams, run = Seams(), spec("freeze_routers")
    with treat(seams, run):
        seams.gradients(named, step=1)
        assert named[0][1].grad is not None  # the router's gradient is still measured
        seams.optimizer_step(update(*(p for _, p in named)), step=1)
    assert [p.tolist() for _, p in named] == [[1.0] * 3, pytest.approx([0.9] * 3)]


def test_optimizer_state_is_put_back_or_reset() -> None:
    def counts(remedy: str, fault: str | None) -> list[float]:
        (_, parameter), *_ = parameters(a=1.0)
        whole, seen = update(parameter, kind=torch.optim.Adam), []
        whole()
        run, seams = spec(remedy, fault=fault), Seams()
        with inject(seams, run.injections, steps=99), treat(seams, run):
            for step in (1, 2, 3):
                seams.optimizer_step(whole, step=step)
                seen.append(float(whole.optimizer.state[parameter]["step"]))
        return seen

    assert counts("restart", "optimizer_state_lost") == [1, 1, 1]
    assert counts("keep_optimizer_state", "optimizer_state_lost") == [2, 3, 4]
    assert counts("reset_optimizer", None) == [1, 2, 3]


def test_an_omitted_update_is_made_up_and_no_other_made_twice() -> None:
    for fault in ("update_freeze", None):
        (_, parameter), *_ = parameters(a=1.0)
        act("optimizer_step", update(parameter), remedy="verified_update", fault=fault)
        assert parameter.tolist() == pytest.approx([0.9] * 3)
