"""Opening a checkpoint: facts from metadata, and a clear error for everything that is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import CheckpointError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import FAMILIES, family_of
from moeproxy.experts.places import place_of
from tests import tiny


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def shard_with(path: Path, part: str) -> tuple[Path, str]:
    """The shard that holds the first tensor whose name contains `part`, and that name."""
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in sorted(weight_map) if part in name)
    return path / weight_map[name], name


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_open_reads_the_facts_of_qwen3_moe(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", "qwen3_moe"))
    assert (checkpoint.n_layers, checkpoint.moe_layers) == (3, (0, 1, 2))
    assert (checkpoint.n_experts, checkpoint.top_k, checkpoint.n_group) == (8, 2, None)
    # The output head is tied to the embeddings and not stored.
    assert checkpoint.n_params == sum(p.numel() for p in tiny.qwen3_moe().parameters())
    assert checkpoint.nbytes == 4 * checkpoint.n_params


def test_open_reads_the_facts_of_deepseek_v3(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", "deepseek_v3"))
    assert (checkpoint.n_layers, checkpoint.moe_layers) == (3, (1, 2))
    assert (checkpoint.n_experts, checkpoint.top_k) == (16, 3)
    assert (checkpoint.n_group, checkpoint.topk_group) == (4, 2)
    assert checkpoint.extra_layers == ()


def test_expert_names_may_be_fused_or_in_shards_on_disk(tmp_path: Path) -> None:
    one = Checkpoint.open(tiny.write(tmp_path / "one"))
    many = Checkpoint.open(tiny.write(tmp_path / "many", max_shard_size="20KB"))
    fused = Checkpoint.open(tiny.write(tmp_path / "fused", save_original_format=False))
    assert len(many.shards) > 2
    assert {p.kind for p in one.places.values()} == {"router", "each"}
    assert {p.kind for p in fused.places.values()} == {"router", "stacked"}
    assert one.n_params == many.n_params == fused.n_params
    assert len({one.fingerprint, many.fingerprint, fused.fingerprint}) == 3


def test_fingerprint_does_not_depend_on_where_the_directory_lies(qwen_copy: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(qwen_copy).fingerprint
    moved = qwen_copy.rename(tmp_path / "elsewhere")
    assert Checkpoint.open(moved).fingerprint == first
    edit_config(moved, rms_norm_eps=1e-5)
    assert Checkpoint.open(moved).fingerprint != first


def test_every_row_of_the_table_reads_its_own_names() -> None:
    for family in FAMILIES.values():
        for block in family.blocks:
            router = place_of(f"{block.format(layer=7)}.{family.router[0].name}", family)
            expert = place_of(f"{block.format(layer=7)}.experts.12.down_proj.weight", family)
            assert router is not None
            assert (router.kind, router.layer) == ("router", 7)
            assert expert is not None
            assert (expert.kind, expert.layer, expert.expert) == ("each", 7, 12)
        assert place_of("model.embed_tokens.weight", family) is None


def test_invariance_of_surviving_tokens_follows_the_router() -> None:
    assert FAMILIES["deepseek_v3"].keeps_surviving_tokens({})
    assert FAMILIES["qwen3_moe"].keeps_surviving_tokens({"norm_topk_prob": True})
    assert not FAMILIES["qwen3_moe"].keeps_surviving_tokens({})


def test_repr_is_one_line_and_html_escapes(qwen_copy: Path) -> None:
    checkpoint = Checkpoint.open(qwen_copy.rename(qwen_copy.parent / "<b>x"))
    assert "\n" not in repr(checkpoint)
    assert "8 experts, top-2" in repr(checkpoint)
    assert "<b>x" not in checkpoint._repr_html_()


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert caught.value.remedy, "an error must say what to do"
    return str(caught.value)


def test_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "there is no such directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "a file, no directory" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'}: the directory is no checkpoint" in refused(tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"num_experts": 8}'])
def test_refuses_a_broken_config(qwen_copy: Path, text: str) -> None:
    (qwen_copy / "config.json").write_text(text)
    assert str(qwen_copy / "config.json") in refused(qwen_copy)


def test_refuses_a_dense_model_and_an_unknown_family(qwen_copy: Path) -> None:
    with pytest.raises(CheckpointError, match="'qwen3' is dense"):
        family_of({"model_type": "qwen3"})
    # The weights know better than a config without counts.
    edit_config(qwen_copy, model_type="qwen3", num_local_experts=None, num_experts=None)
    assert "'qwen3' has no row" in refused(qwen_copy)
    with pytest.raises(CheckpointError, match=r"no row .*add a row to a file in moeproxy/experts/family_rows"):
        family_of({"model_type": "new_moe", "text_config": {"n_routed_experts": 64}})


def test_refuses_a_truncated_shard_and_names_it(qwen_copy: Path) -> None:
    shard = sorted(qwen_copy.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100, 8, 3, 0):
        shard.write_bytes(data[:size])
        text = refused(qwen_copy)
        assert f"{shard}: the shard is truncated" in text
    shard.write_bytes(data + b"x")
    assert "longer than its header says" in refused(qwen_copy)
    shard.write_bytes(b"\x10" + b"\0" * 7 + b"not json, sorry." + data[24:])
    assert "no JSON" in refused(qwen_copy)


def test_refuses_missing_weights(qwen_copy: Path) -> None:
    shard = sorted(qwen_copy.glob("*.safetensors"))[0]
    shard.unlink()
    assert shard.name in refused(qwen_copy)
    (qwen_copy / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "the shard index cannot be read" in refused(qwen_copy)
    (qwen_copy / "model.safetensors.index.json").unlink()
    for file in qwen_copy.glob("*.safetensors"):
        file.unlink()
    assert "no safetensors weights" in refused(qwen_copy)


def test_refuses_a_count_that_disagrees_with_the_weights(qwen_copy: Path) -> None:
    edit_config(qwen_copy, num_local_experts=6)
    text = refused(qwen_copy)
    assert "the config says 6 experts but" in text
    assert "config.json" in text
    edit_config(qwen_copy, num_local_experts=8, num_experts=6)
    assert "two numbers of experts" in refused(qwen_copy)
    edit_config(qwen_copy, num_local_experts=None, num_experts=None, num_experts_per_tok=2)
    # Without any count the model cannot be told from a dense one by its config, but its type can.
    assert "states no number of experts" in refused(qwen_copy)


@pytest.mark.parametrize("count", [0, -8, "8", 8.5, True])
def test_refuses_counts_that_are_no_counts(qwen_copy: Path, count: Any) -> None:
    edit_config(qwen_copy, num_local_experts=count)
    refused(qwen_copy)


def test_refuses_a_missing_expert_or_router(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    file = path / "model.safetensors"
    rewrite(file, lambda tensors: drop(tensors, "model.layers.1.mlp.experts.3.up_proj.weight"))
    assert "layer 1 has 'up_proj.weight' for 7 experts" in refused(path)
    rewrite(file, lambda tensors: drop(tensors, "model.layers.1.mlp.gate.weight"))
    assert "layer 1 has experts but no router" in refused(path)


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def test_refuses_an_index_of_other_shards(qwen_copy: Path) -> None:
    file, name = shard_with(qwen_copy, "layers.1.mlp.gate.weight")
    rewrite(file, lambda tensors: drop(tensors, name))
    assert f"the index says that '{name}' is in {file.name}" in refused(qwen_copy)


def test_refuses_an_unlisted_tensor_that_may_have_an_expert_axis(qwen_copy: Path) -> None:
    file, _ = shard_with(qwen_copy, "layers.1.mlp.gate.weight")
    rewrite(file, lambda tensors: tensors.update({"model.layers.1.mlp.gate.secret": torch.zeros(8)}))
    assert "'model.layers.1.mlp.gate.secret' [8] may have an expert axis" in refused(qwen_copy)


def test_refuses_a_tensor_in_two_shards(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    (path / "model-copy.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    assert "is also in" in refused(path)


def test_routing_that_no_router_can_do_is_refused(tmp_path: Path) -> None:
    edit_config(tiny.write(tmp_path / "q", "qwen3_moe"), num_experts_per_tok=40)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 40 with 8 experts"):
        Checkpoint.open(tmp_path / "q")
    edit_config(tiny.write(tmp_path / "d", "deepseek_v3"), n_group=5)
    with pytest.raises(CheckpointError, match="cannot be divided into 5 groups"):
        Checkpoint.open(tmp_path / "d")
