"""The proxy panel: controls to plan, figure, sentence and a proxy on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeproxy
from moeproxy.view.apps.proxy_figure import PanelState, _ranges, describe, proxy_figure, values
from moeproxy.view.apps.proxy_panel import ProxyPanel
from tests import tiny

Made = tuple[moeproxy.Checkpoint, moeproxy.ExpertProfile]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tiny.write(tmp_path_factory.mktemp("model") / "tiny", request.param)
    return moeproxy.Checkpoint.open(path), moeproxy.profile(path, tiny.TEXTS)


@pytest.fixture
def panel(made: Made, tmp_path: Path) -> ProxyPanel:
    second_lowest = moeproxy.allowed_counts(made[1])[1]
    return ProxyPanel(*made, out=tmp_path / "proxies", n_keep=second_lowest)


def _kept_in_figure(panel: ProxyPanel) -> list[tuple[int, ...]]:
    kept_LE = np.isfinite(np.asarray(panel.figure.widget.data[0].z, dtype=float))
    return [tuple(np.flatnonzero(row).tolist()) for row in kept_LE]


def test_figure_shows_the_plan_at_first(panel: ProxyPanel) -> None:
    assert _kept_in_figure(panel) == list(panel.plan.keep.values())
    assert f"{panel.plan.n_keep} of {panel.profile.n_experts} experts" in panel.figure.widget.layout.title.text


def test_moving_the_slider_changes_plan_figure_and_sentence(panel: ProxyPanel) -> None:
    before = panel.summary.text
    panel.choose(panel.counts[0])
    assert panel.settle()
    assert panel.plan == moeproxy.select(panel.profile, panel.counts[0])
    assert _kept_in_figure(panel) == list(panel.plan.keep.values())
    assert panel.box.value == panel.counts[0]
    assert panel.summary.text not in ("", before)
    sizes = list(panel.figure.widget.data[4].x)
    assert sizes[1] == pytest.approx(moeproxy.cost(panel.checkpoint, panel.counts[0]).nbytes / 1e6)


def test_a_burst_of_moves_is_drawn_once(panel: ProxyPanel) -> None:
    for count in panel.counts * 3:
        panel.choose(count)
    assert panel.settle()
    assert panel._redraw.runs == 1
    assert panel.plan.n_keep == panel.counts[-1]


def test_a_typed_count_that_is_impossible_becomes_the_nearest(panel: ProxyPanel) -> None:
    gaps = [b for a, b in zip(panel.counts, panel.counts[1:], strict=False) if b - a > 1]
    if not gaps:
        pytest.skip("every count is possible without groups")
    panel.box.value = gaps[0] - 1
    assert panel.settle()
    assert panel.plan.n_keep in panel.counts
    assert "cannot be kept" in panel.status.text
    assert panel.slider.value == panel.box.value == panel.plan.n_keep


def test_method_and_layer_are_chosen(panel: ProxyPanel) -> None:
    panel.choose(panel.counts[0])
    panel.method.value = "first"
    panel.layer.value = panel.profile.moe_layers[-1]
    assert panel.settle()
    assert panel.plan.method == "first"
    assert f"Layer {panel.profile.moe_layers[-1]} keeps" in panel.summary.text
    assert f"Layer {panel.profile.moe_layers[-1]}" in panel.figure.widget.layout.annotations[1].text


def test_only_the_profile_is_read_while_sliding(panel: ProxyPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a slider move must not load the model")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    panel.choose(panel.counts[0])
    assert panel.settle()
    assert not panel.status.is_error
    assert panel.plan.n_keep == panel.counts[0]


def test_an_error_while_drawing_is_shown(panel: ProxyPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise moeproxy.MoeproxyError("no room", remedy="make some")

    monkeypatch.setattr("moeproxy.view.apps.proxy_panel.select", fail)
    panel.choose(panel.counts[0])
    assert panel.settle()
    assert panel.status.text == "MoeproxyError: no room. What to do: make some."


def test_builds_what_is_shown_and_never_overwrites(panel: ProxyPanel) -> None:
    panel.choose(panel.counts[0])
    panel.job.start_button.click()
    assert panel.job.join(120) == "done", panel.status.text
    assert panel.proxy is not None
    assert panel.proxy.plan.n_keep == panel.counts[0]
    assert panel.proxy.check
    assert panel.proxy.check.passed
    assert panel.proxy.path.parent == panel.out
    panel.job.start_button.click()
    assert panel.job.join(120) == "failed"
    assert "exists already" in panel.status.text
    panel.choose(panel.counts[1])
    assert panel.settle()
    assert not panel.status.is_error, "the error was about the proxy shown before"


def test_figure_and_values_agree(made: Made) -> None:
    checkpoint, profile = made
    plan = moeproxy.select(profile, moeproxy.allowed_counts(profile)[0], method="frequency")
    costs = moeproxy.cost(checkpoint), moeproxy.cost(checkpoint, plan.n_keep)
    state = PanelState(profile, plan, profile.moe_layers[0], *costs)
    for trace, new in zip(proxy_figure(state).data, values(state), strict=True):
        for name, value in new.items():
            np.testing.assert_array_equal(np.asarray(trace[name]), np.asarray(value))
    shown_XLE = np.array([values(state)[trace]["z"] for trace in (0, 1)], dtype=float)
    np.testing.assert_allclose(np.nansum(shown_XLE, axis=(0, 2)), 100.0)
    assert "most used expert dropped" in describe(state)


def test_keeping_all_drops_nothing(made: Made) -> None:
    checkpoint, profile = made
    plan = moeproxy.select(profile, profile.n_experts)
    state = PanelState(profile, plan, profile.moe_layers[0], moeproxy.cost(checkpoint), moeproxy.cost(checkpoint))
    assert "dropped" not in describe(state)
    assert "keeps all experts; they received 100 % of its tokens" in describe(state)


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9")]
)
def test_runs_of_experts_are_written_short(ids: list[int], text: str) -> None:
    assert _ranges(ids) == text
