"""The stored maps: what is laid out, and from which distances (UMAP itself is replaced, it takes long)."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.proxy.similarity import distances
from moeproxy.view import expert_map
from tests.proxy.made_up import made_up


def test_every_layer_and_all_of_them_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[np.ndarray, bool]] = []

    def fake(matrix: np.ndarray, start_N2: np.ndarray, *, precomputed: bool, seed: int) -> np.ndarray:
        assert start_N2.shape == (len(matrix), 2)
        asked.append((matrix, precomputed))
        return start_N2.astype(np.float32) + seed

    monkeypatch.setattr(expert_map, "embed", fake)
    profile, told = made_up(), []
    weights = ((1, 1, 0, 0), (0, 0, 0, 1))
    maps = expert_map.compute_maps(profile, weights=weights, seed=3, progress=told.append)
    assert maps.checkpoint_fingerprint == profile.checkpoint_fingerprint
    assert len(told) == len(maps.xy) == 2 * 3
    fused_LEE = distances(profile, output=True).fuse((0, 0, 0, 1))
    np.testing.assert_array_equal(asked[3][0], fused_LEE[0])
    assert [precomputed for _, precomputed in asked] == 2 * [True, True, False]
    for four in weights:
        for layer in (*profile.moe_layers, None):
            found = maps.find(layer, four)
            assert found is not None
            assert len(found) == profile.n_experts * (2 if layer is None else 1)
    assert maps.provenance["seed"] == 3
