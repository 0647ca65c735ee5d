"""Multi-token-prediction layers: dropped or pruned alike as the user says, never left at full width."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import Mtp, build, check
from tests import tiny
from tests.families import configs
from tests.families.saved import write
from tests.proxy.made_up import plan_for

N_KEEP = 8

# Where the heads of a 3-layer DeepSeek-V3 may lie: a copy of layer 2 under another name.
NAMES: dict[str, Callable[[str], str]] = {
    "by number": lambda name: name.replace("model.layers.2.", "model.layers.3."),
    "own prefix": lambda name: name.replace("model.layers.2.", "mtp.layers.0."),
    "own prefix inside": lambda name: name.replace("model.layers.2.", "model.mtp.layers.0."),
}


@pytest.fixture(params=NAMES)
def headed(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A DeepSeek-V3 with one multi-token-prediction layer, and a tensor of it that belongs to no block."""
    path = tiny.write(tmp_path / "m", "deepseek_v3")
    file, rename = path / "model.safetensors", NAMES[request.param]
    tensors = load_file(file)
    extra = {rename(name): tensor.clone() for name, tensor in tensors.items() if "model.layers.2." in name}
    extra[rename("model.layers.2.eh_proj.weight")] = torch.ones(24, 48)
    save_file(tensors | extra, file, metadata={"format": "pt"})
    text = (path / "config.json").read_text()
    assert '"num_nextn_predict_layers": 0' in text
    (path / "config.json").write_text(text.replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1'))
    return Checkpoint.open(path)


def test_they_are_seen_and_a_choice_is_asked_for(headed: Checkpoint, tmp_path: Path) -> None:
    assert (headed.moe_layers, headed.extra_layers) == ((1, 2), (3,))
    with pytest.raises(ProxyError, match=r"multi-token-prediction layers.*mtp='drop'.*mtp='prune'"):
        build(headed, plan_for(headed, N_KEEP), tmp_path / "p")
    with pytest.raises(ProxyError, match="mtp_from is layer 0, which has no experts"):
        build(headed, plan_for(headed, N_KEEP), tmp_path / "p", mtp="prune", mtp_from=0)
    assert not (tmp_path / "p").exists()


def test_dropped_heads_leave_nothing_behind(headed: Checkpoint, tmp_path: Path) -> None:
    proxy = build(headed, plan_for(headed, N_KEEP), tmp_path / "p", mtp="drop")
    written = Checkpoint.open(proxy.path)
    assert written.extra_layers == ()
    assert not [name for name in written.tensors if "mtp" in name or "layers.3." in name]
    old, new = ((path / "config.json").read_text() for path in (headed.path, proxy.path))
    wanted = old.replace('"n_routed_experts": 16', f'"n_routed_experts": {N_KEEP}')
    assert new == wanted.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    assert json.loads((proxy.path / "keep_map.json").read_text())["provenance"]["mtp"] == "drop"


@pytest.mark.parametrize("layer", [None, 1])
def test_pruned_heads_keep_the_experts_of_the_chosen_layer(
    headed: Checkpoint, tmp_path: Path, layer: int | None
) -> None:
    plan = plan_for(headed, N_KEEP)
    assert plan.keep[1] != plan.keep[2]
    proxy = build(headed, plan, tmp_path / "p", mtp="prune", mtp_from=layer)
    written = Checkpoint.open(proxy.path)
    assert written.extra_layers == (3,)
    old, new = (load_file(c.path / "model.safetensors") for c in (headed, written))
    head = next(name for name in new if "eh_proj" in name).removesuffix("eh_proj.weight")
    kept = list(plan.keep[layer or 2])
    assert torch.equal(new[f"{head}mlp.gate.weight"], old["model.layers.2.mlp.gate.weight"][kept])
    for i, expert in enumerate(kept):
        name = "mlp.experts.{}.up_proj.weight"
        assert torch.equal(new[head + name.format(i)], old[f"model.layers.2.{name.format(expert)}"])
    assert f"{head}mlp.experts.{N_KEEP}.up_proj.weight" not in new
    assert json.loads((proxy.path / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_proxy_with_dropped_heads_reloads_equal(headed: Checkpoint, tmp_path: Path) -> None:
    proxy = check(build(headed, plan_for(headed, N_KEEP), tmp_path / "p", mtp="drop"))
    assert proxy.check is not None
    assert proxy.check.passed


def test_heads_without_experts_need_no_choice(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    file = path / "model.safetensors"
    dense = {"mtp.layers.0.mlp.up_proj.weight": torch.ones(32, 24)}
    save_file(load_file(file) | dense, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(path)
    proxy = build(checkpoint, plan_for(checkpoint, 4), tmp_path / "p")
    assert torch.equal(
        load_file(proxy.path / "model.safetensors")["mtp.layers.0.mlp.up_proj.weight"], torch.ones(32, 24)
    )


@pytest.mark.parametrize("mtp", ["drop", "prune"])
def test_heads_of_a_wrapped_text_model_with_fused_experts(mtp: Mtp, tmp_path: Path) -> None:
    source = write(tmp_path / "m", "qwen3_5_moe", save_original_format=False)
    prefix = "model.language_model.layers.3."
    names = [name for name in source.tensors if name.startswith(prefix)]
    old = {name: tensor for shard in source.shards for name, tensor in load_file(shard.path).items()}
    heads = {name.replace(prefix, "mtp.layers.0."): old[name].clone() for name in names}
    path = tmp_path / "headed"
    path.mkdir()
    save_file(old | heads, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source.path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(path)
    assert checkpoint.extra_layers == (4,)
    plan = plan_for(checkpoint, configs.KEEP)
    proxy = check(build(checkpoint, plan, tmp_path / "p", mtp=mtp, mtp_from=2))
    new = load_file(proxy.path / "model.safetensors")
    stated = json.loads((proxy.path / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"]
    if mtp == "drop":
        assert (stated, [name for name in new if name.startswith("mtp.")]) == (0, [])
    else:
        wide = old[f"{prefix}mlp.experts.down_proj"]
        assert stated == 1
        assert torch.equal(new["mtp.layers.0.mlp.experts.down_proj"], wide[list(plan.keep[2])])
