"""Layouts of experts: known answers for scaling, UMAP in a process that can be ended, and what is stored."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.places import data_dir
from moeproxy.view import expert_layout
from moeproxy.view.expert_layout import (
    ExpertMaps,
    LayerFeatures,
    layout_key,
    pca_layout,
    pca_of_features,
    shipped_maps,
    umap_layout,
)
from tests.proxy.made_up import made_up, planted


def _apart(xy_N2: np.ndarray) -> np.ndarray:
    return np.linalg.norm(xy_N2[:, None] - xy_N2, axis=2)


def test_scaling_recovers_points_of_a_plane() -> None:
    truth_N2 = np.random.default_rng(0).normal(size=(12, 2))
    found_N2 = pca_layout(_apart(truth_N2))
    np.testing.assert_allclose(_apart(found_N2), _apart(truth_N2), atol=1e-5)
    np.testing.assert_allclose(found_N2.mean(axis=0), 0, atol=1e-6)


def test_scaling_of_features_is_the_same() -> None:
    points_NX = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float32)
    by_distance, by_features = pca_layout(_apart(points_NX)), pca_of_features(points_NX)
    np.testing.assert_allclose(by_distance, by_features, atol=1e-4)


def test_few_or_equal_experts_have_places_too() -> None:
    for n in (1, 2, 3):
        assert np.isfinite(pca_layout(np.zeros((n, n)))).all()
    assert pca_of_features(np.zeros((3, 1), np.float32)).shape == (3, 2)


@pytest.mark.parametrize("weights", [(1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 1, 1)])
def test_planted_clusters_lie_together_across_views(weights: tuple[int, ...]) -> None:
    profile, truth_LE = planted(4, 6, n_layers=1, noise=0.02)
    found_NX = LayerFeatures.of(profile).weigh(weights)
    apart, same = _apart(found_NX), truth_LE.reshape(-1)[:, None] == truth_LE.reshape(-1)
    assert apart[same].max() < apart[~same].min()


def test_coactivation_joins_experts_that_the_same_tokens_visit_in_two_layers() -> None:
    rng = np.random.default_rng(0)
    trade_T = rng.integers(0, 6, 900)
    choices_TLK = np.stack([trade_T, 5 - trade_T], axis=1)[..., None].astype(np.int16)
    kept = {"choices_TLK": choices_TLK, "weights_TLK": np.ones(choices_TLK.shape, np.float16)}
    kept["tokens_T"] = trade_T.astype(np.int32)
    profile = dataclasses.replace(made_up(n_layers=2, n_experts=6), top_k=1, **kept)
    apart = _apart(LayerFeatures.of(profile).weigh((0, 1, 0, 0)))
    np.fill_diagonal(apart, np.inf)
    assert apart.argmin(axis=1).tolist() == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_coactivation_across_layers_needs_the_choices() -> None:
    with pytest.raises(MoeproxyError, match="keep_choices=True"):
        LayerFeatures.of(made_up()).weigh((0, 1, 0, 0))
    assert LayerFeatures.of(made_up()).weigh((1, 1, 0, 0)).shape[0] == 24


def test_keys_do_not_depend_on_the_scale_of_weights() -> None:
    assert layout_key(3, (5, 5, 5, 0)) == layout_key(3, (1 / 3, 1 / 3, 1 / 3)) == (3, (0.333, 0.333, 0.333, 0.0))
    assert layout_key(None, (0, 2, 0, 0)) != layout_key(0, (0, 2, 0, 0))


def test_maps_are_stored_and_found_again(tmp_path: Path) -> None:
    xy_N2 = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    maps = ExpertMaps("ab12", {layout_key(1, (1, 1, 1)): xy_N2, layout_key(None, (1, 0, 0)): 2 * xy_N2}, {"seed": 0})
    read = ExpertMaps.load(maps.save(tmp_path / "maps.npz"))
    np.testing.assert_array_equal(read.find(1, (5, 5, 5, 0)), xy_N2)
    np.testing.assert_array_equal(read.find(None, (1, 0, 0)), 2 * xy_N2)
    assert read.find(1, (1, 0, 0)) is None
    assert (read.checkpoint_fingerprint, read.provenance) == ("ab12", {"seed": 0})
    assert "2 layouts" in repr(read)


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_unreadable_maps_are_refused(damage: str, tmp_path: Path) -> None:
    path = ExpertMaps("ab12", {}).save(tmp_path / "maps.npz")
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        np.savez(path, something=np.zeros(2))
    with pytest.raises(MoeproxyError, match="cannot be read"):
        ExpertMaps.load(path)


@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "deepseek-v3-tiny"])
def test_maps_of_the_shipped_models_are_shipped(name: str) -> None:
    checkpoint = Checkpoint.open(data_dir() / "models" / name)
    maps = shipped_maps(checkpoint.fingerprint)
    for layer in (*checkpoint.moe_layers, None):
        for weights in ((1, 1, 1, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
            xy_N2 = maps.find(layer, weights)
            assert xy_N2 is not None
            assert xy_N2.shape == (checkpoint.n_experts * (1 if layer is not None else len(checkpoint.moe_layers)), 2)
            assert np.isfinite(xy_N2).all()
    assert shipped_maps("another").xy == {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the module starts."""
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(expert_layout.subprocess, "Popen", Noted)
    return processes


class Enough(BaseException):
    """What a cancelled report raises; not an Exception, as in the panels."""


def test_umap_is_ended_when_the_reader_cancels(started: list[subprocess.Popen[bytes]]) -> None:
    def cancel(share: float, text: str) -> None:
        assert 0 <= share < 1
        assert "UMAP" in text
        raise Enough

    start_s = time.monotonic()
    with pytest.raises(Enough):
        umap_layout(np.ones((5, 5)) - np.eye(5), precomputed=True, report=cancel)
    assert time.monotonic() - start_s < 10
    assert started[0].poll() is not None, "the process is gone"


def test_a_failure_of_umap_is_quoted(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(MoeproxyError, match=r"UMAP failed: .*n_neighbors"):
        umap_layout(np.ones((2, 3)), precomputed=False)


def test_umap_keeps_planted_clusters_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # compiling takes longer than these few points without
    rng = np.random.default_rng(0)
    truth_N = np.arange(3).repeat(6)
    points_NX = 10 * np.eye(3, 5)[truth_N] + rng.normal(size=(18, 5))
    xy_N2 = umap_layout(points_NX, precomputed=False)
    apart, same = _apart(xy_N2), truth_N[:, None] == truth_N
    assert xy_N2.dtype == np.float32
    assert apart[same].mean() < apart[~same].mean() / 2
