"""Super experts, and experts that are kept or dropped in any case."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import METHODS, KeepPlan, select
from moeproxy.proxy.protect import super_experts
from tests.proxy.made_up import made_up, planted

EVERY = sorted(METHODS)


def with_super(profile: ExpertProfile, *places: tuple[int, int], height: float = 100.0) -> ExpertProfile:
    """The profile with extreme peaks at (row, expert)."""
    peak_LE = profile.peak_LE.copy()
    for number, (row, expert) in enumerate(places):
        peak_LE[row, expert] = height + number
    return dataclasses.replace(profile, peak_LE=peak_LE)


def test_super_experts_are_found_where_they_were_planted_and_nowhere_else() -> None:
    profile = made_up(n_layers=4, n_experts=64)
    assert super_experts(profile) == {}, "an ordinary model has none"
    assert super_experts(with_super(profile, (2, 17))) == {3: (17,)}
    assert super_experts(with_super(profile, (0, 5))) == {1: (5,)}


def test_each_of_the_three_conditions_is_needed() -> None:
    profile = made_up(n_layers=8, n_experts=128)
    # Above ten times the median and a tenth of the largest, but more of them than the 99.5 % quantile lets through.
    many = with_super(profile, *[(1, e) for e in range(12)])
    assert 0 < len(super_experts(many).get(2, ())) < 12
    # Above the quantile and ten times the median, but a single expert is more than ten times as high.
    small = with_super(with_super(profile, (1, 3), height=20.0), (4, 9), height=1000.0)
    assert super_experts(small) == {5: (9,)}
    # Above the quantile and a tenth of the largest, but less than ten times the median of the layer.
    assert super_experts(with_super(profile, (1, 3), height=9.0)) == {}


def test_peaks_that_grow_with_depth_make_no_super_experts() -> None:
    profile = made_up(n_layers=6, n_experts=64)
    deep = dataclasses.replace(profile, peak_LE=profile.peak_LE * (4.0 ** np.arange(6, dtype=np.float32))[:, None])
    assert super_experts(deep) == {}


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("n_group", [None, 4])
def test_every_method_keeps_super_experts_unless_told_not_to(method: Any, n_group: int | None) -> None:
    profile = made_up(n_experts=24, n_group=n_group)
    chosen = select(profile, 8, method=method)
    out = next(e for e in range(23, -1, -1) if e not in chosen.keep[2])
    special = with_super(profile, (1, out))
    plan = select(special, 8, method=method)
    assert out in plan.keep[2]
    assert len(plan.keep[2]) == 8
    assert plan.provenance["super_experts"] == {"2": [out]}
    free = select(special, 8, method=method, protect_super=False)
    assert free.keep == chosen.keep
    assert "super_experts" not in free.provenance
    assert "super_experts" not in chosen.provenance


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("n_group", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_wishes_are_granted_by_every_method(method: Any, n_group: int | None, seed: int) -> None:
    profile = made_up(n_experts=24, n_group=n_group, seed=seed)
    rng = np.random.default_rng(seed)
    keep, drop = {}, {}
    for layer in profile.moe_layers:
        groups = (
            np.array_split(rng.permutation(24), 4) if not n_group else rng.permuted(np.arange(24).reshape(4, 6), axis=1)
        )
        keep[layer] = [int(e) for group in groups for e in group[:2]]
        drop[layer] = [int(e) for group in groups for e in group[3:]]
    plan = select(profile, 12, method=method, keep_always=keep, drop_always=drop)
    for row, layer in enumerate(profile.moe_layers):
        assert set(keep[layer]) <= set(plan.keep[layer])
        assert not set(drop[layer]) & set(plan.keep[layer])
        assert len(set(plan.keep[layer])) == 12
        assert_representatives(plan, row, layer)
    assert plan.provenance["keep_always"] == {str(layer): sorted(ids) for layer, ids in keep.items()}
    assert plan.provenance["drop_always"] == {str(layer): sorted(ids) for layer, ids in drop.items()}


def assert_representatives(plan: KeepPlan, row: int, layer: int) -> None:
    """Every kept expert represents itself."""
    assert plan.label_LE[row][list(plan.keep[layer])].tolist() == list(range(plan.n_keep))


def test_a_forced_expert_represents_its_own_cluster() -> None:
    profile, truth_LE = planted(6, 5)
    forced = [int(np.flatnonzero(truth_LE[0] == c)[-1]) for c in (1, 4)]
    plan = select(profile, 6, keep_always={1: forced})
    for expert in forced:
        members = np.flatnonzero(plan.label_LE[0] == plan.label_LE[0][expert])
        assert set(members) == set(np.flatnonzero(truth_LE[0] == truth_LE[0][expert]))
    assert plan.keep[2] == select(profile, 6).keep[2], "the other layer is as before"


def test_two_forced_experts_of_one_cluster_split_it_and_one_other_is_dissolved() -> None:
    profile, truth_LE = planted(6, 5, n_layers=1)
    forced = np.flatnonzero(truth_LE[0] == 2)[:2].tolist()
    plan = select(profile, 6, keep_always={1: forced})
    label_E = plan.label_LE[0]
    assert set(forced) <= set(plan.keep[1])
    assert len(plan.keep[1]) == 6
    mine = np.flatnonzero(truth_LE[0] == 2)
    assert set(label_E[mine]) == set(label_E[forced]), "the split cluster's members stay with the two"
    homeless = [c for c in range(6) if not np.isin(np.flatnonzero(truth_LE[0] == c), plan.keep[1]).any()]
    assert len(homeless) == 1, "one of the five others gave up its place"
    assert_representatives(plan, 0, 1)


def test_as_many_wishes_as_places_decide_alone() -> None:
    profile = made_up()
    for method in METHODS:
        plan = select(profile, 3, method=method, keep_always={1: [4, 0, 9], 2: [1, 2, 3]})  # type: ignore[arg-type]
        assert plan.keep == {1: (0, 4, 9), 2: (1, 2, 3)}


def test_a_never_used_expert_can_be_kept_and_all_used_ones_dropped() -> None:
    profile = made_up()
    load_LE = profile.load_LE.copy()
    load_LE[:, 6:] = 0
    idle = dataclasses.replace(profile, load_LE=load_LE)
    for method in METHODS:
        plan = select(idle, 3, method=method, keep_always={1: [11]}, drop_always={2: range(6)})  # type: ignore[arg-type]
        assert 11 in plan.keep[1]
        assert set(plan.keep[2]) <= set(range(6, 12))


def test_a_dropped_super_expert_is_dropped_and_too_many_keep_the_highest() -> None:
    profile = made_up(n_layers=8, n_experts=128)
    special = with_super(profile, (0, 3), (0, 5), (0, 7))
    assert super_experts(special) == {1: (3, 5, 7)}
    for method in METHODS:
        plan = select(special, 2, method=method)  # type: ignore[arg-type]
        assert plan.keep[1] == (5, 7)
        dropped = select(special, 2, method=method, drop_always={1: [7]})  # type: ignore[arg-type]
        assert dropped.keep[1] == (3, 5)
        beside = select(special, 2, method=method, keep_always={1: [100]})  # type: ignore[arg-type]
        assert beside.keep[1] == (7, 100)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"keep_always": {0: [1]}}, "layer 0 has no experts"),
        ({"keep_always": {1: [12]}}, "keep_always names expert 12 in layer 1.*experts 0 to 11"),
        ({"drop_always": {1: [-1]}}, "drop_always names expert -1"),
        ({"keep_always": {2: [3]}, "drop_always": {2: [3]}}, "layer 2: expert 3 is to be kept and dropped"),
        ({"keep_always": {1: [0, 1, 2, 3]}}, "layer 1: 4 experts are to be kept, but only 3 have a place"),
        ({"drop_always": {1: range(10)}}, "layer 1: drop_always leaves 2 experts, fewer than the 3"),
    ],
)
def test_impossible_wishes_are_refused(wishes: dict[str, Any], message: str) -> None:
    for method in METHODS:
        with pytest.raises(ProxyError, match=message):
            select(made_up(), 3, method=method, **wishes)  # type: ignore[arg-type]


def test_impossible_wishes_within_a_group_name_the_group() -> None:
    profile = made_up(n_experts=24, n_group=4)
    with pytest.raises(ProxyError, match=r"layer 1, group 1 \(experts 6 to 11\): 3 experts .* only 2 have a place"):
        select(profile, 8, keep_always={1: [6, 7, 8]})
    with pytest.raises(ProxyError, match=r"group 3 .*leaves 1 experts, fewer than the 2"):
        select(profile, 8, drop_always={2: range(18, 23)})


def test_no_wishes_leave_the_choice_as_it_was() -> None:
    profile = made_up(n_experts=24)
    for method in METHODS:
        plain = select(profile, 8, method=method, protect_super=False)  # type: ignore[arg-type]
        empty = select(profile, 8, method=method, keep_always={}, drop_always={1: []})  # type: ignore[arg-type]
        assert empty == plain
        np.testing.assert_array_equal(empty.label_LE, plain.label_LE)
        # Keeping what is kept anyway changes nothing either.
        same = select(profile, 8, method=method, keep_always=plain.keep)  # type: ignore[arg-type]
        assert same.keep == plain.keep
        np.testing.assert_array_equal(same.label_LE, plain.label_LE)


@pytest.mark.bad_types
@pytest.mark.parametrize("wish", [{0: [1.5]}, {0: "12"}, {0: 3}, [1, 2], {0: [True]}])
def test_wishes_of_the_wrong_form_are_refused(wish: object) -> None:
    profile = made_up()
    with pytest.raises(ProxyError, match="mapping from decoder layers to lists"):
        select(profile, 6, keep_always=wish)  # type: ignore[arg-type]


@pytest.mark.bad_types
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_keep": 6.0}, "cannot keep"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"weights": "abc"}, "view weights"),
        ({"weights": None}, "view weights"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        select(made_up(), **({"n_keep": 6, "method": "random"} | options))  # type: ignore[arg-type]
