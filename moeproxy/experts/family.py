"""Family: the form of a row of the family table. The rows are in `family_rows/`, the table in `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Renormalised = Literal["always", "norm_topk_prob", "never", "unknown"]
Watch = Literal["pairs", "zero_experts", "skip", "gated_input", "sorted"]

COUNTS = ("num_experts", "num_local_experts")
LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers", "layers_block_type")
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")

# How checkpoints name multi-token-prediction layers that do not just follow the decoder's by number.
_MTP_LAYERS = (
    "mtp.layers.{layer}",
    "model.mtp.layers.{layer}",
    "model.mtp_layers.{layer}",
    "mtp_layers.{layer}",
    "mtp.{layer}",
    "model.mtp.{layer}",
    "model.mtp_block.{layer}",
)


@dataclass(frozen=True)
class Sliced:
    """A tensor with an expert axis: `n_experts * r + tail` rows, of which the kept experts' rows survive.

    Args:
        name: tensor name relative to the MoE block (absolute if it contains `{layer}`).
        axis: the expert axis.
        tail: rows after the experts' that always stay: a number, or the (dotted) config key that holds it.
        optional: some MoE layers of a model have it, others have not.
    """

    name: str
    axis: int = 0
    tail: int | str = 0
    optional: bool = False


STACKED = (Sliced("experts.gate_up_proj"), Sliced("experts.down_proj"))


@dataclass(frozen=True)
class Family:
    """One row of the table: how a model type lays out its MoE layers on disk and in memory.

    Config keys are dotted paths from the top of config.json (`text_config.num_experts`). A checkpoint may use the
    names on disk or those in memory (transformers writes the latter with `save_original_format=False`); both are read.

    Args:
        model_type: the `model_type` of the config.
        block: prefix of a MoE block's tensors on disk.
        also_blocks: other prefixes that checkpoints of this type use.
        router: tensors with one row an expert that choose experts (weights, biases, buffers), on disk.
        each: prefix of one expert's own tensors on disk; whatever follows (weight, scale) belongs to it.
        each_tail: experts after the routed ones that always stay: a number or the config key that holds it.
        stacked: expert tensors when all experts of a layer share one tensor on disk; their quantised parts
            (`_blocks`, `_scales`, `_scale_inv`) are meant too.
        id_tables: tensors whose *values* are expert ids (routing by token id); values are renumbered.
        count_keys: config keys that hold the number of experts; the first one present is read, all are kept
            equal.
        write_keys: count keys a proxy's config must have, since some reader looks only there.
        top_k_key: config key of the experts per token.
        layer_keys: config keys of the number of decoder layers (of a list: its length); the first present is read.
        group_keys: config keys (number of groups, groups chosen), or None without group-limited routing.
        min_group: smallest group the router can score (2 where a group's score is the sum of its best two).
        shared: names that have no expert axis and stay as they are: relative to the block, or absolute with `{layer}`.
        dense_keys: config keys that say which layers have no experts (for messages; weights decide).
        mtp_keys: config keys of the number of multi-token-prediction layers.
        router_kind: how the router turns logits into weights, in words.
        renormalised: whether the chosen weights do not depend on the experts that were not chosen
            ("norm_topk_prob": if the config says so). Where they do, pruning raises every remaining gate weight
            (softmax over fewer experts).
        norm_key: the config key that says so.
        memory_block: module path of the block in transformers, if it differs from `block`.
        memory_router: router tensors in memory, if they differ from `router`.
        memory_stacked: expert tensors in memory.
        memory_id_tables: id tables in memory, if they differ from `id_tables`.
        experts_module: path of the experts module within the block in memory; its forward takes
            (hidden_states, top_k_index, top_k_weights), unless `observer` says otherwise. Empty: the block itself.
        observer: how the calibration pass watches the experts (`adapters.OBSERVERS`): "pairs" for a module called as
            above, "zero_experts" where some experts return their input, "skip" where the router may skip the experts,
            "gated_input" where the gate multiplies the input, "sorted" where the router sorts the tokens by expert.
        grouped_mm: transformers can run the experts with grouped matrix multiplication.
    """

    model_type: str
    block: str = "model.layers.{layer}.mlp"
    also_blocks: tuple[str, ...] = ()
    router: tuple[Sliced, ...] = (Sliced("gate.weight"),)
    each: str = "experts.{expert}."
    each_tail: int | str = 0
    stacked: tuple[Sliced, ...] = STACKED
    id_tables: tuple[str, ...] = ()
    count_keys: tuple[str, ...] = COUNTS
    write_keys: tuple[str, ...] = ()
    top_k_key: str = "num_experts_per_tok"
    layer_keys: tuple[str, ...] = LAYER_KEYS
    group_keys: tuple[str, str] | None = None
    min_group: int = 1
    shared: tuple[str, ...] = ()
    dense_keys: tuple[str, ...] = ()
    mtp_keys: tuple[str, ...] = MTP_KEYS
    router_kind: str = "softmax, top-k"
    renormalised: Renormalised = "norm_topk_prob"
    norm_key: str = "norm_topk_prob"
    memory_block: str = ""
    memory_router: tuple[Sliced, ...] = ()
    memory_stacked: tuple[Sliced, ...] = STACKED
    memory_id_tables: tuple[str, ...] = ()
    experts_module: str = "experts"
    observer: Watch = "pairs"
    grouped_mm: bool = True

    @property
    def in_memory(self) -> tuple[Sliced, ...]:
        """Every tensor with an expert axis in a loaded model, relative to the block."""
        return (self.memory_router or self.router) + self.memory_stacked

    @property
    def id_tables_in_memory(self) -> tuple[str, ...]:
        """Every table of expert ids in a loaded model, relative to the block."""
        return self.memory_id_tables or self.id_tables

    @property
    def blocks(self) -> tuple[str, ...]:
        """Every prefix that a decoder layer's MoE block may have on disk."""
        return tuple(dict.fromkeys((self.block, *self.also_blocks, self.memory_block or self.block)))

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        """Every prefix that the MoE block of a multi-token-prediction layer may have on disk."""
        ends = dict.fromkeys(block.partition("{layer}")[2] for block in self.blocks)
        return tuple(start + end for start in _MTP_LAYERS for end in ends)

    def block_in_memory(self, layer: int) -> str:
        """Module path of layer `layer`'s MoE block in a loaded model."""
        return (self.memory_block or self.block).format(layer=layer)

    def keeps_surviving_tokens(self, config: Mapping[str, Any]) -> bool:
        """Whether a token all of whose chosen experts survive keeps its gate weights (False if not known)."""
        if self.renormalised == "norm_topk_prob":
            return bool(lookup(config, self.norm_key))
        return self.renormalised == "always"


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value under a dotted key of a parsed config, None if it is not there."""
    part: Any = config
    for name in key.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def tail_of(tail: int | str, config: Mapping[str, Any]) -> int:
    """Number of rows (or experts) after the routed ones that always stay."""
    return tail if isinstance(tail, int) else int(lookup(config, tail) or 0)
