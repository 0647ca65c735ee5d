"""The proxy panel: controls to plan, figure, sentence and a proxy on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeproxy
import moeproxy.view.apps.proxy as proxy_module
from moeproxy.errors import ProfileError, ProxyError
from moeproxy.proxy.damage import damage
from moeproxy.view.apps.proxy import ProxyPanel
from moeproxy.view.apps.proxy_figure import PanelState, describe, proxy_figure, values
from moeproxy.view.apps.selection import runs
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
    assert panel.count.box.value == panel.counts[0]
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
    panel.count.box.value = gaps[0] - 1
    assert panel.settle()
    assert panel.plan.n_keep in panel.counts
    assert "cannot be kept" in panel.status.text
    assert panel.count.value == panel.count.box.value == panel.plan.n_keep


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

    monkeypatch.setattr("moeproxy.view.apps.proxy.select", fail)
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


def test_sizes_stand_in_a_table_too(panel: ProxyPanel) -> None:
    panel.choose(panel.counts[0])
    assert panel.settle()
    frame = panel.size_table.frame
    assert frame["experts per layer"].tolist() == [panel.profile.n_experts, panel.counts[0]]
    assert frame["parameters"][1] == f"{moeproxy.cost(panel.checkpoint, panel.counts[0]).params:,}"
    assert frame["80 GiB devices for training"].tolist() == [1, 1]
    assert len(panel.damage_table.frame) == len(panel.profile.moe_layers)
    assert "<caption" in panel.size_table.widget.value


def test_damage_is_drawn_as_predicted(panel: ProxyPanel) -> None:
    panel.choose(panel.counts[0])
    assert panel.settle()
    expected = damage(panel.profile, panel.plan)
    lost, whole = panel.figure.widget.data[5:7]
    np.testing.assert_allclose(np.asarray(lost.y), 100 * expected.gate_lost_L)
    np.testing.assert_allclose(np.asarray(whole.y), 100 * expected.tokens_whole_L)


def test_a_built_proxy_is_held_against_its_original(made: Made, tmp_path: Path) -> None:
    n_keep = moeproxy.allowed_counts(made[1])[0]
    panel = ProxyPanel(*made, out=tmp_path, n_keep=n_keep, texts=tiny.TEXTS, score=lambda model: 0.5)
    panel.job.start_button.click()
    assert panel.job.join(120) == "done", panel.status.text
    assert panel.fidelity is not None
    assert panel.fidelity.n_keep == n_keep
    assert panel.fidelity_table.frame["measure"].tolist()[-1] == "task score"
    assert panel.fidelity_table.frame["proxy"].tolist()[-1] == "0.5"
    assert "reloads equal" in panel.status.text


@pytest.mark.parametrize("step", ["build", "check", "fidelity"])
def test_a_cancelled_build_leaves_nothing(
    step: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = ProxyPanel(*made, out=tmp_path / "proxies", texts=tiny.TEXTS)
    real = getattr(proxy_module, step)

    def cancelled_meanwhile(*arguments: Any, **options: Any) -> Any:
        panel.job.cancel()
        return real(*arguments, **options)

    monkeypatch.setattr(proxy_module, step, cancelled_meanwhile)
    panel.job.start()
    assert panel.job.join(120) == "cancelled", panel.status.text
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not (tmp_path / "proxies").exists() or not list((tmp_path / "proxies").iterdir())
    monkeypatch.undo()
    panel.job.start()
    assert panel.job.join(120) == "done", "a cancelled build is in nobody's way"


def test_stability_is_shown_for_what_the_controls_say(panel: ProxyPanel) -> None:
    panel.choose(panel.counts[0])
    panel.stability_job.start()
    assert panel.stability_job.join(120) == "done", panel.status.text
    assert panel.stability is not None
    assert panel.stability.n_keep == panel.counts[0]
    assert panel.stability_table.frame["layer"].tolist() == list(panel.profile.moe_layers)
    panel.method.value = "reap"
    panel.stability_job.start()
    assert panel.stability_job.join(120) == "failed"
    assert "reap" in panel.status.text


def test_wishes_are_part_of_the_plan(made: Made, tmp_path: Path) -> None:
    layer = made[1].moe_layers[0]
    wishes = {"keep_always": {layer: (1,)}, "drop_always": {layer: (0,)}, "weights": (1, 1, 1, 1)}
    panel = ProxyPanel(*made, out=tmp_path, **wishes)
    assert 1 in panel.plan.keep[layer]
    assert 0 not in panel.plan.keep[layer]
    assert panel.plan == moeproxy.select(panel.profile, panel.plan.n_keep, **wishes)


def test_figure_and_values_agree(made: Made) -> None:
    checkpoint, profile = made
    plan = moeproxy.select(profile, moeproxy.allowed_counts(profile)[0], method="frequency")
    costs = moeproxy.cost(checkpoint), moeproxy.cost(checkpoint, plan.n_keep)
    state = PanelState(profile, plan, profile.moe_layers[0], *costs, damage(profile, plan))
    for trace, new in zip(proxy_figure(state).data, values(state), strict=True):
        for name, value in new.items():
            np.testing.assert_array_equal(np.asarray(trace[name]), np.asarray(value))
    shown_XLE = np.array([values(state)[trace]["z"] for trace in (0, 1)], dtype=float)
    np.testing.assert_allclose(np.nansum(shown_XLE, axis=(0, 2)), 100.0)
    assert "most used expert dropped" in describe(state)


def test_keeping_all_drops_nothing(made: Made) -> None:
    checkpoint, profile = made
    plan = moeproxy.select(profile, profile.n_experts)
    whole = moeproxy.cost(checkpoint)
    state = PanelState(profile, plan, profile.moe_layers[0], whole, whole, damage(profile, plan))
    assert "dropped" not in describe(state)
    assert "keeps all experts; they received 100 % of its tokens" in describe(state)


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9")]
)
def test_runs_of_experts_are_written_short(ids: list[int], text: str) -> None:
    assert runs(ids) == text


@pytest.mark.parametrize("step", ["check", "fidelity", "score"])
@pytest.mark.parametrize("folder_existed", [False, True])
def test_a_failed_job_removes_what_it_wrote(
    step: str, folder_existed: bool, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "new" / "proxies", []

    def fail(*_: object, **__: object) -> float:
        written.extend(out.rglob("*.safetensors"))
        raise RuntimeError("out of memory")

    if folder_existed:
        (out / "other").mkdir(parents=True)
    panel = ProxyPanel(*made, out=out, texts=tiny.TEXTS, score=fail if step == "score" else None)
    if step != "score":
        monkeypatch.setattr(proxy_module, step, fail)
    panel.job.start()
    assert panel.job.join(120) == "failed"
    assert panel.status.text == "RuntimeError: out of memory"
    assert written, "the failure came after the proxy was written"
    assert list(tmp_path.rglob("*")) == ([out.parent, out, out / "other"] if folder_existed else [])
    monkeypatch.undo()
    panel.score = None
    panel.job.start()
    assert panel.job.join(120) == "done", panel.status.text


def test_a_failed_job_leaves_an_older_proxy(panel: ProxyPanel) -> None:
    target = panel.out / f"{panel.checkpoint.path.name}-{panel.plan.method}-{panel.plan.n_keep}"
    target.mkdir(parents=True)
    (target / "mine").touch()
    panel.job.start()
    assert panel.job.join(120) == "failed"
    assert "exists already" in panel.status.text
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_a_profile_of_another_checkpoint_is_refused(made: Made, tmp_path: Path) -> None:
    other = dataclasses.replace(made[1], checkpoint_fingerprint="0" * 64)
    with pytest.raises(ProfileError, match=r"another checkpoint.*000000000000"):
        ProxyPanel(made[0], other, out=tmp_path)


def test_unknown_methods_and_counts_are_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ProxyError, match=r"'zzz' is unknown\. Expected: one of cluster, .*reap\. What to do"):
        ProxyPanel(*made, out=tmp_path, method="zzz")
    with pytest.raises(ProxyError, match=rf"no whole number\. Expected: one of .*{made[1].n_experts}\. What to do"):
        ProxyPanel(*made, out=tmp_path, n_keep=True)
