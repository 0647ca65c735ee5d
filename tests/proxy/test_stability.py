"""Stability of a choice: planted clusters are found again, noise is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import select
from moeproxy.proxy.stability import _resampled, stability
from tests.proxy.conftest import Case
from tests.proxy.made_up import made_up, planted


def folded(profile: ExpertProfile, *, noise: float = 0.0, n_folds: int = 8, seed: int = 0) -> ExpertProfile:
    """The profile with folds that each hold its sums, disturbed by noise (1: as large as the sums)."""
    rng = np.random.default_rng(seed)
    cooccur_LEE = profile.cooccur_LEE.copy()
    np.einsum("lee->le", cooccur_LEE)[:] = profile.load_LE
    sums_LED = profile.context_LED * profile.gate_LE[..., None].astype(np.float32)

    def disturbed(values: np.ndarray) -> np.ndarray:
        return values * (1 + noise * rng.normal(size=(n_folds, *values.shape)))

    counts_FLEE = np.rint(np.abs(disturbed(100 * cooccur_LEE))).astype(np.int32)
    scale_F1 = (1 + 3 * noise * rng.normal(size=(n_folds, *sums_LED.shape))).astype(np.float32)
    return dataclasses.replace(
        profile,
        fold_cooccur_FLEE=(counts_FLEE + counts_FLEE.transpose(0, 1, 3, 2)) // 2,
        fold_gate_FLE=np.abs(disturbed(profile.gate_LE)),
        fold_context_FLEP=(sums_LED * scale_F1).astype(np.float32),
    )


def test_planted_clusters_are_found_in_every_resample() -> None:
    profile, truth_LE = planted(5, 4)
    # With equal folds every resample is the whole.
    result = stability(folded(profile), 5)
    assert result.measure == "adjusted Rand index"
    assert result.agreement_RL.shape == (20, 2)
    assert (result.agreement_RL == 1).all()
    assert set(np.unique(result.kept_share_LE)) == {0, 1}
    assert (result.kept_share_LE.sum(axis=1) == 5).all()
    # Clear clusters stay although the folds differ; representatives may change.
    noisy = stability(folded(profile, noise=0.2), 5)
    assert noisy.agreement_mean_L.min() > 0.9
    assert truth_LE.shape == noisy.kept_share_LE.shape


def test_choices_on_noise_are_unstable_and_quantiles_enclose_the_mean() -> None:
    result = stability(folded(made_up(n_experts=24), noise=0.6), 8, n_resamples=40)
    assert result.n_resamples == 40
    assert result.agreement_mean_L.max() < 0.9
    assert (result.agreement_low_L < result.agreement_mean_L).all()
    assert (result.agreement_mean_L < result.agreement_high_L).all()
    np.testing.assert_allclose(result.kept_share_LE.sum(axis=1), 8)
    np.testing.assert_allclose(result.agreement_mean_L, result.agreement_RL.mean(axis=0))


def test_equal_seeds_give_equal_results() -> None:
    profile = folded(made_up(n_experts=24), noise=0.6)
    one, same, other = (stability(profile, 8, seed=seed, n_resamples=5).agreement_RL for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


@pytest.mark.parametrize("method", ["frequency", "gate", "random", "first"])
def test_ranked_methods_compare_the_kept_experts(method: Any) -> None:
    profile = folded(made_up(n_experts=24), noise=0.6)
    result = stability(profile, 8, method=method)
    assert result.measure == "Jaccard index of the kept experts"
    assert result.method == method
    if method in ("random", "first"):
        assert (result.agreement_RL == 1).all(), "they look at no token"
    else:
        assert 0 < result.agreement_mean_L.min() <= result.agreement_mean_L.max() < 1


def test_jaccard_against_a_brute_force_twin() -> None:
    profile = folded(made_up(n_experts=24), noise=0.6)
    result = stability(profile, 8, method="frequency", n_resamples=3, seed=4)
    rng = np.random.default_rng(4)
    whole = select(_resampled(profile, np.ones(8)), 8, method="frequency").keep
    for row in range(3):
        counts_F = np.bincount(rng.integers(0, 8, 8), minlength=8)
        keep = select(_resampled(profile, counts_F), 8, method="frequency").keep
        for column, layer in enumerate(profile.moe_layers):
            one, other = set(whole[layer]), set(keep[layer])
            assert result.agreement_RL[row, column] == pytest.approx(len(one & other) / len(one | other))


def test_all_folds_once_are_the_profile(case: Case) -> None:
    whole = _resampled(case.profile, np.ones(len(case.profile.fold_gate_FLE)))
    np.testing.assert_array_equal(whole.load_LE, case.profile.load_LE)
    np.testing.assert_array_equal(whole.cooccur_LEE, case.profile.cooccur_LEE)
    np.testing.assert_allclose(whole.gate_LE, case.profile.gate_LE)
    np.testing.assert_allclose(whole.context_LED, case.profile.context_LED, atol=1e-5)
    assert whole.n_tokens == case.profile.n_tokens


def test_options_reach_the_choice(case: Case) -> None:
    layer, calls = case.profile.moe_layers[0], []
    result = stability(
        case.profile,
        8 if case.kind == "deepseek_v3" else 4,
        n_resamples=3,
        progress=lambda done, total: calls.append((done, total)),
        weights=(1, 1, 1, 1),
        normalisation="rank",
        keep_always={layer: [0]},
        drop_always={layer: [1]},
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert result.kept_share_LE[0, 0] == 1
    assert result.kept_share_LE[0, 1] == 0


def test_what_cannot_be_measured_is_refused() -> None:
    profile = folded(made_up())
    for few in (made_up(), folded(made_up(), n_folds=1)):
        with pytest.raises(ProxyError, match=r"the profile has [01] folds of texts.*at least 2"):
            stability(few, 4)
    with pytest.raises(ProxyError, match="n_resamples is 0"):
        stability(profile, 4, n_resamples=0)
    with pytest.raises(ProxyError, match="'reap' cannot be measured"):
        stability(profile, 4, method="reap")
    with pytest.raises(ProxyError, match="views cannot be given"):
        stability(profile, 4, views=None)


def test_reads_well() -> None:
    result = stability(folded(made_up()), 4, n_resamples=3)
    assert list(result.to_frame()) == ["layer", "agreement", "low", "high", "always_kept"]
    assert result.to_frame()["layer"].tolist() == [1, 2]
    assert repr(result).startswith("Stability(cluster-4: adjusted Rand index 1.00 over 3 resamples")
    assert "<table" in result._repr_html_()
