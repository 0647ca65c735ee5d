"""Predicted damage: known answers and a brute-force twin."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import METHODS, allowed_counts, select
from moeproxy.proxy.damage import damage
from moeproxy.proxy.similarity import distances
from tests.proxy.conftest import Case
from tests.proxy.made_up import made_up


def with_choices(profile: ExpertProfile, n_tokens: int = 50, seed: int = 0) -> ExpertProfile:
    """The profile with distinct random experts for every token."""
    rng = np.random.default_rng(seed)
    shape = (n_tokens, len(profile.moe_layers), profile.n_experts)
    choices_TLK = rng.random(shape).argsort(axis=2)[..., : profile.top_k].astype(np.int16)
    return replaced(profile, choices_TLK)


def replaced(profile: ExpertProfile, choices_TLK: np.ndarray) -> ExpertProfile:
    """The profile with these choices, equal gate weights and one token id."""
    weights_TLK = np.full(choices_TLK.shape, 0.5, np.float16)
    tokens_T = np.zeros(len(choices_TLK), np.int32)
    return dataclasses.replace(profile, choices_TLK=choices_TLK, weights_TLK=weights_TLK, tokens_T=tokens_T)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("n_keep", [5, 7, 12])
def test_equals_loops_over_experts_and_tokens(method: Any, n_keep: int) -> None:
    profile = with_choices(made_up(), n_tokens=200)
    plan = select(profile, n_keep, method=method)
    views = distances(profile)
    result, fused_LEE = damage(profile, plan, views), views.fuse()
    for row, layer in enumerate(profile.moe_layers):
        kept = plan.keep[layer]
        gone = [e for e in range(12) if e not in kept]
        lost = sum(profile.gate_LE[row, e] for e in gone) / sum(profile.gate_LE[row])
        assert result.gate_lost_L[row] == pytest.approx(lost)
        far = {}
        for e in gone:
            label = plan.label_LE[row, e]
            near = [kept[label]] if label >= 0 else kept
            far[e] = min(fused_LEE[row, e, k] for k in near)
        assert result.distance_LE[row].tolist() == pytest.approx([far.get(e, 0) for e in range(12)])
        assert result.distance_mean_L[row] == pytest.approx(np.mean(list(far.values())) if far else 0)
        assert result.distance_max_L[row] == pytest.approx(max(far.values(), default=0))
        whole = np.mean([all(e in kept for e in token) for token in profile.choices_TLK[:, row].tolist()])
        assert result.tokens_whole_L is not None
        assert result.tokens_whole_L[row] == pytest.approx(whole)
        assert 0 < whole < 1 or n_keep == 12


def test_keeping_all_damages_nothing(case: Case) -> None:
    result = damage(case.profile, select(case.profile, case.profile.n_experts))
    assert (result.gate_lost_L == 0).all()
    assert (result.distance_LE == 0).all()
    assert (result.distance_mean_L == 0).all()
    assert result.tokens_whole_L is not None
    assert (result.tokens_whole_L == 1).all()


def test_views_are_made_as_the_plan_was(case: Case) -> None:
    options: dict[str, Any] = {"normalisation": "rank", "centred": False, "own_load": False}
    plan = select(case.profile, allowed_counts(case.profile)[1], weights=(1, 0, 2, 3), **options)
    twin = damage(case.profile, plan, distances(case.profile, **options))
    np.testing.assert_array_equal(damage(case.profile, plan).distance_LE, twin.distance_LE)
    assert (twin.distance_LE != damage(case.profile, plan, distances(case.profile)).distance_LE).any()
    with pytest.raises(ProxyError, match="the output view has weight"):
        damage(case.profile, plan, distances(case.profile, output=False))


def test_without_choices_the_share_of_whole_tokens_is_not_known() -> None:
    profile = made_up()
    result = damage(profile, select(profile, 4))
    assert result.tokens_whole_L is None
    assert result.to_frame()["tokens_whole"].isna().all()
    assert "tokens" not in repr(result)


def test_many_tokens_are_sampled_evenly() -> None:
    profile = with_choices(made_up(), n_tokens=20_000)
    plan = select(profile, 7)
    kept_E = np.isin(np.arange(12), plan.keep[1])
    exact = kept_E[profile.choices_TLK[:, 0]].all(axis=1).mean()
    result = damage(profile, plan)
    assert result.tokens_whole_L is not None
    assert result.tokens_whole_L[0] == pytest.approx(exact, abs=0.03)


def test_slots_without_a_routed_expert_lose_nothing() -> None:
    profile = with_choices(made_up())
    plan = select(profile, 4)
    for empty in (-1, 12, 13):
        choices_TLK = np.full_like(profile.choices_TLK, empty)
        result = damage(replaced(profile, choices_TLK), plan)
        assert result.tokens_whole_L is not None
        assert (result.tokens_whole_L == 1).all()


def test_a_layer_without_any_token_loses_no_gate_mass() -> None:
    profile = made_up()
    empty = dataclasses.replace(profile, gate_LE=profile.gate_LE * 0, load_LE=profile.load_LE * 0)
    assert (damage(empty, select(empty, 3)).gate_lost_L == 0).all()


def test_a_plan_of_another_model_is_refused() -> None:
    plan = select(made_up(), 4)
    for other in (made_up(n_experts=16), made_up(n_layers=3)):
        with pytest.raises(ProxyError, match="the plan is for 2 layers of 12 experts"):
            damage(other, plan)


def test_reads_well() -> None:
    profile = with_choices(made_up())
    result = damage(profile, select(profile, 4))
    assert list(result.to_frame()) == ["layer", "gate_lost", "distance_mean", "distance_max", "tokens_whole"]
    assert result.to_frame()["layer"].tolist() == [1, 2]
    assert "of gate mass lost on average" in repr(result)
    assert "<table" in result._repr_html_()
