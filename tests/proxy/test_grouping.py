"""Representatives of clusters under every mix of ties, never-used and forced experts."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.proxy.grouping import represent


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("exclude_unused", [True, False])
def test_every_wish_is_granted_whatever_the_distances(by_rank: bool, exclude_unused: bool) -> None:
    rng, tried = np.random.default_rng(0), 0
    for _ in range(400):
        n_experts = int(rng.integers(2, 14))
        n_keep = int(rng.integers(1, n_experts + 1))
        # Few different places and loads: twins, ties and never-used experts are frequent.
        place_EX = rng.integers(0, 4, (n_experts, 2)).astype(np.float32)
        distance_EE = np.abs(place_EX[:, None] - place_EX[None]).sum(axis=2)
        load_E, order = rng.integers(0, 4, n_experts), rng.permutation(n_experts)
        must_E, never_E = np.zeros(n_experts, dtype=bool), np.zeros(n_experts, dtype=bool)
        must_E[order[: rng.integers(0, n_keep + 1)]] = True
        never_E[order[n_experts - rng.integers(0, n_experts - n_keep + 1) :]] = True
        if (must_E & never_E).any():
            continue
        tried += 1
        rank_E = load_E if by_rank else None
        owner_E = represent(distance_EE, load_E, rank_E, n_keep, must_E, never_E, exclude_unused=exclude_unused)
        kept = np.unique(owner_E)
        assert len(kept) == n_keep
        assert (owner_E[kept] == kept).all(), "a representative represents itself"
        assert must_E[kept].sum() == must_E.sum()
        assert not never_E[kept].any()
    assert tried > 200


def test_the_cheapest_cluster_gives_up_its_place() -> None:
    # Clusters on a line at 0, 10 and 13; two forced experts in the first. The pair at 10 and 13 costs 3 a head to join,
    # and the one at 13 has fewer members.
    place_E = np.array([0, 0.1, 0.2, 10, 10.1, 10.2, 13], dtype=np.float32)
    distance_EE = np.abs(place_E[:, None] - place_E[None])
    load_E, nobody_E = np.array([9, 1, 8, 7, 1, 1, 6]), np.zeros(7, dtype=bool)
    must_E = np.isin(np.arange(7), [0, 2])
    free_E = represent(distance_EE, load_E, load_E, 3, nobody_E, nobody_E)
    assert free_E.tolist() == [0, 0, 0, 3, 3, 3, 6]
    owner_E = represent(distance_EE, load_E, load_E, 3, must_E, nobody_E)
    assert owner_E.tolist() == [0, 0, 2, 3, 3, 3, 3]
