"""What each fault does at its seam, on inputs of known answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moeproxy.errors import FaultError
from moeproxy.lab.calculator import answer_call
from moeproxy.lab.faults import FAULTS, check_injection, inject
from moeproxy.lab.faults.numeric import rounded, rounded_tensor
from moeproxy.lab.seams import Batch, Coefficients, Routing, Seams, Update
from moeproxy.lab.settings import GRPOSettings, Injection
from moeproxy.lab.tokens import EOS_ID

N_EXPERTS, TOP_K = 8, 2


def act(name: str, strength: float, *args: Any, step: int = 1) -> Any:
    """The output of the fault's seam for one call."""
    seams = Seams()
    with inject(seams, [Injection(name, strength, 1)], steps=99):
        return getattr(seams, FAULTS[name].seam)(*args, step=step)


def routing(*, sigmoid: bool = False) -> Routing:
    logits_TE = torch.randn(40, N_EXPERTS, generator=torch.Generator().manual_seed(0))
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(dim=-1)
    weights_TK, index_TK = scores_TE.topk(TOP_K)
    factor = 1.5 if sigmoid else 1.0
    return Routing(1, logits_TE, factor * weights_TK / weights_TK.sum(-1, keepdim=True), index_TK, sigmoid)


def logits(n: int = 64) -> torch.Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(1))


def parameters(**grads: float) -> list[tuple[str, nn.Parameter]]:
    named = [(name.replace("__", "."), nn.Parameter(torch.ones(3))) for name in grads]
    for (_, parameter), grad in zip(named, grads.values(), strict=True):
        parameter.grad = torch.full((3,), grad)
    return named


def update(parameter: nn.Parameter, lr: float = 0.1) -> Update:
    optimizer = torch.optim.Adam([parameter], lr=lr)
    return Update(optimizer.step, optimizer)


def test_rounding_a_tensor_equals_rounding_its_numbers() -> None:
    values = torch.tensor([0.1, -3.999, 1.0, 0.0, 1e-3, 77.7])
    for bits in (0, 3, 7, 10, 23):
        expected = [rounded(float(v), bits) for v in values]
        assert rounded_tensor(values, bits).tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(rounded_tensor(values, 7), values.bfloat16().float())


@pytest.mark.parametrize("name", ["lm_head_precision", "router_precision"])
def test_precision_is_lost_by_strength(name: str) -> None:
    args = (logits(),)
    errors = [float((act(name, s, *args) - args[0]).abs().max()) for s in (0.25, 0.5, 0.75, 1.0)]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 1e-2 < errors[-1]


@pytest.mark.parametrize(("strength", "grad", "finite"), [(1.0, 1.0, False), (1.0, 1e-6, True), (0.01, 0.5, True)])
def test_gradients_overflow_float16_after_scaling(strength: float, grad: float, finite: bool) -> None:
    named = parameters(a=grad)
    act("gradient_overflow", strength, named)
    assert named[0][1].grad is not None
    assert bool(named[0][1].grad.isfinite().all()) == finite
    if finite:
        assert named[0][1].grad.tolist() == pytest.approx([grad] * 3, rel=1e-3)


def test_poison_reaches_the_weights() -> None:
    (_, weight), *_ = parameters(a=1.0)
    act("nan_poison", 1.0, update(weight))
    assert int(weight.isnan().sum()) == 1


@pytest.mark.parametrize(("strength", "sent"), [(1.0, 0), (0.5, 5), (0.1, 9)])
def test_stale_rollout_leaves_out_its_share_of_syncs(strength: float, sent: int) -> None:
    done: list[int] = []
    for step in range(1, 11):
        act("stale_rollout", strength, lambda: done.append(1), step=step)
    assert len(done) == sent


def test_wrong_conversion_swaps_gate_and_up_of_its_share_in_one_layer() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Module()
            self.experts.gate_up_proj = nn.Parameter(torch.arange(4.0 * 4 * 2).reshape(4, 4, 2), requires_grad=False)

    model = nn.ModuleList([Block(), Block(), Block()])
    before = model[0].experts.gate_up_proj.clone()
    act("weight_conversion_wrong", 0.5, model)
    assert torch.equal(model[0].experts.gate_up_proj, before)
    changed = model[1].experts.gate_up_proj
    assert torch.equal(changed[:2], torch.cat([before[:2, 2:], before[:2, :2]], dim=1))
    assert torch.equal(changed[2:], before[2:])


def test_positions_shift_for_responses_only() -> None:
    assert act("position_shift", 1.0, torch.tensor([[7]])).tolist() == [[15]]
    assert act("position_shift", 0.01, torch.tensor([[7]])).tolist() == [[8]], "any strength shifts by one at least"
    assert act("position_shift", 1.0, torch.tensor([[0, 1, 2]])).tolist() == [[0, 1, 2]]


def test_loss_mask_shifts_in_its_share_of_rows() -> None:
    mask = torch.tensor([[1, 1, 0, 0]] * 10)
    assert act("loss_mask_wrong", 1.0, mask).tolist() == [[0, 1, 1, 0]] * 10
    half = act("loss_mask_wrong", 0.5, mask)
    assert int((half[:, 0] == 0).sum()) == 5


def test_only_gradients_of_experts_are_scaled() -> None:
    named = parameters(layers__0__mlp__experts__down_proj=1.0, layers__0__self_attn__q_proj=1.0)
    act("grad_scale_constant", 1.0, named)
    assert [float(p.grad[0]) for _, p in named if p.grad is not None] == [8.0, 1.0]


def test_only_gradients_of_routers_are_frozen() -> None:
    named = parameters(layers__0__mlp__gate__weight=1.0, layers__0__mlp__experts__gate_up_proj=1.0)
    act("router_frozen", 1.0, named)
    assert [float(p.grad[0]) for _, p in named if p.grad is not None] == [0.0, 1.0]


def test_truncation_keeps_the_nucleus_and_renormalises() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    out = act("sampling_semantics", 1.0, probabilities.log(), torch.zeros(1, 0, dtype=torch.long))
    # The least set that holds half of the probability: the first two.
    assert out.softmax(-1)[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)


def test_lost_state_makes_the_next_step_as_large_as_the_first() -> None:
    (_, weight), *_ = parameters(a=1.0)
    whole = update(weight)
    whole()
    weight.grad = torch.full((3,), 1e-3)
    before = weight.detach().clone()
    act("optimizer_state_lost", 1.0, whole)
    assert float((before - weight.detach()).abs().max()) == pytest.approx(0.1, rel=1e-3)


def test_learning_rate_is_back_after_the_step() -> None:
    (_, weight), *_ = parameters(a=1.0)
    whole = update(weight, lr=0.01)
    act("kl_explosion", 1.0, whole)
    assert float(1 - weight.detach()[0]) == pytest.approx(0.1, rel=1e-3)
    assert whole.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl_sign", Coefficients(-0.02)),
        ("entropy_collapse", Coefficients(0.02, entropy=-1.0)),
        ("aux_loss_interference", Coefficients(0.02, balance=1.0)),
        ("expert_collapse", Coefficients(0.02, balance=-1.0)),
    ],
)
def test_coefficients(name: str, expected: Coefficients) -> None:
    assert act(name, 1.0, Coefficients(0.02)) == expected


@pytest.mark.parametrize("sigmoid", [False, True])
def test_missing_normalisation_gives_the_raw_scores(sigmoid: bool) -> None:
    healthy = routing(sigmoid=sigmoid)
    scores_TE = healthy.logits_TE.sigmoid() * 1.5 if sigmoid else healthy.logits_TE.softmax(-1)
    broken = act("topk_norm_missing", 1.0, healthy)
    torch.testing.assert_close(broken.weights_TK, scores_TE.gather(-1, healthy.index_TK))
    assert torch.equal(broken.index_TK, healthy.index_TK)
    half = act("topk_norm_missing", 0.5, healthy)
    torch.testing.assert_close(half.weights_TK, (broken.weights_TK + healthy.weights_TK) / 2)


def test_offset_reads_the_next_expert_in_its_share() -> None:
    healthy = routing()
    broken = act("expert_offset", 0.5, healthy).index_TK
    low = healthy.index_TK < N_EXPERTS // 2
    assert torch.equal(broken[low], healthy.index_TK[low] + 1)
    assert torch.equal(broken[~low], healthy.index_TK[~low])
    assert int(act("expert_offset", 1.0, healthy).index_TK.max()) < N_EXPERTS


def test_rerouting_takes_the_runner_up_and_keeps_choices_distinct() -> None:
    healthy = routing()
    broken = act("routing_mismatch", 1.0, healthy).index_TK
    ranked = healthy.logits_TE.argsort(dim=-1, descending=True)
    assert torch.equal(broken, ranked[:, [0, 2]])
    some = act("routing_mismatch", 0.3, healthy).index_TK
    assert 2 <= int((some != healthy.index_TK).any(-1).sum()) <= 22


def test_attention_tail_leaves_early_positions_exact() -> None:
    hidden = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9).expand(2, 9)
    broken = act("attention_tail", 1.0, hidden, positions)
    assert torch.equal(broken[:, :4], hidden[:, :4])
    assert not torch.equal(broken[:, 4:], hidden[:, 4:])


def test_rewards() -> None:
    rewards, texts, answers = [1.0, 0.0] * 20, ["12", "19"] * 20, ["12", "12"] * 20
    spiked = act("reward_spike", 1.0, rewards, texts, answers)
    assert sum(a != b for a, b in zip(spiked, rewards, strict=True)) == 10
    assert max(spiked) == 6.0
    assert act("reward_collapse", 1.0, rewards, texts, answers) == [0.0] * 40
    assert act("reward_hacking", 1.0, rewards, texts, answers) == [1.0] * 40
    assert act("reward_hacking", 0.5, rewards, texts, answers) == [1.0, 0.5] * 20
    assert act("reward_hacking", 1.0, [0.0], [""], ["7"]) == [0.0]


def test_generation() -> None:
    first, later = torch.zeros(64, 0, dtype=torch.long), torch.full((64, 1), 5)
    empty = act("empty_response", 0.5, logits(), first)
    assert int((empty.argmax(-1) == EOS_ID).sum() - (logits().argmax(-1) == EOS_ID).sum()) >= 24
    assert torch.equal(act("empty_response", 1.0, logits(), later), logits())
    assert (act("repetition_collapse", 1.0, logits(), later).argmax(-1) == 5).all()
    assert (act("response_too_short", 1.0, logits(), later)[:, EOS_ID] - logits()[:, EOS_ID] - 8).abs().max() < 1e-5
    assert (act("response_too_long", 1.0, logits(), later).argmax(-1) != EOS_ID).all()


def test_credit() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]  # two groups of four: means 0.5 and 0.25
    healthy = torch.zeros(8)
    shifted = act("value_mismatch", 1.0, healthy, Batch(rewards, 4))
    assert (shifted[:4] > 0).all()
    assert (shifted[4:] < 0).all()
    noisy = act("advantage_instability", 1.0, torch.ones(64), Batch([0.0] * 64, 4))
    assert (noisy > 0).all()
    assert float(noisy.std()) > 1
    seams = Seams()
    with inject(seams, [Injection("delayed_credit", 1.0, 1)], steps=5):
        given = [seams.advantages(torch.full((2,), float(s)), Batch([0.0, 0.0], 2), step=s) for s in (1, 2, 3)]
    assert [float(a[0]) for a in given] == [0.0, 1.0, 2.0]


def test_faults_leave_the_global_random_numbers_alone() -> None:
    torch.manual_seed(3)
    state, legacy = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002 - it is what is watched
    act("routing_mismatch", 1.0, routing())
    act("advantage_instability", 1.0, torch.ones(8), Batch([0.0] * 8, 4))
    act("reward_spike", 1.0, [0.0] * 8, [""] * 8, ["1"] * 8)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])  # noqa: NPY002


def test_two_faults_on_one_seam_act_one_after_the_other() -> None:
    both = [Injection("kl_sign", 1.0, 1), Injection("entropy_collapse", 0.5, 3)]
    seams = Seams()
    with inject(seams, both, steps=5):
        assert seams.coefficients(Coefficients(0.02), step=2) == Coefficients(-0.02)
        assert seams.coefficients(Coefficients(0.02), step=3) == replace(Coefficients(-0.02), entropy=-0.5)
    assert math.isclose(seams.coefficients(Coefficients(0.02), step=3).beta, 0.02)


CALLS = [answer_call(f"[{n}*7]") for n in range(10, 30)]


@pytest.mark.parametrize("name", ["tool_call_error", "observation_corruption", "termination_error"])
@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_tool_faults_hit_their_share_of_the_calls(name: str, strength: float) -> None:
    turns = act(name, strength, CALLS)
    changed = [after for before, after in zip(CALLS, turns, strict=True) if after != before]
    assert len(changed) == round(strength * len(CALLS))
    assert [turn.call for turn in turns] == [turn.call for turn in CALLS]
    for turn in changed:
        assert turn.failed == (name == "tool_call_error")
        assert turn.done == (name == "termination_error")
    assert act(name, strength, [], step=2) == []


def test_a_corrupted_result_is_another_number() -> None:
    assert [turn.result for turn in act("observation_corruption", 1.0, [answer_call("[47*8]")])] == ["623"]


@pytest.mark.parametrize("name", [name for name, item in FAULTS.items() if item.family == "TE"])
def test_faults_of_tools_are_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(FaultError, match="the run has none"):
        check_injection(Injection(name, 1.0, 1), 5, settings=GRPOSettings())
    assert check_injection(Injection(name, 1.0, 1), 5, settings=GRPOSettings(environment="calculator")).id == name


def test_a_wrong_sign_of_no_kl_term_is_refused() -> None:
    with pytest.raises(FaultError, match="no KL term"):
        check_injection(Injection("kl_sign", 1.0, 1), 5, settings=GRPOSettings(beta=0.0))


@pytest.mark.parametrize("name", [name for name, item in FAULTS.items() if item.needs_experts])
def test_faults_of_experts_are_refused_on_dense_models(name: str) -> None:
    with pytest.raises(FaultError, match="no experts"):
        check_injection(Injection(name, 1.0, 1), 5, experts=False)
