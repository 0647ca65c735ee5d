"""Every family of the table: the proxy written on disk equals the model pruned in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import FAMILIES
from moeproxy.experts.load import load_model
from moeproxy.experts.observe import LayerTotals
from moeproxy.experts.profile import profile, run
from moeproxy.proxy.build import build, prune_in_memory
from tests.families import configs
from tests.families.saved import logits, write
from tests.proxy.made_up import plan_for

TOLERANCE = 1e-5
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


def test_experts_are_observed_with_the_routing_of_the_model(case: Case) -> None:
    checkpoint = case.checkpoint
    if not checkpoint.family.experts_module:
        with pytest.raises(ProfileError, match="cannot be observed yet"):
            profile(checkpoint, ["12"])
        return
    texts = [[3, 14, 15, 9, 26, 5], [35, 8, 9]]
    totals = {
        layer: LayerTotals.zeros(checkpoint.n_experts, configs.WIDTH, checkpoint.top_k, False)
        for layer in checkpoint.moe_layers
    }
    run(case.model, checkpoint, totals, texts, batch_size=2)
    for sums in totals.values():
        assert int(sums.load_E.sum()) == 9 * checkpoint.top_k
        assert bool(sums.saliency_E.isfinite().all())


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
