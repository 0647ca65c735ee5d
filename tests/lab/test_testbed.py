"""Testbed models: the recipe, what is shipped, and that the testbed tells methods apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from moeproxy.errors import LabError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.lab import testbed, tool_testbed
from moeproxy.lab.calculator import SKILL
from moeproxy.lab.pruning_study import METHODS, study
from moeproxy.lab.scoring import accuracy
from moeproxy.lab.tasks import RL_SKILLS
from moeproxy.lab.testbed import RECIPES, build_testbed
from moeproxy.lab.tokens import vocabulary_size
from moeproxy.lab.tool_testbed import build_tool_testbed


def test_shipped_model_reaches_its_stated_accuracy(shipped: Path) -> None:
    stated = json.loads((shipped / "recipe.json").read_text())["measured"]
    score = accuracy(load_model(Checkpoint.open(shipped)).eval(), RL_SKILLS, n=280, split="test")
    assert score.mean == pytest.approx(stated["accuracy_rl"], abs=0.01)
    assert score.chance == pytest.approx(stated["chance_rl"], abs=1e-4)


def test_shipped_model_is_small(shipped: Path) -> None:
    assert sum(file.stat().st_size for file in shipped.iterdir()) < 10e6


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_builds_a_checkpoint(name: str, tmp_path: Path) -> None:
    small = replace(RECIPES[name], dense_steps=2, moe_steps=2, batch=8, hidden=32, experts=8, expert_width=8)
    path = build_testbed(name, tmp_path, recipe=small)
    assert Checkpoint.open(path).n_experts == 8
    with pytest.raises(LabError, match="exists already"):
        build_testbed(name, tmp_path, recipe=small)


@pytest.mark.parametrize("name", tool_testbed.RECIPES)
def test_the_tool_recipe_builds_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped_models: Path
) -> None:
    monkeypatch.setattr(tool_testbed, "measure", lambda model: {})  # minutes of sampling; not what is tested here
    monkeypatch.setattr(tool_testbed, "tool_accuracy", lambda model: {"right": 0.5})
    small, lines = replace(tool_testbed.RECIPES[name], steps=2, batch=8), list[str]()
    path = build_tool_testbed(name, shipped_models, tmp_path, recipe=small, report=lines.append)
    notes = json.loads((path / "recipe.json").read_text())
    assert notes["recipe"]["steps"] == 2
    assert notes["measured"] == {f"{SKILL}_right": 0.5}
    assert AutoConfig.from_pretrained(path).vocab_size == vocabulary_size(tools=True)
    shipped, made = (load_file(folder / "model.safetensors") for folder in (shipped_models / name, path))
    assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in shipped.items()}
    with pytest.raises(LabError, match="exists already"):
        build_tool_testbed(name, shipped_models, tmp_path, recipe=small, report=lines.append)


def test_unknown_name_and_layout(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="qwen3-moe-tiny"):
        build_testbed("typo", tmp_path)
    with pytest.raises(LabError, match="dense-tools"):
        build_tool_testbed("typo", tmp_path, tmp_path, report=print)
    with pytest.raises(LabError, match="deepseek_v3"):
        testbed._sparse_model(replace(RECIPES["qwen3-moe-tiny"], layout="typo"))


def test_upcycling_whole_blocks_without_noise_keeps_the_function() -> None:
    recipe = replace(
        RECIPES["qwen3-moe-tiny"], hidden=32, experts=4, dense_width=16, expert_width=16, upcycle_noise=0.0
    )
    torch.manual_seed(0)
    dense, sparse = testbed._dense_model(recipe), testbed._sparse_model(recipe)
    testbed.upcycle(dense.state_dict(), sparse, recipe, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 40, (2, 9))
    with torch.no_grad():
        assert torch.allclose(dense(ids).logits, sparse(ids).logits, atol=1e-4)


def test_the_testbed_tells_methods_apart(qwen3: Path) -> None:
    wanted = [v for v in METHODS if v.name in ("random", "first", "frequency", "gate")]
    table = study(qwen3, wanted, counts=(8,), draws=5, split="test").groupby("variant")["kept"].mean()
    assert table["random"] <= 0.5
    assert table["first"] <= 0.5
    assert max(table["frequency"], table["gate"]) >= 2 / 3
