"""Every family of the table: the proxy written on disk equals the model pruned in memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from moeproxy.experts.batches import router_rows, zeros
from moeproxy.experts.belongs import router_rows_on_disk
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import FAMILIES
from moeproxy.experts.load import load_model
from moeproxy.experts.observe import NO_EXPERT, LayerTotals
from moeproxy.experts.profile import run
from moeproxy.experts.stream import run_streamed
from moeproxy.experts.stream_weights import StreamedModel
from moeproxy.proxy.build import build, prune_in_memory
from tests.families import configs
from tests.families.saved import logits, write
from tests.proxy.made_up import plan_for

TOLERANCE = 1e-5
STREAMED = 1e-6
FUSED = {"save_original_format": False}


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint of a family in several shards, and its model."""

    checkpoint: Checkpoint
    model: Any


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each family in turn; tests must not change its model or directory."""
    checkpoint = write(tmp_path_factory.mktemp(request.param) / "original", request.param)
    return Case(checkpoint, load_model(checkpoint))


def test_proxy_on_disk_equals_model_pruned_in_memory(case: Case, tmp_path: Path) -> None:
    original, model_type = case.checkpoint, case.checkpoint.family.model_type
    fused = write(tmp_path / "fused", model_type, **FUSED)
    assert len(original.shards) > 3
    plan = plan_for(original, configs.KEEP)
    assert len(set(plan.keep.values())) == len(plan.keep) > 1, "every layer must keep other experts"
    expected = logits(prune_in_memory(case.model, plan, original.family))
    # The test has the power to see a wrong choice (Inkling's experts add little to its hidden states).
    assert (expected - logits(case.model)).abs().max() > (1e-3 if model_type == "inkling_text" else 1e-2)
    for checkpoint in (original, fused):
        proxy = build(checkpoint, plan_for(checkpoint, configs.KEEP), tmp_path / f"{checkpoint.path.name}-proxy")
        found = logits(load_model(Checkpoint.open(proxy.path)))
        assert (found - expected).abs().max() <= TOLERANCE


TEXTS = [[3, 14, 15, 9, 26, 5], [35, 8, 9], [7, 9, 3, 23, 8]]


def passed(model: Any, checkpoint: Checkpoint, streamed: StreamedModel | None = None) -> dict[int, LayerTotals]:
    """What a calibration pass over TEXTS adds up, ordinary or streamed."""
    totals = {layer: zeros(model, checkpoint, True, 3) for layer in checkpoint.moe_layers}
    if streamed is None:
        run(model, checkpoint, totals, TEXTS, batch_size=2)
    else:
        run_streamed(streamed, totals, TEXTS, 2)
    return totals


def joined(value: Any) -> torch.Tensor:
    """A field of the totals as one tensor."""
    return torch.cat(value) if isinstance(value, list) else torch.as_tensor(value)


def test_experts_are_observed_with_the_routing_of_the_model(case: Case) -> None:
    checkpoint = case.checkpoint
    for sums in passed(case.model, checkpoint).values():
        none = int((torch.cat(sums.choices) == NO_EXPERT).sum())
        assert none == 0 or checkpoint.family.observer in ("zero_experts", "skip")
        assert int(sums.load_E.sum()) == 14 * checkpoint.top_k - none > 0
        assert bool(sums.saliency_E.isfinite().all())


def test_a_streamed_pass_sees_the_same(case: Case) -> None:
    assert_streamed_is_the_same(case.model, case.checkpoint)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "inkling_text", "minimax_m2", "qwen3_5_moe"])
def test_a_streamed_pass_reads_the_names_in_memory_too(model_type: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "fused", model_type, **FUSED)
    assert_streamed_is_the_same(load_model(checkpoint), checkpoint)


def assert_streamed_is_the_same(model: Any, checkpoint: Checkpoint) -> None:
    """A streamed pass adds up what the ordinary one does, within STREAMED of the largest value."""
    # Loaded weights lie in mapped files at odd addresses, where other kernels run; at even ones the two are comparable.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    ordinary = passed(model, checkpoint)
    with StreamedModel.open(checkpoint) as streamed:
        found = passed(streamed.model, checkpoint, streamed)
    for layer, sums in ordinary.items():
        assert torch.equal(streamed.routers[layer], router_rows(model, checkpoint, layer))
        assert int(sums.load_E.sum()) > 0
        for item in fields(LayerTotals):
            one, other = (joined(getattr(totals[layer], item.name)) for totals in (ordinary, found))
            assert one.shape == other.shape
            scale = one.double().abs().max() if one.numel() else 0
            assert (one.double() - other.double()).abs().max() <= STREAMED * scale, item.name


@pytest.mark.parametrize("model_type", ["deepseek_v4", "gpt_oss", "hy_v3", "kimi_linear", "lara_mini", "minimax"])
def test_streamed_weights_are_those_that_transformers_loads(model_type: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m", model_type)
    whole = load_model(checkpoint, dtype="bfloat16")
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    seen = set()
    with StreamedModel.open(checkpoint, dtype="bfloat16") as streamed:
        outside = {id(module) for module in streamed.outside_modules()}
        for layer in streamed.layers:
            with streamed.loaded(layer):
                loaded = outside | {id(module) for module in layer.modules()}
                for name, value in [*streamed.model.named_parameters(), *streamed.model.named_buffers()]:
                    if id(streamed.model.get_submodule(name.rpartition(".")[0])) in loaded:
                        assert value.dtype == expected[name].dtype, name
                        assert torch.equal(value, expected[name]), name
                        seen.add(name)
    assert set(expected) - seen == {"lm_head.weight"}


def test_routers_on_disk_are_those_that_a_profile_holds(case: Case) -> None:
    found = dict(router_rows_on_disk(case.checkpoint))
    assert tuple(sorted(found)) == case.checkpoint.moe_layers
    for layer, rows_ED in found.items():
        assert torch.equal(torch.from_numpy(rows_ED), router_rows(case.model, case.checkpoint, layer))


def test_the_table_has_the_families_that_people_prune() -> None:
    named = """afmoe dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo gemma4_text
        glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe jamba kimi_linear
        lfm2_moe llama4_text longcat_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe
        qwen3_5_moe_text qwen3_moe qwen3_next"""
    assert not set(named.split()) - FAMILIES.keys()
    assert len(FAMILIES) >= 40


# Tensors that are easy to forget: (family, name on disk, axis, rows after the experts').
FORGOTTEN = [
    ("exaone_moe", "model.layers.1.mlp.e_score_correction_bias", 0, 0),
    ("laguna", "model.layers.1.mlp.experts.e_score_correction_bias", 0, 0),
    ("bailing_hybrid", "model.layers.1.mlp.gate.expert_bias", 0, 0),
    ("kolibri1", "model.layers.1.moe.router.expert_bias", 0, 0),
    ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias", 1, 0),
    ("longcat_flash", "model.layers.1.mlp.router.classifier.weight", 0, 3),
    ("inkling_text", "model.layers.1.mlp.gate.weight", 0, 1),
    ("zaya", "model.layers.1.mlp.gate.balancing_biases", 0, 1),
    ("gemma4_text", "model.layers.1.router.per_expert_scale", 0, 0),
    ("jetmoe", "model.layers.1.self_attention.experts.router.layer.weight", 0, 0),
]


@pytest.mark.parametrize(("model_type", "name", "axis", "tail"), FORGOTTEN, ids=[case[0] for case in FORGOTTEN])
def test_easily_forgotten_tensors_follow_the_experts(
    model_type: str, name: str, axis: int, tail: int, tmp_path: Path
) -> None:
    source = write(tmp_path / "m", model_type)
    plan = plan_for(source, configs.KEEP)
    written = Checkpoint.open(build(source, plan, tmp_path / "p").path)
    old, new = stored(source, name), stored(written, name)
    rows = [*plan.keep[1], *range(configs.EXPERTS, configs.EXPERTS + tail)]
    assert torch.equal(new, old.index_select(axis, torch.tensor(rows)))
    assert len(set(old.flatten().tolist())) > configs.KEEP, "equal rows would prove nothing"


def stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor of a checkpoint."""
    from safetensors import safe_open

    with safe_open(checkpoint.path / checkpoint.tensors[name].file, framework="pt") as stream:
        return stream.get_tensor(name)


def test_flat_experts_are_cut_in_blocks_of_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "m", "dbrx")
    plan = plan_for(source, configs.KEEP)
    written = Checkpoint.open(build(source, plan, tmp_path / "p").path)
    name = "transformer.blocks.1.ffn.experts.mlp.v1"
    blocks = stored(source, name).view(configs.EXPERTS, 20, configs.WIDTH)
    assert torch.equal(stored(written, name), blocks[list(plan.keep[1])].reshape(-1, configs.WIDTH))


def test_experts_after_the_routed_ones_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "m", "longcat_flash")
    written = Checkpoint.open(build(source, plan_for(source, configs.KEEP), tmp_path / "p").path)
    old, new = (f"model.layers.1.mlp.experts.{count + 2}.up_proj.weight" for count in (configs.EXPERTS, configs.KEEP))
    assert torch.equal(stored(written, new), stored(source, old))


@pytest.mark.parametrize("model_type", ["dbrx", "qwen3_5_moe"])
def test_nested_counts_are_edited_in_place(model_type: str, tmp_path: Path) -> None:
    source = write(tmp_path / "m", model_type)
    proxy = build(source, plan_for(source, configs.KEEP), tmp_path / "p")
    old, new = ((path / "config.json").read_text() for path in (source.path, proxy.path))
    key = source.family.count_keys[0].rpartition(".")[2]
    assert new == old.replace(f'"{key}": {configs.EXPERTS}', f'"{key}": {configs.KEEP}')
