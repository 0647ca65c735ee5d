"""Write a testbed model as a checkpoint that transformers 4 and 5 both read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moeproxy.errors import LabError

RECIPE_FILE = "recipe.json"

R = TypeVar("R")


def chosen_recipe(name: str, recipes: Mapping[str, R], recipe: R | None, out: Path) -> tuple[R, Path]:
    """Return the recipe to follow, the given one or the one of that name, and the directory of the new model.

    Raises:
        LabError: the name is unknown, or the directory exists.
    """
    found = recipe or recipes.get(name)
    if found is None:
        raise LabError(f"unknown testbed model {name!r}", expected=f"one of {', '.join(recipes)}")
    target = Path(out) / name
    if target.exists():
        raise LabError("exists already", where=target, remedy="remove it or choose another --out")
    return found, target


def write_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path, notes: Mapping[str, object]
) -> None:
    """Write weights, config, tokenizer and `recipe.json` into the existing directory `out`."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _add_old_spellings(out / "config.json")
    (out / RECIPE_FILE).write_text(json.dumps(notes, indent=2, sort_keys=True) + "\n")


def _add_old_spellings(path: Path) -> None:
    """Add the keys that transformers 4 and verl read and transformers 5.24 no longer writes."""
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
