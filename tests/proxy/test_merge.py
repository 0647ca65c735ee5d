"""Merging the experts of a cluster: shares, and the same means on disk, in memory and by brute force."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import adjusted_rand_score

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.proxy import shard_writer
from moeproxy.proxy.build import build, check, prune_in_memory
from moeproxy.proxy.cluster import KeepPlan, allowed_counts, select
from tests import tiny
from tests.families.saved import write
from tests.proxy.made_up import made_up, merging_plan_for, plan_for
from tests.proxy.test_build import STORED

FAMILIES = ["dbrx", "gpt_oss", "granitemoe", "longcat_flash", "mixtral", "nemotron_h", "qwen3_5_moe"]


def tensors_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in checkpoint.shards for name, tensor in load_file(shard.path).items()}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", sorted(tiny.MODELS))
def test_disk_equals_memory_in_every_way_of_storing(kind: str, stored: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", kind, **STORED[stored]))
    plan = merging_plan_for(checkpoint, allowed_counts(checkpoint)[1])
    proxy = check(build(checkpoint, plan, tmp_path / "p"))
    assert proxy.check is not None
    assert proxy.check.max_difference <= 1e-5
    # The same keep map without merging is another model: the check sees the means.
    with pytest.raises(ProxyError, match="DIFFERS"):
        check(dataclasses.replace(proxy, plan=dataclasses.replace(plan, merge_LE=None)))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_with_names_and_forms_of_their_own(model_type: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m", model_type)
    plan = merging_plan_for(checkpoint, allowed_counts(checkpoint)[2])
    proxy = check(build(checkpoint, plan, tmp_path / "p"))
    assert proxy.check is not None
    assert proxy.check.passed
    with pytest.raises(ProxyError, match="DIFFERS"):
        check(dataclasses.replace(proxy, plan=dataclasses.replace(plan, merge_LE=None)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_equals_the_mean_by_hand_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = stored_in(tiny.write(tmp_path / "m", max_shard_size="20KB"), dtype)
    plan = merging_plan_for(checkpoint, 3)
    old, new = tensors_of(checkpoint), tensors_of(Checkpoint.open(build(checkpoint, plan, tmp_path / "p").path))
    assert plan.merge_LE is not None
    for row, layer in enumerate(checkpoint.moe_layers):
        for rest in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{rest}.weight"
            for slot in range(3):
                members = np.flatnonzero(plan.label_LE[row] == slot)
                mean = sum(plan.merge_LE[row, e] * old[name.format(e)].double() for e in members)
                found = new[name.format(slot)]
                assert found.dtype == dtype
                # One rounding to the stored dtype, and that of a float32 sum.
                step = torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps * (dtype != torch.float64)
                assert ((found.double() - mean).abs() <= 1.01 * step * mean.abs() + 1e-7).all()
        router = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(new[router], old[router][list(plan.keep[layer])]), "router rows are the representatives'"
    check(build(checkpoint, plan, tmp_path / "q"))


def stored_in(path: Path, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint with all weights in another dtype."""
    for file in path.glob("*.safetensors"):
        save_file({n: t.to(dtype) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return Checkpoint.open(path)


def test_the_size_of_the_pieces_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = stored_in(tiny.write(tmp_path / "m", save_original_format=False), torch.bfloat16)
    plan = merging_plan_for(checkpoint, 3)
    whole = build(checkpoint, plan, tmp_path / "p").path / "model.safetensors"
    monkeypatch.setattr(shard_writer, "_CHUNK", 56)
    pieces = build(checkpoint, plan, tmp_path / "q").path / "model.safetensors"
    assert whole.read_bytes() == pieces.read_bytes()


def test_equal_experts_merge_to_themselves_and_keeping_all_is_the_identity(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    whole = build(checkpoint, merging_plan_for(checkpoint, 8), tmp_path / "p")
    one, other = tensors_of(checkpoint), tensors_of(Checkpoint.open(whole.path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_pruning_in_memory_merges_and_leaves_the_model_alone(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    model, plan = load_model(checkpoint), merging_plan_for(checkpoint, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruned = prune_in_memory(model, plan, checkpoint.family)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    old, new = (m.model.layers[1].mlp.experts.down_proj for m in (model, pruned))
    assert plan.merge_LE is not None
    for slot in range(3):
        members = np.flatnonzero(plan.label_LE[1] == slot).tolist()
        mean = sum(float(plan.merge_LE[1, e]) * old[e] for e in members)
        torch.testing.assert_close(new[slot], mean)


def test_nan_in_a_member_of_another_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", max_shard_size="20KB")
    plan = merging_plan_for(Checkpoint.open(path), 3)
    dropped = next(e for e in range(8) if e not in plan.keep[1])
    name = f"model.layers.1.mlp.experts.{dropped}.up_proj.weight"
    file = path / json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(path)
    merging = dataclasses.replace(plan, checkpoint_fingerprint=checkpoint.fingerprint)
    with pytest.raises(ProxyError, match=rf"{file.name}: tensor '{name}' holds NaN"):
        build(checkpoint, merging, tmp_path / "p")
    assert not (tmp_path / "p").exists()
    # Without merging nothing of that expert is read or written.
    build(checkpoint, dataclasses.replace(merging, merge_LE=None), tmp_path / "p")


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float16)}, file, metadata={"format": "pt"})
    several = Checkpoint.open(path)
    with pytest.raises(ProxyError, match=r"several dtypes \(F16, F32\)"):
        build(several, merging_plan_for(several, 3), tmp_path / "p")
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    quantised = Checkpoint.open(path)
    with pytest.raises(ProxyError, match=rf"'{name}' is quantised or of integers \(F8_E4M3\).*method='cluster'"):
        build(quantised, merging_plan_for(quantised, 3), tmp_path / "p")
    build(quantised, plan_for(quantised, 3), tmp_path / "p")


def test_wrong_shares_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    plan = merging_plan_for(checkpoint, 3)
    assert plan.merge_LE is not None
    for wrong in (plan.merge_LE * 2, plan.merge_LE * 0, plan.merge_LE * np.nan):
        with pytest.raises(ProxyError, match="shares of merged experts are wrong"):
            build(checkpoint, dataclasses.replace(plan, merge_LE=wrong), tmp_path / "p")


@pytest.mark.parametrize("n_group", [None, 4])
def test_shares_are_those_of_the_load_within_the_clusters_of_cluster(n_group: int | None) -> None:
    profile = made_up(n_experts=24, n_group=n_group)
    plan, clusters = select(profile, 8, method="merge"), select(profile, 8)
    assert plan.keep == clusters.keep
    assert clusters.merge_LE is None
    assert plan.merge_LE is not None
    for row in range(2):
        assert adjusted_rand_score(plan.label_LE[row], clusters.label_LE[row]) == 1
        for slot in range(8):
            members = np.flatnonzero(plan.label_LE[row] == slot)
            load = profile.load_LE[row, members]
            np.testing.assert_allclose(plan.merge_LE[row, members], load / load.sum())


def test_forced_and_never_used_experts_are_not_mixed_in() -> None:
    profile = made_up(n_experts=24)
    load_LE = profile.load_LE.copy()
    load_LE[0, :12] = 0
    load_LE[1] = 0
    idle = dataclasses.replace(profile, load_LE=load_LE)
    kept, dropped = 20, int(np.argmax(load_LE[0]))
    plan = select(idle, 4, method="merge", keep_always={1: [kept]}, drop_always={1: [dropped]})
    assert plan.merge_LE is not None
    assert plan.merge_LE[0, kept] == 1, "a forced expert stays as it is"
    assert plan.merge_LE[0, dropped] == 0
    assert (plan.merge_LE[0, [e for e in range(12) if e not in plan.keep[1]]] == 0).all()
    for layer in (1, 2):
        for group in plan.members_of(layer) or []:
            assert sum(share for _, share in group) == pytest.approx(1)
    # In a layer that no token reached, every kept expert stays as it is.
    assert (plan.members_of(2) or []) == [[(expert, 1.0)] for expert in plan.keep[2]]


def test_a_merging_plan_survives_saving_and_old_plans_stay_as_they_were(tmp_path: Path) -> None:
    plan = select(made_up(), 4, method="merge")
    loaded = KeepPlan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    np.testing.assert_array_equal(loaded.merge_LE, plan.merge_LE)
    stored: dict[str, Any] = json.loads(plan.to_json())
    assert stored["format"] == 2, "a reader that would not merge must refuse it"
    plain = json.loads(select(made_up(), 4).to_json())
    assert plain["format"] == 1
    assert "merge" not in plain
    for wrong in (stored | {"format": 1}, plain | {"format": 2}):
        (tmp_path / "plan.json").write_text(json.dumps(wrong))
        with pytest.raises(ProxyError, match="cannot be read"):
            KeepPlan.load(tmp_path / "plan.json")
