"""Writing proxies: equal to the model pruned in memory, complete or absent."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.proxy import shard_writer
from moeproxy.proxy.build import KEEP_MAP, Proxy, build, check, prune_in_memory
from moeproxy.proxy.cluster import allowed_counts, select
from moeproxy.proxy.cost import cost, cost_table
from moeproxy.proxy.side_files import edited_config
from tests import tiny
from tests.proxy.conftest import Case
from tests.proxy.made_up import plan_for

STORED = {
    "one file": {},
    "shards": {"max_shard_size": "20KB"},
    "fused": {"save_original_format": False},
    "fused shards": {"save_original_format": False, "max_shard_size": "20KB"},
}


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 22, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", sorted(tiny.MODELS))
def test_disk_equals_memory_in_every_way_of_storing(kind: str, stored: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", kind, **STORED[stored]))
    n_keep = allowed_counts(checkpoint)[1]
    plan = plan_for(checkpoint, n_keep)
    assert len(set(plan.keep.values())) > 1, "the layers must keep different experts"
    proxy = check(build(checkpoint, plan, tmp_path / "p"))
    assert proxy.check is not None
    assert proxy.check.max_difference <= 1e-5
    # The same with transformers alone, against the original: the test has the power to see a difference.
    original, reloaded = load_model(checkpoint), load_model(Checkpoint.open(proxy.path))
    pruned = prune_in_memory(original, plan, checkpoint.family)
    assert (logits(reloaded) - logits(pruned)).abs().max() <= 1e-5
    assert (logits(reloaded) - logits(original)).abs().max() > 1e-2


def test_a_wrong_keep_map_is_seen_by_the_check(case: Case, tmp_path: Path) -> None:
    n_keep = allowed_counts(case.checkpoint)[1]
    proxy = build(case.checkpoint, plan_for(case.checkpoint, n_keep), tmp_path / "p")
    other = dataclasses.replace(proxy, plan=plan_for(case.checkpoint, n_keep, seed=9))
    with pytest.raises(ProxyError, match="DIFFERS"):
        check(other)


def test_keeping_all_experts_is_the_identity(case: Case, tmp_path: Path) -> None:
    proxy = build(case.checkpoint, select(case.profile, case.checkpoint.n_experts), tmp_path / "p")
    written = Checkpoint.open(proxy.path)
    assert torch.equal(logits(load_model(written)), logits(load_model(case.checkpoint)))
    one, other = (load_file(c.path / "model.safetensors") for c in (case.checkpoint, written))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_pruning_in_memory_leaves_the_model_alone_and_gives_an_auxiliary_loss(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    model = load_model(checkpoint)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruned = prune_in_memory(model, plan_for(checkpoint, 4), checkpoint.family)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config.num_experts == 8
    assert (pruned.config.num_experts, pruned.num_experts) == (4, 4)
    ids = torch.randint(3, 22, (2, 9))
    result = pruned(input_ids=ids, labels=ids, output_router_logits=True)
    assert torch.isfinite(result.aux_loss)


def test_the_bias_buffer_follows_the_experts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", "deepseek_v3"))
    plan = plan_for(checkpoint, 8)
    proxy = build(checkpoint, plan, tmp_path / "p")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    old, new = (load_file(path / "model.safetensors")[name] for path in (checkpoint.path, proxy.path))
    assert old.abs().min() > 0
    assert torch.equal(new, old[list(plan.keep[2])])


@pytest.mark.parametrize("kind", sorted(tiny.MODELS))
def test_tokens_whose_experts_survive_keep_their_output(kind: str, tmp_path: Path) -> None:
    """Group-limited routing may choose other groups once experts are gone; then the outputs may differ."""
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", kind))
    plan = plan_for(checkpoint, checkpoint.n_experts * 3 // 4)
    model = load_model(checkpoint)
    pruned = prune_in_memory(model, plan, checkpoint.family)
    hidden_BTD = torch.randn(1, 500, 24, generator=torch.Generator().manual_seed(3))
    old, new = (_block(m, checkpoint.family.block_in_memory(1), hidden_BTD) for m in (model, pruned))
    renumbered = torch.tensor(plan.keep[1])[new[1]]
    survives_T = torch.isin(old[1], torch.tensor(plan.keep[1])).all(dim=1)
    same_T = (old[1].sort(dim=1).values == renumbered.sort(dim=1).values).all(dim=1)
    assert same_T.sum() > 5
    assert (old[0][same_T] - new[0][same_T]).abs().max() < 1e-5
    assert (same_T == survives_T).all() if kind == "qwen3_moe" else (survives_T | ~same_T).all()


def _block(model: Any, path: str, hidden_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (T, D) and choices (T, K) of one MoE block."""
    block = model.get_submodule(path)
    with torch.inference_mode():
        return block(hidden_BTD)[0], block.gate(hidden_BTD[0])[2]


def test_the_original_is_not_touched(case: Case, tmp_path: Path) -> None:
    source = tmp_path / "m"
    shutil.copytree(case.checkpoint.path, source)
    before = {path: path.read_bytes() for path in source.iterdir()}
    build(source, select(case.profile, allowed_counts(case.profile)[0]), tmp_path / "p")
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_config_changes_nothing_but_the_counts(case: Case, tmp_path: Path) -> None:
    n_keep = allowed_counts(case.checkpoint)[1]
    proxy = build(case.checkpoint, plan_for(case.checkpoint, n_keep), tmp_path / "p")
    old = (case.checkpoint.path / "config.json").read_text()
    new = (proxy.path / "config.json").read_text()
    if case.kind == "deepseek_v3":
        assert new == old.replace('"n_routed_experts": 16', f'"n_routed_experts": {n_keep}')
    else:
        counts = f'"num_local_experts": {n_keep}, "num_experts": {n_keep}'
        assert new == old.replace('"num_local_experts": 8', counts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Odd spacing, line ends and key order stay.
        ('{ "num_experts" :8,\r\n\t"x": 8}', '{ "num_experts" :4, "num_local_experts": 4,\r\n\t"x": 8}'),
        ('{"num_local_experts": 8, "num_experts": 8}', '{"num_local_experts": 4, "num_experts": 4}'),
    ],
)
def test_config_edit_keeps_the_bytes(text: str, expected: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    assert edited_config(text, checkpoint, 4) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The same key in another part means something else.
        ('{"num_experts": 8, "vision": {"num_experts": 8}}', {"vision": {"num_experts": 8}}),
        ('{"num_experts": 8, "num_local_experts": null}', {}),
        ('{"num_experts": 80, "num_experts": 8}', {}),
    ],
)
def test_config_edit_is_right_where_text_would_mislead(text: str, expected: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m"))
    counts = {"num_experts": 4, "num_local_experts": 4}
    assert json.loads(edited_config(text, checkpoint, 4)) == counts | expected


def test_side_files_are_copied_and_stale_weights_are_not(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "m")
    (source / "LICENSE").write_text("licence")
    (source / "templates").mkdir()
    (source / "templates" / "chat.jinja").write_text("x")
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", ".cache", KEEP_MAP):
        (source / name).write_text("stale")
    checkpoint = Checkpoint.open(source)
    proxy = build(checkpoint, plan_for(checkpoint, 4), tmp_path / "p")
    assert sorted(path.relative_to(proxy.path).as_posix() for path in proxy.path.rglob("*")) == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        KEEP_MAP,
        "model.safetensors",
        "templates",
        "templates/chat.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (proxy.path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "keep" in json.loads((proxy.path / KEEP_MAP).read_text())


def test_the_index_names_every_tensor_and_the_new_size(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "m", max_shard_size="20KB"))
    proxy = build(checkpoint, plan_for(checkpoint, 3), tmp_path / "p")
    index = json.loads((proxy.path / "model.safetensors.index.json").read_text())
    written = Checkpoint.open(proxy.path)
    assert index["metadata"]["total_size"] == written.nbytes == proxy.nbytes
    assert index["weight_map"] == {name: info.file for name, info in written.tensors.items()}
    assert written.n_params == proxy.n_params


def test_a_proxy_of_a_proxy(case: Case, tmp_path: Path) -> None:
    counts = allowed_counts(case.checkpoint)
    first = build(case.checkpoint, plan_for(case.checkpoint, counts[1]), tmp_path / "p")
    again = Checkpoint.open(first.path)
    second = check(build(again, plan_for(again, counts[0]), tmp_path / "q"))
    assert Checkpoint.open(second.path).n_experts == counts[0]


def test_a_proxy_is_opened_again_with_its_plan(case: Case, tmp_path: Path) -> None:
    plan = select(case.profile, allowed_counts(case.profile)[1])
    built = build(case.checkpoint, plan, tmp_path / "p")
    assert Proxy.open(tmp_path / "p", case.checkpoint.path) == built
    assert "not checked" in repr(built)
    assert "reloads equal" in check(built)._repr_html_()
    with pytest.raises(ProxyError, match=r"keep_map\.json"):
        Proxy.open(case.checkpoint.path, case.checkpoint.path)


def test_progress_counts_bytes_to_the_end(case: Case, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    plan = plan_for(case.checkpoint, allowed_counts(case.checkpoint)[1])
    proxy = build(case.checkpoint, plan, tmp_path / "p", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (proxy.nbytes, proxy.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_small_chunks_write_the_same_bytes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(case.checkpoint, allowed_counts(case.checkpoint)[1])
    whole = build(case.checkpoint, plan, tmp_path / "p")
    monkeypatch.setattr(shard_writer, "_CHUNK", 64)
    pieces = build(case.checkpoint, plan, tmp_path / "q")
    assert (whole.path / "model.safetensors").read_bytes() == (pieces.path / "model.safetensors").read_bytes()


def test_cost_foretells_what_is_written(case: Case, tmp_path: Path) -> None:
    for n_keep in allowed_counts(case.checkpoint):
        proxy = build(case.checkpoint, plan_for(case.checkpoint, n_keep), tmp_path / f"p{n_keep}")
        foretold = cost(case.checkpoint, n_keep)
        assert (foretold.params, foretold.nbytes) == (proxy.n_params, proxy.nbytes)
        assert foretold == cost(Checkpoint.open(proxy.path))


def test_cost_table_has_the_original_first(case: Case) -> None:
    counts = allowed_counts(case.checkpoint)[:2]
    table = cost_table(case.checkpoint, counts)
    assert list(table["n_experts"]) == [case.checkpoint.n_experts, *counts]
    assert table["share"].iloc[0] == 1
    experts = case.checkpoint.top_k * 3 * 12 * 24 * len(case.checkpoint.moe_layers)
    routed = table["params_experts"].iloc[0]
    assert table["params_active"].iloc[0] == table["params"].iloc[0] - routed + experts
    with pytest.raises(ProxyError, match="cannot keep 1 experts"):
        cost(case.checkpoint, 1)
