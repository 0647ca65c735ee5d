"""Probes against brute-force twins."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.lab import probes


def test_mismatch_equals_numpy() -> None:
    rng = np.random.default_rng(0)
    trained, sampled = np.log(rng.uniform(0.05, 1, (2, 3, 5)))
    mask = rng.integers(0, 2, (3, 5)).astype(bool)
    got = probes.mismatch(torch.tensor(trained), torch.tensor(sampled), torch.tensor(mask))
    r = (trained - sampled)[mask]
    assert got["logprob_diff_mean"] == pytest.approx(np.abs(r).mean())
    assert got["logprob_diff_max"] == pytest.approx(np.abs(r).max())
    assert got["logprob_diff_k3"] == pytest.approx((np.exp(r) - 1 - r).mean())
    assert got["prob_pearson"] == pytest.approx(np.corrcoef(np.exp(trained)[mask], np.exp(sampled)[mask])[0, 1])


def test_equal_engines_have_no_mismatch() -> None:
    same = -torch.rand(2, 4)
    got = probes.mismatch(same, same.clone(), torch.ones(2, 4))
    assert got["logprob_diff_max"] == got["logprob_diff_k3"] == 0
    assert got["prob_pearson"] == pytest.approx(1)


@pytest.mark.parametrize(("tokens", "ratio"), [([], 0.0), ([5], 0.0), ([1, 2, 3], 0.0), ([1, 1, 1, 1], 0.75)])
def test_repetition_ratio(tokens: list[int], ratio: float) -> None:
    assert probes.repetition_ratio(tokens) == ratio


def test_group_signals_by_hand() -> None:
    got = probes.group_signals([1, 0, 1, 0, 1, 1, 1, 1], samples=4)
    assert got["reward_mean"] == 0.75
    assert got["zero_variance_groups"] == 0.5
    assert got["reward_std"] == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


def test_every_large_parameter_belongs_to_a_module(shipped: Path) -> None:
    model = load_model(Checkpoint.open(shipped))
    rest = {name for name, _ in model.named_parameters() if probes.module_of(name) is None}
    assert all("norm" in name or ".mlp." in name for name in rest), rest
    groups = {probes.module_of(name) for name, _ in model.named_parameters()}
    assert groups >= set(probes.MODULES)


def test_gradient_norms_split_the_total_and_show_infinity() -> None:
    model = nn.ModuleDict({"experts": nn.Linear(3, 3), "gate": nn.Linear(3, 2), "norm": nn.LayerNorm(3)})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    total = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    got = probes.gradient_norms(model.named_parameters())
    assert got["grad_norm"] == pytest.approx(total, rel=1e-5)
    assert got["grad_norm_embeddings"] == 0
    model["gate"].bias.grad[0] = math.inf
    got = probes.gradient_norms(model.named_parameters())
    assert math.isinf(got["grad_norm"])
    assert math.isinf(got["grad_norm_router"])
    assert math.isfinite(got["grad_norm_experts"])


def test_weight_change_is_the_norm_since_the_last_call() -> None:
    layer = nn.Linear(2, 2, bias=False)
    change = probes.WeightChange(layer.parameters())
    assert change.measure() == 0
    with torch.no_grad():
        layer.weight += 3.0
    assert change.measure() == pytest.approx(6.0)
    assert change.measure() == 0


class _Experts(nn.Module):
    num_experts = 4

    def forward(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return hidden


def test_router_load_counts_masked_tokens_only() -> None:
    model = nn.ModuleDict({"7": nn.ModuleDict({"experts": _Experts()})})
    load = probes.RouterLoad(model)
    index = torch.tensor([[0, 1], [0, 2], [3, 3], [0, 1]])
    load.watch(torch.tensor([[1, 1], [0, 1]]))
    model["7"]["experts"](torch.zeros(4, 3), index)
    load.watch(None)
    model["7"]["experts"](torch.zeros(4, 3), index[:1])  # not watched: must not count
    share = np.array([3, 2, 1, 0]) / 6
    entropy = -(share[:3] * np.log(share[:3])).sum() / np.log(4)
    assert load.signals()["router_load_entropy/7"] == pytest.approx(entropy)
    assert load.signals()["router_max_violation/7"] == pytest.approx(3 / 1.5 - 1)
    load.close()
    load.watch(torch.ones(1))
    model["7"]["experts"](torch.zeros(4, 3), index)
    assert load.signals() == {}
