"""What to tell the owner of a MoE checkpoint whose family has no row: what was seen, and what a row must say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moeproxy.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

_COUNT = re.compile(r"(?:^|_)(?:num|n)_(?:\w+_)?experts$")
_NOT_A_COUNT = re.compile("shared|per_tok|zero")
_PARTS = ("text_config", "ffn_config", "language_config", "llm_config", "thinker_config")
_EXPERTS = re.compile(r"expert|router|(?:^|\.)gate\.|moe")
_SHOWN = 8


def counts_found(config: Mapping[str, Any]) -> dict[str, int]:
    """Dotted config keys that look like a number of routed experts above one, with their values."""
    found = dict(_counts(config, ""))
    for part in _PARTS:
        if isinstance(config.get(part), Mapping):
            found |= _counts(config[part], f"{part}.")
    return found


def _counts(part: Mapping[str, Any], prefix: str) -> dict[str, int]:
    named = {key: value for key, value in part.items() if _COUNT.search(key) and not _NOT_A_COUNT.search(key)}
    return {prefix + k: v for k, v in named.items() if isinstance(v, int) and not isinstance(v, bool) and v > 1}


def expert_like(shapes: Shapes, counts: set[int]) -> dict[str, tuple[int, ...]]:
    """Tensors that look like experts or routers, one name for all layers and experts, with a shape each.

    A tensor counts if its name says so, or if it has an axis as long as the number of experts in a layer whose
    other tensors have such names.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if _EXPERTS.search(name) or (counts & set(shape) and re.search(r"\.\d+\.", name)):
            found.setdefault(_pattern(name), shape)
    return found


def _pattern(name: str) -> str:
    """The name with its layer and expert numbers replaced by placeholders."""
    one = re.sub(r"(experts\.)\d+(?=\.)", r"\1{expert}", name)
    return re.sub(r"\.\d+\.", ".{layer}.", one, count=1)


def unknown_family(config: Mapping[str, Any], shapes: Shapes, known: list[str], where: str) -> CheckpointError:
    """The error for a MoE model type without a row; it names what was seen and guesses nothing."""
    model_type, counts = config["model_type"], counts_found(config)
    seen = expert_like(shapes, set(counts.values()))
    shown = "; ".join(f"{name} {list(shape)}" for name, shape in list(seen.items())[:_SHOWN])
    more = f"; and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
    tensors = f"; tensors that look like routers or experts: {shown}{more}" if seen else ""
    stated = "; expert counts in the config: " + ", ".join(f"{k} = {v}" for k, v in counts.items()) if counts else ""
    return CheckpointError(
        f"MoE model type '{model_type}' has no row in the family table{stated}{tensors}",
        expected=f"one of {', '.join(known)}",
        remedy="add a row to a file in moeproxy/experts/family_rows, that is "
        f"Family('{model_type}', block=..., router=..., each= or stacked=..., count_keys=..., top_k_key=...), "
        "with a tiny config in "
        "tests/families/configs.py, and run tests/families: it passes once every tensor with an expert axis is named",
        where=where,
    )
