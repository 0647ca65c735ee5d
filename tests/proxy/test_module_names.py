"""Quantisation configs that name single experts follow the experts that stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build
from tests import tiny
from tests.proxy.made_up import plan_for


def with_quantisation(path: Path, section: dict[str, Any]) -> Checkpoint:
    """A tiny checkpoint whose config has a quantisation section."""
    tiny.write(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}, indent=2) + "\n")
    return Checkpoint.open(path)


def expert(layer: int, number: int, rest: str = ".up_proj") -> str:
    return f"model.layers.{layer}.mlp.experts.{number}{rest}"


def test_names_in_lists_are_renumbered_and_dropped_experts_go(tmp_path: Path) -> None:
    checkpoint = with_quantisation(tmp_path / "a", {"ignore": []})
    plan = plan_for(checkpoint, 3)
    gone = next(e for e in range(8) if e not in plan.keep[1])
    names = [expert(1, e) for e in (*plan.keep[1], gone)] + [expert(2, plan.keep[2][1], "")]
    others = ["lm_head", "model.layers.1.mlp.shared_experts.0", "model.layers.1.mlp.gate", "re:.*experts.*down_proj"]
    section = {"ignore": [*others, *names], "groups": {"one": {"targets": [expert(1, gone)], "bits": 4}}}
    checkpoint = with_quantisation(tmp_path / "b", section)
    proxy = build(checkpoint, plan_for(checkpoint, 3), tmp_path / "p")
    written = json.loads((proxy.path / "config.json").read_text())
    found = written.pop("quantization_config")
    assert found["ignore"] == [*others, *(expert(1, i) for i in range(3)), expert(2, 1, "")]
    assert found["groups"] == {"one": {"targets": [], "bits": 4}}
    original = json.loads((checkpoint.path / "config.json").read_text())
    del original["quantization_config"]
    assert written == original | {"num_local_experts": 3, "num_experts": 3}


def test_a_config_without_such_names_keeps_its_bytes(tmp_path: Path) -> None:
    checkpoint = with_quantisation(tmp_path / "m", {"ignore": ["lm_head", "re:.*gate$"], "quant_method": "x"})
    proxy = build(checkpoint, plan_for(checkpoint, 3), tmp_path / "p")
    old, new = ((p / "config.json").read_text().splitlines() for p in (checkpoint.path, proxy.path))
    assert [line for line in new if line not in old] == [
        line for line in new if "num_" in line and 'experts": 3' in line
    ]


@pytest.mark.parametrize(
    "section",
    [{"dynamic": {r"-:model\.layers\.1\.mlp\.experts\.3\..*": {}}}, {"ignore": ["re:.*mlp.experts.3.*"]}],
)
def test_numbers_in_patterns_are_refused(section: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = with_quantisation(tmp_path / "m", section)
    with pytest.raises(
        ProxyError, match=r"config\.json: the quantisation config names an expert by its number.*list of"
    ):
        build(checkpoint, plan_for(checkpoint, 3), tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("mtp", ["drop", "prune"])
def test_names_in_prediction_layers_follow_their_layer(mtp: Any, tmp_path: Path) -> None:
    path = tiny.save(tiny.deepseek_v3(num_nextn_predict_layers=1), tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.ones(24, 48)}, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"ignore": [expert(3, e) for e in range(16)]}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(path)
    proxy = build(checkpoint, plan_for(checkpoint, 8), tmp_path / "p", mtp=mtp)
    found = json.loads((proxy.path / "config.json").read_text())["quantization_config"]["ignore"]
    assert found == ([] if mtp == "drop" else [expert(3, e) for e in range(8)])


def test_records_of_the_originals_training_stay_behind(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m")
    for name in ("recipe.json", "trainer_state.json", "chat_template.jinja", "LICENSE"):
        (path / name).write_text("{}")
    checkpoint = Checkpoint.open(path)
    proxy = build(checkpoint, plan_for(checkpoint, 3), tmp_path / "p")
    assert not {"recipe.json", "trainer_state.json"} & {item.name for item in proxy.path.iterdir()}
    assert {"chat_template.jinja", "LICENSE", "keep_map.json"} <= {item.name for item in proxy.path.iterdir()}
