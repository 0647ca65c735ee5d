"""Three views of how alike experts are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from moeproxy.errors import ProxyError
from moeproxy.proxy.similarity import Views, check_weights, distances
from tests.proxy.made_up import made_up

VIEWS = ("router_LEE", "coactivation_LEE", "context_LEE", "output_LEE")


def test_views_equal_scipy_cosines_scaled_per_layer() -> None:
    profile = made_up()
    views = distances(profile, centred=False)
    off = ~np.eye(profile.n_experts, dtype=bool)
    sources = (profile.router_LED, profile.cooccur_LEE, profile.context_LED, profile.output_LED)
    for name, vectors in zip(VIEWS, sources, strict=True):
        for layer in range(2):
            twin = cdist(vectors[layer].astype(float), vectors[layer].astype(float), "cosine")
            twin = (twin - twin[off].min()) / (twin[off].max() - twin[off].min())
            np.testing.assert_allclose(getattr(views, name)[layer][off], twin[off], atol=1e-5)


@pytest.mark.parametrize("normalisation", ["minmax", "rank", "none"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("own_load", [False, True])
def test_views_are_distances(normalisation: str, centred: bool, own_load: bool) -> None:
    views = distances(made_up(), normalisation=normalisation, centred=centred, own_load=own_load)  # type: ignore[arg-type]
    for name in VIEWS:
        view = getattr(views, name)
        assert np.isfinite(view).all()
        assert (view >= 0).all()
        np.testing.assert_array_equal(view, view.transpose(0, 2, 1))
        assert (np.diagonal(view, axis1=1, axis2=2) == 0).all()
        if normalisation != "none":
            assert view.max() == pytest.approx(1)


def test_one_layer_equals_its_part_of_all() -> None:
    profile = made_up()
    one, every = distances(profile, layer=2), distances(profile)
    for name in VIEWS:
        np.testing.assert_allclose(getattr(one, name)[0], getattr(every, name)[1], atol=1e-6)
    with pytest.raises(ProxyError, match=r"layer 0 has no experts.*one of 1, 2"):
        distances(profile, layer=0)


def test_rescaling_hidden_states_or_counts_moves_nothing() -> None:
    profile = made_up()
    scaled = dataclasses.replace(
        profile,
        context_LED=profile.context_LED * 8,
        cooccur_LEE=profile.cooccur_LEE * 3,
        load_LE=profile.load_LE * 3,
    )
    for name in VIEWS:
        np.testing.assert_allclose(getattr(distances(scaled), name), getattr(distances(profile), name), atol=1e-5)


def test_a_never_used_expert_is_far_from_all_but_not_infinitely() -> None:
    profile = made_up()
    load_LE, context_LED = profile.load_LE.copy(), profile.context_LED.copy()
    cooccur_LEE = profile.cooccur_LEE.copy()
    load_LE[:, 3] = context_LED[:, 3] = cooccur_LEE[:, 3] = cooccur_LEE[:, :, 3] = 0
    views = distances(dataclasses.replace(profile, load_LE=load_LE, context_LED=context_LED, cooccur_LEE=cooccur_LEE))
    assert (np.delete(views.context_LEE[:, 3], 3, axis=1) == 1).all()
    assert (np.delete(views.coactivation_LEE[:, 3], 3, axis=1) == 1).all()
    assert np.delete(views.router_LEE[:, 3], 3, axis=1).min() < 1


def test_identical_or_wholly_unused_experts_give_zeros_or_ones_not_nan() -> None:
    profile = made_up()
    same = dataclasses.replace(profile, router_LED=np.ones_like(profile.router_LED))
    assert (distances(same).router_LEE == 0).all()
    unused = dataclasses.replace(profile, load_LE=np.zeros_like(profile.load_LE))
    assert np.isfinite(distances(unused).context_LEE).all()


def test_fuse_is_the_weighted_mean_and_scale_free() -> None:
    views = distances(made_up())
    third = (views.router_LEE + views.coactivation_LEE + views.context_LEE) / 3
    np.testing.assert_allclose(views.fuse(), third, atol=1e-6)
    np.testing.assert_allclose(views.fuse((5, 5, 5)), third, atol=1e-6)
    np.testing.assert_allclose(views.fuse((0, 2, 0)), views.coactivation_LEE, atol=1e-6)


def test_the_output_view_joins_only_with_a_weight() -> None:
    views, without = distances(made_up()), distances(made_up(), output=False)
    assert without.output_LEE is None
    np.testing.assert_array_equal(without.fuse(), views.fuse())
    np.testing.assert_array_equal(without.fuse((1, 2, 3, 0)), views.fuse((1, 2, 3)))
    np.testing.assert_allclose(views.fuse((0, 0, 0, 2)), views.output_LEE, atol=1e-6)
    quarter = sum(getattr(views, name) for name in VIEWS) / 4
    np.testing.assert_allclose(views.fuse((1, 1, 1, 1)), quarter, atol=1e-6)
    with pytest.raises(ProxyError, match=r"the output view has weight 0\.25.*distances\(profile, output=True\)"):
        without.fuse((1, 1, 1, 1))


def test_the_output_view_is_centred_like_the_context() -> None:
    profile = made_up()
    shifted = dataclasses.replace(
        profile, context_LED=profile.context_LED + np.float32(9), output_LED=profile.output_LED + np.float32(9)
    )
    for name in ("context_LEE", "output_LEE"):
        one, other = (getattr(distances(p), name) for p in (profile, shifted))
        np.testing.assert_allclose(one, other, atol=1e-4)
        raw, moved = (getattr(distances(p, centred=False), name) for p in (profile, shifted))
        assert np.abs(raw - moved).max() > 0.1


def test_weights_of_three_stay_three() -> None:
    assert check_weights((1, 1, 2)) == check_weights((1, 1, 2, 0)) == (0.25, 0.25, 0.5)
    assert check_weights((1, 1, 1, 1)) == (0.25, 0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    "weights", [(0, 0, 0), (0, 0, 0, 0), (1, 1, 1, -1), (1, 1, 1, 1, 1), (1, 1), (1, 1, -1), (1, float("nan"), 1), ()]
)
def test_impossible_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ProxyError, match="three weights"):
        distances(made_up()).fuse(weights)


@pytest.mark.bad_types
def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ProxyError, match="minmax, rank or none"):
        distances(made_up(), normalisation="zscore")  # type: ignore[arg-type]


def test_views_remember_their_options() -> None:
    views = distances(made_up(), normalisation="rank", centred=True, own_load=False)
    assert isinstance(views, Views)
    assert (views.normalisation, views.centred, views.own_load) == ("rank", True, False)
