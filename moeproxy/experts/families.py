"""Where each MoE family keeps its router, experts, biases and counts: rows of data, not classes.

To add a family, add a row to `FAMILIES`. Names are relative to the MoE block unless they contain `{layer}`.
Layouts were read off checkpoints written by transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeproxy.errors import CheckpointError

Renormalised = Literal["always", "norm_topk_prob", "never"]


@dataclass(frozen=True)
class Sliced:
    """A tensor with an expert axis: `n_experts * r + tail` rows, of which the kept experts' rows survive.

    Args:
        name: tensor name relative to the MoE block (absolute if it contains `{layer}`).
        axis: the expert axis.
        tail: rows after the experts' that always stay: a number, or the config key that holds it.
    """

    name: str
    axis: int = 0
    tail: int | str = 0


_GATE = (Sliced("gate.weight"),)
_GATE_AND_BIAS = (Sliced("gate.weight"), Sliced("gate.e_score_correction_bias"))
_STACKED = (Sliced("experts.gate_up_proj"), Sliced("experts.down_proj"))


@dataclass(frozen=True)
class Family:
    """One row of the table: how a model type lays out its MoE layers on disk and in memory.

    Args:
        model_type: the `model_type` of the config that holds the counts.
        block: prefix of a MoE block's tensors on disk.
        router: tensors with one row an expert that choose experts (weights, biases, buffers), on disk.
        each: prefix of one expert's own tensors on disk; whatever follows (weight, scale) belongs to it.
        stacked: expert tensors when all experts of a layer share one tensor on disk.
        count_keys: config keys that hold the number of experts; the first one present is read, all are kept
            equal.
        write_keys: count keys a proxy's config must have, since some reader looks only there.
        top_k_key: config key of the experts per token.
        group_keys: config keys (number of groups, groups chosen), or None without group-limited routing.
        min_group: smallest group the router can score (2 where a group's score is the sum of its best two).
        shared: names under the block that have no expert axis and stay as they are.
        dense_keys: config keys that say which layers have no experts (for messages; weights decide).
        router_kind: how the router turns logits into weights, in words.
        renormalised: whether the chosen weights are rescaled to a fixed sum ("norm_topk_prob": if the config
            says so). Where they are not, pruning raises every remaining gate weight (softmax over fewer
            experts).
        config_path: key of the nested config with the counts; empty for the top level.
        memory_block: module path of the block in transformers, if it differs from `block`.
        memory_router: router tensors in memory, if they differ from `router`.
        memory_stacked: expert tensors in memory.
        experts_module: path of the experts module within the block in memory; its forward takes
            (hidden_states, top_k_index, top_k_weights).
    """

    model_type: str
    block: str = "model.layers.{layer}.mlp"
    router: tuple[Sliced, ...] = _GATE
    each: str = "experts.{expert}."
    stacked: tuple[Sliced, ...] = _STACKED
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    write_keys: tuple[str, ...] = ()
    top_k_key: str = "num_experts_per_tok"
    group_keys: tuple[str, str] | None = None
    min_group: int = 1
    shared: tuple[str, ...] = ()
    dense_keys: tuple[str, ...] = ()
    router_kind: str = "softmax, top-k"
    renormalised: Renormalised = "norm_topk_prob"
    config_path: str = ""
    memory_block: str = ""
    memory_router: tuple[Sliced, ...] = ()
    memory_stacked: tuple[Sliced, ...] = _STACKED
    experts_module: str = "experts"

    @property
    def in_memory(self) -> tuple[Sliced, ...]:
        """Every tensor with an expert axis in a loaded model, relative to the block."""
        return (self.memory_router or self.router) + self.memory_stacked

    def block_in_memory(self, layer: int) -> str:
        """Module path of layer `layer`'s MoE block in a loaded model."""
        return (self.memory_block or self.block).format(layer=layer)

    def counts_in(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The (possibly nested) part of a config that holds the expert counts."""
        part = config.get(self.config_path, {}) if self.config_path else config
        return part if isinstance(part, Mapping) else {}

    def keeps_surviving_tokens(self, config: Mapping[str, Any]) -> bool:
        """Whether a token all of whose chosen experts survive keeps its gate weights."""
        if self.renormalised == "norm_topk_prob":
            return bool(self.counts_in(config).get("norm_topk_prob", False))
        return self.renormalised == "always"


_ROWS = (
    Family(
        "qwen3_moe",
        write_keys=("num_experts", "num_local_experts"),
        dense_keys=("mlp_only_layers", "decoder_sparse_step"),
        router_kind="softmax, top-k, renormalised if norm_topk_prob",
    ),
    Family(
        "deepseek_v3",
        router=_GATE_AND_BIAS,
        count_keys=("n_routed_experts", "num_local_experts"),
        group_keys=("n_group", "topk_group"),
        min_group=2,
        shared=("shared_experts",),
        dense_keys=("first_k_dense_replace",),
        router_kind="sigmoid, choice by score + bias within the best groups, renormalised, scaled",
        renormalised="always",
    ),
)

FAMILIES: Mapping[str, Family] = {row.model_type: row for row in _ROWS}

_ANY_COUNT_KEY = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class _Nested:
    """A config and the nested configs it may keep its counts in."""

    config: Mapping[str, Any]
    parts: tuple[str, ...] = field(default=("text_config", "ffn_config", "language_config"))

    def has_experts(self) -> bool:
        """Whether any part names an expert count above one."""
        parts = [self.config, *(self.config.get(name) for name in self.parts)]
        counts = [part.get(key) for part in parts if isinstance(part, Mapping) for key in _ANY_COUNT_KEY]
        return any(isinstance(count, int) and count > 1 for count in counts)


def family_of(config: Mapping[str, Any], where: str = "") -> Family:
    """Return the table row for a parsed `config.json`.

    Args:
        config: the parsed config.
        where: the file to name in an error.

    Raises:
        CheckpointError: the config has no model type, is of a dense model, or of a family without a row.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            "the config has no model_type",
            expected="a transformers config.json",
            remedy="point at the directory that save_pretrained or the model hub wrote",
            where=where,
        )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(sorted(FAMILIES))
    if not _Nested(config).has_experts():
        raise CheckpointError(
            f"model type '{model_type}' is dense: it has no experts",
            expected=f"a Mixture-of-Experts model ({known})",
            remedy="choose a Mixture-of-Experts checkpoint; a dense model has nothing to prune",
            where=where,
        )
    raise CheckpointError(
        f"MoE model type '{model_type}' has no row in the family table",
        expected=f"one of {known}",
        remedy="add a row to moeproxy/experts/families.py that names its router, experts and count keys",
        where=where,
    )
