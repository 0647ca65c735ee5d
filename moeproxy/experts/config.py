"""Read a checkpoint's config.json: its bytes, its meaning and the counts it states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import CheckpointError
from moeproxy.experts.family import Family, lookup


@dataclass(frozen=True)
class Counts:
    """The counts a config states."""

    n_layers: int
    n_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None

    @classmethod
    def read(cls, config: Mapping[str, Any], family: Family, where: Path) -> Counts:
        """Read the counts; raises CheckpointError for missing, contradictory or impossible ones."""
        n_experts = _n_experts(config, family, where)
        top_k = _positive(_one(lookup(config, family.top_k_key)), family.top_k_key, where)
        n_layers = _n_layers(config, family, where)
        groups = [lookup(config, key) for key in family.group_keys or ()]
        n_group, topk_group = groups if len(groups) == 2 and None not in groups else (None, None)
        _check_routing(n_experts, top_k, n_group, family, where)
        return cls(n_layers, n_experts, top_k, n_group, topk_group)


def _check_routing(n_experts: int, top_k: Any, n_group: Any, family: Family, where: Path) -> None:
    """Refuse counts that no router can work with: they fail only at the first forward pass otherwise."""
    if isinstance(top_k, int) and top_k > n_experts:
        raise CheckpointError(
            f"{family.top_k_key} is {top_k} with {n_experts} experts",
            where=where,
            expected="at most the number of experts",
            remedy="correct config.json",
        )
    if isinstance(n_group, int) and n_group > 0 and n_experts % n_group:
        raise CheckpointError(
            f"{n_experts} experts cannot be divided into {n_group} groups",
            where=where,
            expected="groups of equal size",
            remedy="correct config.json",
        )


def _one(value: Any) -> Any:
    """The value that a list repeats for every layer; other lists and plain values as they are."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _n_layers(config: Mapping[str, Any], family: Family, where: Path) -> int:
    """Number of decoder layers under the first key that is there; of a list, its length."""
    for key in family.layer_keys:
        if (value := lookup(config, key)) is not None:
            return len(value) if isinstance(value, list) and value else _positive(value, key, where)
    return _positive(None, family.layer_keys[0], where)


def _positive(value: Any, key: str, where: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{key} is {value!r}",
            expected=f"a positive whole number under {key}",
            remedy="restore the config.json that belongs to the weights",
            where=where,
        )
    return value


def read_config(directory: Path) -> bytes:
    """Bytes of a directory's config.json; raises CheckpointError if it is no checkpoint directory."""
    if not directory.is_dir():
        what = "this is a file, no directory" if directory.exists() else "there is no such directory"
        raise CheckpointError(
            what,
            expected="a model directory with config.json and safetensors files",
            remedy="give the path of a directory that save_pretrained wrote",
            where=directory,
        )
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(
            "the directory is no checkpoint: it has no config.json",
            expected="config.json and safetensors files",
            remedy="give the path of a directory that save_pretrained wrote",
            where=directory,
        )
    return file.read_bytes()


def parse_config(raw: bytes, where: Path) -> dict[str, Any]:
    """The config as a dict; raises CheckpointError if it is no JSON object."""
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            f"the config is no JSON ({error})",
            expected="a transformers config.json",
            remedy="download or copy this file again",
            where=where,
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError("the config is no JSON object", remedy="download this file again", where=where)
    return config


def _n_experts(config: Mapping[str, Any], family: Family, where: Path) -> int:
    present = {key: value for key in family.count_keys if (value := lookup(config, key)) is not None}
    if not present:
        raise CheckpointError(
            "the config states no number of experts",
            expected=f"one of {', '.join(family.count_keys)}",
            remedy="restore the config.json that belongs to the weights",
            where=where,
        )
    counts = [_positive(value, key, where) for key, value in present.items()]
    if len(set(counts)) > 1:
        stated = ", ".join(f"{key} {value}" for key, value in present.items())
        raise CheckpointError(
            f"the config states two numbers of experts: {stated}",
            expected="the same number under both keys",
            remedy="set both to the number of rows of the router weight",
            where=where,
        )
    return counts[0]
