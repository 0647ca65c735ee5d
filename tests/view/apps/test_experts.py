"""The expert panel: controls to clusters, map, table and forced choices."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import moeproxy
from moeproxy.errors import ProfileError, ProxyError
from moeproxy.proxy.damage import damage
from moeproxy.proxy.similarity import distances
from moeproxy.view.apps.experts import ExpertPanel
from moeproxy.view.expert_layout import ExpertMaps, layout_key
from moeproxy.view.figures_expert_map import EXPERTS, changes, map_figure, values
from tests import tiny

Made = tuple[moeproxy.Checkpoint, moeproxy.ExpertProfile]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tiny.write(tmp_path_factory.mktemp("model") / "tiny", request.param)
    return moeproxy.Checkpoint.open(path), moeproxy.profile(path, tiny.TEXTS)


@pytest.fixture
def panel(made: Made) -> ExpertPanel:
    return ExpertPanel(*made, n_keep=moeproxy.allowed_counts(made[1])[1])


def _trace(panel: ExpertPanel, index: int = EXPERTS) -> Any:
    return panel.figure.widget.data[index]


def _drawn_afresh(panel: ExpertPanel) -> None:
    """What is on the screen equals a figure made from the state at hand."""
    for live, fresh in zip(panel.figure.widget.data, map_figure(panel.state).data, strict=True):
        for name in ("x", "y", "z", "text", "hovertext", "customdata"):
            if name in fresh:
                np.testing.assert_array_equal(np.asarray(live[name]), np.asarray(fresh[name]))
        if "marker" in fresh:
            np.testing.assert_array_equal(np.asarray(live.marker.color), np.asarray(fresh.marker.color))


def test_shows_clusters_of_equal_weights_at_first(panel: ExpertPanel) -> None:
    assert panel.plan == moeproxy.select(panel.profile, panel.count.value)
    layer = panel.profile.moe_layers[0]
    kept = np.flatnonzero(np.asarray(_trace(panel).customdata) == np.arange(panel.profile.n_experts))
    assert kept.tolist() == list(panel.plan.keep[layer])
    assert len(panel.table.frame) == panel.profile.n_experts
    np.testing.assert_allclose(np.asarray(_trace(panel, 8).y), 100 * damage(panel.profile, panel.plan).gate_lost_L)
    _drawn_afresh(panel)


def test_sliders_cluster_anew_from_the_profile_alone(panel: ExpertPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a slider move must not load the model")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    panel.choose(panel.count.counts[0])
    for slider, weight in zip(panel.weight_sliders, (1, 0, 2, 3), strict=True):
        slider.value = weight
    panel.layer.value = panel.profile.moe_layers[-1]
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    assert panel.plan == moeproxy.select(panel.profile, panel.count.counts[0], weights=(1, 0, 2, 3))
    fused_LEE = distances(panel.profile, output=True).fuse((1, 0, 2, 3))
    order = panel.state.order_E
    np.testing.assert_allclose(np.asarray(_trace(panel, 6).z), fused_LEE[-1][np.ix_(order, order)], atol=6e-4)
    assert panel.summary.text.startswith(f"Layer {panel.layer.value} keeps")
    _drawn_afresh(panel)


def test_no_weight_at_all_is_refused_in_words(panel: ExpertPanel) -> None:
    for slider in panel.weight_sliders:
        slider.value = 0
    assert panel.settle()
    assert "view weights" in panel.status.text
    panel.weight_sliders[0].value = 1
    assert panel.settle()
    assert not panel.status.is_error


def test_map_of_all_layers_holds_every_expert(panel: ExpertPanel) -> None:
    panel.scope.value = True
    assert panel.settle()
    n_layers, n_experts = panel.profile.load_LE.shape
    assert len(_trace(panel).x) == n_layers * n_experts
    assert panel.state.pair(n_experts + 2) == (panel.profile.moe_layers[1], 2)
    for place, keeper in enumerate(panel.state.keeper_N):
        layer, expert = panel.state.pair(place)
        kept = panel.plan.keep[layer][panel.plan.label_of(layer)[expert]]
        assert panel.state.pair(int(keeper)) == (layer, kept)
    _drawn_afresh(panel)


def test_text_box_clicks_and_boxes_select(panel: ExpertPanel) -> None:
    first, second = panel.profile.moe_layers[:2]
    panel.pick(f"0-2, {second}:3")
    assert panel.settle()
    assert panel.selected == {(first, 0), (first, 1), (first, 2), (second, 3)}
    assert list(zip(panel.table.frame["layer"], panel.table.frame["expert"], strict=True)) == sorted(panel.selected)
    assert len(_trace(panel, 1).x) == 3, "the one of another layer is not on this map"
    trace = _trace(panel)
    for dispatch in trace._select_callbacks:
        dispatch(trace, SimpleNamespace(point_inds=[4, 5]), None)
    assert panel.selected == {(first, 4), (first, 5)}
    assert panel.picker.value == "4, 5"
    for dispatch in trace._click_callbacks:
        dispatch(trace, SimpleNamespace(point_inds=[5]), None)
    assert panel.selected == {(first, 4)}
    panel.clear_button.click()
    assert panel.settle()
    assert panel.selected == frozenset()
    assert len(panel.table.frame) == panel.profile.n_experts


def test_a_wrong_text_changes_nothing(panel: ExpertPanel) -> None:
    panel.pick("1")
    panel.pick("1, 999")
    assert "'999' names no expert" in panel.status.text
    assert panel.selected == {(panel.profile.moe_layers[0], 1)}


def test_forced_choices_reach_plan_map_and_damage(panel: ExpertPanel) -> None:
    layer = panel.profile.moe_layers[0]
    dropped = next(e for e in range(panel.profile.n_experts) if e not in panel.plan.keep[layer])
    panel.pick(str(dropped))
    panel.keep_button.click()
    assert panel.settle()
    assert panel.keep_always == {layer: (dropped,)}
    assert dropped in panel.plan.keep[layer]
    assert panel.plan == moeproxy.select(panel.profile, panel.count.value, keep_always={layer: (dropped,)})
    assert "always kept" in panel.table.frame["role"][0]
    assert len(_trace(panel, 4).x) == 1
    panel.drop_button.click()
    assert panel.settle()
    assert (panel.keep_always, panel.drop_always) == ({}, {layer: (dropped,)})
    assert dropped not in panel.plan.keep[layer]
    panel.free_button.click()
    assert panel.settle()
    assert (panel.keep_always, panel.drop_always) == ({}, {})
    _drawn_afresh(panel)


def test_a_click_can_force_and_free(panel: ExpertPanel) -> None:
    layer, trace = panel.profile.moe_layers[0], _trace(panel)
    panel.action.value = "drop"
    for expected in ({layer: (2,)}, {}):
        for dispatch in trace._click_callbacks:
            dispatch(trace, SimpleNamespace(point_inds=[2]), None)
        assert panel.drop_always == expected
    assert panel.settle()


def test_impossible_wishes_are_refused_and_undone(panel: ExpertPanel) -> None:
    panel.keep_button.click()
    assert panel.settle()
    assert "no expert is selected" in panel.status.text
    panel.pick(f"0-{panel.profile.n_experts - 1}")
    panel.keep_button.click()
    assert panel.settle()
    assert "are to be kept" in panel.status.text
    assert panel.keep_always == {}
    assert panel.settle()


def test_a_stored_umap_is_used_and_a_computed_one_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = made[1]
    layer = profile.moe_layers[0]
    stored_E2 = np.random.default_rng(0).normal(size=(profile.n_experts, 2)).astype(np.float32)
    maps = ExpertMaps(profile.checkpoint_fingerprint, {layout_key(layer, (1, 1, 1, 0)): stored_E2})
    panel = ExpertPanel(*made, maps=maps)
    assert panel.state.layout == "UMAP"
    np.testing.assert_array_equal(np.asarray(_trace(panel).x), stored_E2[:, 0])
    panel.layout.value = False
    assert panel.settle()
    assert panel.state.layout == "PCA"
    panel.layout.value = True
    panel.weight_sliders[0].value = 0
    assert panel.settle()
    assert panel.state.layout == "PCA", "no map is stored for these weights"
    monkeypatch.setattr("moeproxy.view.apps.experts.umap_layout", lambda *_, **__: 3 * stored_E2)
    panel.job.start()
    assert panel.job.join(60) == "done"
    assert panel.settle()
    assert panel.state.layout == "UMAP"
    np.testing.assert_array_equal(np.asarray(_trace(panel).x), 3 * stored_E2[:, 0])


def test_without_a_tokenizer_tokens_are_numbers(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise moeproxy.MoeproxyError("no tokenizer")

    monkeypatch.setattr("moeproxy.view.apps.experts.load_tokenizer", missing)
    panel = ExpertPanel(*made)
    assert panel._decode(5) == "token 5"
    assert len(panel.table.frame) == panel.profile.n_experts


def test_a_profile_without_choices_can_be_shown(made: Made) -> None:
    profile = made[1]
    n_layers, top_k = len(profile.moe_layers), profile.top_k
    bare = dataclasses.replace(
        profile,
        tokens_T=np.zeros(0, np.int32),
        choices_TLK=np.zeros((0, n_layers, top_k), np.int16),
        weights_TLK=np.zeros((0, n_layers, top_k), np.float16),
    )
    panel = ExpertPanel(made[0], bare)
    assert set(panel.table.frame["top tokens"]) == {"not kept in this profile"}
    assert "tokens that keep all their experts" not in panel.damage_table.frame
    panel.scope.value = True
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text


def test_a_layer_without_experts_is_refused(made: Made) -> None:
    with pytest.raises(moeproxy.MoeproxyError, match="layer 99 has no experts"):
        ExpertPanel(*made, layer=99)


def test_only_what_differs_is_sent(panel: ExpertPanel) -> None:
    before = values(panel.state)
    assert [changes(old, new) for old, new in zip(before, values(panel.state), strict=True)] == 10 * [{}]
    panel.choose(panel.count.counts[0])
    assert panel.settle()
    after = values(panel.state)
    found = changes(before[EXPERTS], after[EXPERTS])
    assert "customdata" in found
    assert not {"x", "y", "hovertext", "text"} & set(found), "places and texts do not depend on the count"
    assert "size" not in found["marker"]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_refusal_stays_until_something_changes(panel: ExpertPanel, meanwhile: bool) -> None:
    panel.pick(f"0-{panel.profile.n_experts - 1}")
    if meanwhile:
        assert panel.settle()
    panel.keep_button.click()
    assert panel.settle()
    refusal = panel.status.text
    assert len(panel.table.frame) == panel.profile.n_experts, "the selection was drawn"
    assert panel.keep_always == {}
    assert panel.status.is_error
    assert panel.status.text == refusal
    assert "are to be kept" in refusal
    panel.layer.value = panel.profile.moe_layers[-1]
    assert panel.settle()
    assert (panel.status.text, panel.status.is_error) == ("Ready.", False)


def test_a_refused_text_is_forgotten_once_corrected(panel: ExpertPanel) -> None:
    panel.pick("1")
    panel.pick("1, 999")
    assert panel.settle()
    assert "'999' names no expert" in panel.status.text
    panel.pick("1")
    assert panel.settle()
    assert not panel.status.is_error


def test_a_profile_of_another_checkpoint_is_refused(made: Made) -> None:
    other = dataclasses.replace(made[1], checkpoint_fingerprint="0" * 64)
    with pytest.raises(ProfileError, match=r"another checkpoint.*000000000000"):
        ExpertPanel(made[0], other)
    with pytest.raises(ProfileError, match="another checkpoint"):
        ExpertPanel(made[0].path, other)


def test_a_count_that_is_no_number_is_refused(made: Made) -> None:
    largest = moeproxy.allowed_counts(made[1])[-1]
    with pytest.raises(ProxyError, match=rf"no whole number\. Expected: one of .*{largest}\. What to do"):
        ExpertPanel(*made, n_keep=True)  # what is no int at all: test_counts.py, as annotations are checked in tests


def test_half_are_kept_unless_told(made: Made) -> None:
    half = made[1].n_experts // 2
    expected = min(moeproxy.allowed_counts(made[1]), key=lambda count: (abs(count - half), count))
    assert ExpertPanel(*made).plan.n_keep == expected
