"""Families and tensors the table does not know are refused with what was seen, never guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import CheckpointError, ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build
from tests import tiny
from tests.families.saved import write
from tests.proxy.made_up import plan_for


def retyped(path: Path, model_type: str, **tensors: torch.Tensor) -> Path:
    """A tiny Qwen3-MoE checkpoint that says it is of another type, with more tensors."""
    tiny.write(path)
    config = json.loads((path / "config.json").read_text()) | {"model_type": model_type}
    (path / "config.json").write_text(json.dumps(config))
    add(path, tensors)
    return path


def add(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def test_an_unknown_family_names_its_experts_and_the_missing_row(tmp_path: Path) -> None:
    text = refused(retyped(tmp_path / "m", "brand_new_moe"))
    assert "'brand_new_moe' has no row in the family table" in text
    assert "num_local_experts = 8" in text
    assert "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight [24, 12]" in text
    assert "model.layers.{layer}.mlp.gate.weight [8, 24]" in text
    assert "Family('brand_new_moe'" in text
    assert "input_layernorm" not in text


def test_an_unknown_family_with_broken_weights_is_still_an_unknown_family(tmp_path: Path) -> None:
    path = retyped(tmp_path / "m", "brand_new_moe")
    (path / "model.safetensors").write_bytes(b"x")
    assert "'brand_new_moe' has no row" in refused(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.gate.new_bias", (8,)),
        ("model.layers.1.mlp.new_scale", (1, 8)),
        ("model.layers.1.mlp.gate_bank", (5, 8, 3)),
        ("model.layers.1.other.experts.bank", (3,)),
    ],
)
def test_a_tensor_that_may_count_experts_and_is_not_listed_is_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "m")
    add(path, {name: torch.zeros(shape)})
    text = refused(path)
    assert f"'{name}' {list(shape)} may have an expert axis" in text
    assert "family_rows" in text


def test_other_tensors_of_a_block_may_be_there(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    add(path, {"model.layers.1.mlp.temperature": torch.zeros(1)})
    assert Checkpoint.open(path).n_experts == 8


def test_experts_per_token_may_be_listed_for_every_layer_if_alike(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": [2, 2, 2]'))
    assert Checkpoint.open(path).top_k == 2
    (path / "config.json").write_text(text.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": [2, 2, 3]'))
    assert "num_experts_per_tok is [2, 2, 3]" in refused(path)


@pytest.mark.parametrize("ids", [torch.full((96, 2), 12), torch.full((96, 2), -1), torch.zeros(96, 2)])
def test_a_table_of_something_else_than_expert_ids_is_refused(ids: torch.Tensor, tmp_path: Path) -> None:
    source = write(tmp_path / "m", "deepseek_v4")
    name = "model.layers.1.ffn.gate.tid2eid"
    file = source.path / source.tensors[name].file
    save_file(load_file(file) | {name: ids}, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(source.path)
    with pytest.raises(ProxyError, match=r"tid2eid' \[96, 2\] is no table of expert ids"):
        build(checkpoint, plan_for(checkpoint, 6), tmp_path / "p")
    assert not (tmp_path / "p").exists()
