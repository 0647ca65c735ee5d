"""Choosing experts: known answers, groups, never-used experts, labels that follow a permutation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from moeproxy.errors import ProxyError
from moeproxy.experts.profile import profile as calibrate
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import METHODS, KeepPlan, allowed_counts, select
from moeproxy.proxy.similarity import distances
from tests import tiny
from tests.proxy.conftest import Case, texts
from tests.proxy.made_up import made_up, planted


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_finds_planted_clusters_and_their_most_used_members(weights: tuple[int, ...], seed: int) -> None:
    profile, truth_LE = planted(6, 5, seed=seed)
    plan = select(profile, 6, weights=weights)
    for row, layer in enumerate(profile.moe_layers):
        assert adjusted_rand_score(truth_LE[row], plan.label_LE[row]) == 1
        used = profile.load_LE[row]
        best = {max(np.flatnonzero(truth_LE[row] == c), key=lambda e: used[e]) for c in range(6)}
        assert set(plan.keep[layer]) == best


def test_fused_views_find_clusters_that_no_single_view_shows() -> None:
    profile, truth_LE = planted(4, 6, noise=1.2, seed=1)
    score = {w: _agreement(select(profile, 4, weights=w), truth_LE) for w in [(1, 1, 1), (1, 0, 0), (0, 0, 1)]}
    assert score[1, 1, 1] > max(score[1, 0, 0], score[0, 0, 1])


def _agreement(plan: KeepPlan, truth_LE: Any) -> float:
    pairs = zip(truth_LE, plan.label_LE, strict=True)
    return float(np.mean([adjusted_rand_score(truth, label) for truth, label in pairs]))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("n_group", [None, 4])
def test_every_method_keeps_sorted_ids_evenly_over_groups(method: Any, n_group: int | None) -> None:
    profile = made_up(n_experts=24, n_group=n_group)
    plan = select(profile, 12, method=method, seed=3)
    assert set(plan.keep) == set(profile.moe_layers)
    for ids in plan.keep.values():
        assert list(ids) == sorted(set(ids))
        assert len(ids) == 12
        if n_group:
            assert [i // 6 for i in ids] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_the_baselines_choose_what_they_say() -> None:
    profile = made_up()
    scores = {
        "frequency": profile.load_LE,
        "gate": profile.gate_LE,
        "reap": profile.saliency_LE / profile.load_LE,
        "first": np.broadcast_to(-np.arange(12), (2, 12)),
    }
    for method, score_LE in scores.items():
        plan = select(profile, 5, method=method)  # type: ignore[arg-type]
        for row, layer in enumerate(profile.moe_layers):
            assert set(plan.keep[layer]) == set(np.argsort(-score_LE[row])[:5]), method
        assert plan.weights is None
        assert set(np.unique(plan.label_LE)) == {-1, 0, 1, 2, 3, 4}


def test_random_depends_on_the_seed_and_differs_between_layers() -> None:
    profile = made_up(n_experts=32)
    one, same = (select(profile, 8, method="random", seed=1) for _ in range(2))
    assert one.keep == same.keep
    assert one.keep != select(profile, 8, method="random", seed=2).keep
    assert one.keep[1] != one.keep[2]


def test_labels_are_new_ids_of_the_representative() -> None:
    profile, _ = planted(4, 3)
    plan = select(profile, 4)
    for row, layer in enumerate(profile.moe_layers):
        for new, old in enumerate(plan.keep[layer]):
            assert plan.label_LE[row, old] == new
        assert set(plan.label_LE[row]) == {0, 1, 2, 3}, "a cluster is never empty"


@pytest.mark.parametrize("representative", ["most_used", "most_gate", "medoid"])
@pytest.mark.parametrize("n_keep", [2, 5, 11, 12])
def test_never_used_experts_and_twins_do_not_break_clustering(representative: Any, n_keep: int) -> None:
    profile = made_up()
    load_LE = profile.load_LE.copy()
    load_LE[:, 4:] = 0
    used_LE1 = load_LE[..., None] > 0
    twins = dataclasses.replace(
        profile,
        load_LE=load_LE,
        gate_LE=np.where(used_LE1[..., 0], profile.gate_LE, 0),
        router_LED=np.ones_like(profile.router_LED),
        context_LED=np.where(used_LE1, np.ones_like(profile.context_LED), 0),
        cooccur_LEE=np.where(used_LE1 & used_LE1.transpose(0, 2, 1), 1, 0),
    )
    for exclude in (True, False):
        plan = select(twins, n_keep, representative=representative, exclude_unused=exclude)
        assert all(len(ids) == n_keep for ids in plan.keep.values())
        if exclude and n_keep >= 4:
            assert all(set(range(4)) <= set(ids) for ids in plan.keep.values())
        if exclude and n_keep < 4:
            assert all(set(ids) <= set(range(4)) for ids in plan.keep.values())


def test_a_layer_without_any_token_still_gets_a_plan() -> None:
    profile = made_up()
    empty = dataclasses.replace(profile, load_LE=np.zeros_like(profile.load_LE), gate_LE=profile.gate_LE * 0)
    for method in METHODS:
        assert len(select(empty, 3, method=method).keep[1]) == 3  # type: ignore[arg-type]


def test_keeping_all_is_the_identity() -> None:
    profile = made_up()
    for method in METHODS:
        plan = select(profile, 12, method=method)  # type: ignore[arg-type]
        assert plan.keep == {1: tuple(range(12)), 2: tuple(range(12))}
        assert (plan.label_LE == np.arange(12)).all()


def test_views_at_hand_give_the_same_plan() -> None:
    profile = made_up()
    views = distances(profile, normalisation="rank", centred=True)
    assert select(profile, 5, views=views) == select(profile, 5, normalisation="rank", centred=True)


@pytest.mark.parametrize("method", ["cluster", "frequency", "gate", "reap"])
def test_permuting_experts_permutes_labels_only(case: Case, method: Any, tmp_path: Path) -> None:
    model = tiny.MODELS[case.kind]()
    order = _permute(model, case)
    permuted = calibrate(tiny.save(model, tmp_path / "m"), texts())
    n_keep = allowed_counts(case.profile)[1]
    plan, other = (select(p, n_keep, method=method) for p in (case.profile, permuted))
    for row, layer in enumerate(case.checkpoint.moe_layers):
        assert sorted(order[layer][list(other.keep[layer])]) == list(plan.keep[layer])
        if method == "cluster":
            assert adjusted_rand_score(plan.label_LE[row][order[layer]], other.label_LE[row]) == 1


def _permute(model: Any, case: Case) -> dict[int, np.ndarray]:
    """Permute the experts of a model within their groups; new expert i of a layer is old expert order[i]."""
    rng = np.random.default_rng(5)
    groups = np.array_split(np.arange(case.checkpoint.n_experts), case.checkpoint.n_group or 1)
    orders = {n: np.concatenate([rng.permutation(g) for g in groups]) for n in case.checkpoint.moe_layers}
    for layer, order in orders.items():
        block = model.model.layers[layer].mlp
        tensors = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        if case.kind == "deepseek_v3":
            tensors.append(block.gate.e_score_correction_bias)
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(tensor[torch.from_numpy(order)].clone())
    return orders


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"n_experts": 6, "top_k": 3}, [3, 4, 5, 6]),
        ({"n_experts": 16, "n_group": 4, "top_k": 3}, [8, 12, 16]),
        # Five experts a token out of two groups need three a group.
        ({"n_experts": 16, "n_group": 4, "top_k": 5}, [12, 16]),
        # One group that scores its best two needs two experts.
        ({"n_experts": 4, "n_group": 1, "top_k": 1, "min_group": 2}, [2, 3, 4]),
    ],
)
def test_allowed_counts(fields: dict[str, Any], counts: list[int]) -> None:
    assert allowed_counts(made_up(**fields)) == counts


def test_checkpoint_and_profile_allow_the_same_counts(case: Case) -> None:
    assert allowed_counts(case.checkpoint) == allowed_counts(case.profile)


@pytest.mark.parametrize("n_keep", [0, 1, -3, 4, 5, 7, 17, 8.5, True])
@pytest.mark.bad_types
def test_impossible_counts_are_refused_listing_the_possible(n_keep: Any) -> None:
    profile = made_up(n_experts=16, n_group=4)
    with pytest.raises(ProxyError, match=rf"cannot keep {n_keep} experts .*4 groups of which 2.*one of 8, 12, 16"):
        select(profile, n_keep)


def test_a_long_list_of_counts_is_shortened() -> None:
    with pytest.raises(ProxyError, match="one of 2 to 128"):
        select(made_up(n_experts=128), 1)


@pytest.mark.bad_types
def test_unknown_method_and_representative_are_refused() -> None:
    with pytest.raises(ProxyError, match="one of cluster, merge, random, first"):
        select(made_up(), 3, method="best")  # type: ignore[arg-type]
    with pytest.raises(ProxyError, match="one of most_used, most_gate, medoid"):
        select(made_up(), 3, representative="mean")  # type: ignore[arg-type]
    with pytest.raises(ProxyError, match="three weights"):
        select(made_up(), 3, weights=(0, 0, 0))


def test_select_does_not_change_the_profile() -> None:
    profile = made_up()
    before = {f.name: np.copy(getattr(profile, f.name)) for f in dataclasses.fields(ExpertProfile) if "_L" in f.name}
    for method in METHODS:
        select(profile, 4, method=method)  # type: ignore[arg-type]
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(profile, name), value)


def test_the_output_view_is_remembered_only_with_a_weight(tmp_path: Path) -> None:
    assert select(made_up(), 4, weights=(1, 1, 2, 0)) == select(made_up(), 4, weights=(1, 1, 2))
    assert select(made_up(), 4, weights=(1, 1, 2, 0)).weights == (0.25, 0.25, 0.5)
    plan = select(made_up(), 4, weights=(1, 1, 1, 1))
    assert KeepPlan.load(plan.save(tmp_path / "plan.json")).weights == plan.weights == (0.25,) * 4


def test_a_plan_survives_saving(tmp_path: Path) -> None:
    plan = select(made_up(), 4, weights=(3, 1, 1), seed=7)
    loaded = KeepPlan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    np.testing.assert_array_equal(loaded.label_LE, plan.label_LE)
    assert loaded.provenance == plan.provenance
    assert repr(loaded) == "KeepPlan(cluster: 4 of 12 experts in 2 layers)"
    assert "layer 2" in loaded._repr_html_()


def test_a_cut_or_foreign_plan_is_refused(tmp_path: Path) -> None:
    file = select(made_up(), 4).save(tmp_path / "plan.json")
    text = file.read_text()
    for content in (text[: len(text) // 2], "", "[]", "{}", text.replace('"format": 1', '"format": 9')):
        file.write_text(content)
        with pytest.raises(ProxyError, match=r"plan\.json: the keep plan cannot be read.*moeproxy\.select"):
            KeepPlan.load(file)
    with pytest.raises(ProxyError, match="cannot be read"):
        KeepPlan.load(tmp_path / "none.json")


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProxyError, match=r"plan\.json: the keep plan cannot be written"):
        select(made_up(), 4).save(tmp_path / "file" / "plan.json")
