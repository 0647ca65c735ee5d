"""Quantised experts on disk are cut with their scales, byte for byte; and tables of expert ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build
from moeproxy.proxy.plan import allowed_counts, check_count
from moeproxy.proxy.remap import remap_ids
from tests import tiny
from tests.families.saved import write
from tests.proxy.made_up import made_up, plan_for


def test_fp8_scales_are_renumbered_with_their_weights(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(2, 1, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(path)
    plan = plan_for(checkpoint, 4)
    new = load_file(build(checkpoint, plan, tmp_path / "p").path / "model.safetensors")
    for i, expert in enumerate(plan.keep[1]):
        for rest in ("up_proj.weight", "up_proj.weight_scale_inv"):
            old_name, new_name = (f"model.layers.1.mlp.experts.{e}.{rest}" for e in (expert, i))
            assert torch.equal(new[new_name].view(torch.uint8), tensors[old_name].view(torch.uint8))
    assert sum("weight_scale_inv" in name for name in new) == 3 * 4 * 3


def test_mxfp4_blocks_and_scales_are_sliced_alike(tmp_path: Path) -> None:
    source = write(tmp_path / "float", "gpt_oss")
    tensors = {name: tensor for shard in source.shards for name, tensor in load_file(shard.path).items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, generator = tensors.pop(name).shape[2], torch.Generator().manual_seed(4)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (12, rows, 1, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(0, 256, (12, rows, 1), generator=generator, dtype=torch.uint8)
    path = tmp_path / "m"
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((source.path / "config.json").read_text())
    checkpoint = Checkpoint.open(path)
    plan = plan_for(checkpoint, 5)
    new = load_file(build(checkpoint, plan, tmp_path / "p").path / "model.safetensors")
    for layer, keep in plan.keep.items():
        for end in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_bias"):
            name = f"model.layers.{layer}.mlp.experts.{end}"
            assert torch.equal(new[name], tensors[name][list(keep)])
    assert json.loads((tmp_path / "p" / "config.json").read_text())["num_local_experts"] == 5


@given(st.integers(0, 1000))
def test_remapped_ids_are_new_ids_and_stay_distinct(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_experts, n_keep, top_k = 10, int(rng.integers(3, 11)), 3
    keep = tuple(sorted(rng.choice(n_experts, n_keep, replace=False).tolist()))
    label_E = rng.integers(-1, n_keep, n_experts)
    ids_VK = np.stack([rng.choice(n_experts, top_k, replace=False) for _ in range(20)]).astype(np.int32)
    new_VK = remap_ids(ids_VK, keep, label_E)
    assert new_VK.dtype == np.int32
    assert new_VK.min() >= 0
    assert new_VK.max() < n_keep
    assert all(len(set(row)) == top_k for row in new_VK.tolist())
    survived = np.isin(ids_VK, keep)
    assert (np.asarray(keep)[new_VK[survived]] == ids_VK[survived]).all()


def test_a_dropped_expert_is_replaced_by_its_representative_if_free() -> None:
    ids_VK = np.array([[0, 1], [1, 2], [1, 3]])
    label_E = np.array([0, 1, 1, 0])
    assert remap_ids(ids_VK, (0, 2), label_E).tolist() == [[0, 1], [0, 1], [1, 0]]


def test_expert_parallel_ranks_must_divide_the_count() -> None:
    profile = made_up(n_experts=12)
    assert allowed_counts(profile) == list(range(2, 13))
    assert allowed_counts(profile, expert_parallel=4) == [4, 8, 12]
    grouped = made_up(n_experts=12, n_group=2)
    assert allowed_counts(grouped) == [4, 6, 8, 10, 12]
    assert allowed_counts(grouped, expert_parallel=4) == [4, 8, 12]
    assert allowed_counts(profile, expert_parallel=5) == [5, 10]
    assert allowed_counts(profile, expert_parallel=13) == []
    for count, ranks, words in ((6, 4, "one of 4, 8, 12"), (6, 13, "no count divides evenly"), (6, 0, "1 or more")):
        with pytest.raises(ProxyError, match=words):
            check_count(profile, count, expert_parallel=ranks)
