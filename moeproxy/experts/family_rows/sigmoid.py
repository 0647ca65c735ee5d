"""Families whose router scores each expert on its own (sigmoid), mostly with a correction bias for the choice.

Layouts were read off checkpoints written by transformers 5.24.
"""

from __future__ import annotations

from moeproxy.experts.family import COUNTS, Family, Sliced

_ROUTED = ("n_routed_experts", "num_local_experts", "num_experts")
_BIAS = Sliced("gate.e_score_correction_bias")
_GATE_AND_BIAS = (Sliced("gate.weight"), _BIAS)
_GROUPS = ("n_group", "topk_group")
_FIRST = ("first_k_dense_replace",)
_TYPES = ("mlp_layer_types",)
_GROUPED = "sigmoid, choice by score + bias within the best groups, renormalised, scaled"
_UNGROUPED = "sigmoid, choice by score + bias, renormalised"


def _like_deepseek_v3(
    model_type: str,
    *,
    count_keys: tuple[str, ...] = _ROUTED,
    dense_keys: tuple[str, ...] = _TYPES,
    shared: tuple[str, ...] = ("shared_experts",),
    bias_on_disk: Sliced = _BIAS,
    group_keys: tuple[str, str] = _GROUPS,
    top_k_key: str = "num_experts_per_tok",
) -> Family:
    """A row with DeepSeek-V3's router: gate weight and bias, groups scored by the sum of their best two."""
    return Family(
        model_type,
        router=(Sliced("gate.weight"), bias_on_disk),
        count_keys=count_keys,
        top_k_key=top_k_key,
        group_keys=group_keys,
        min_group=2,
        shared=shared,
        dense_keys=dense_keys,
        router_kind=_GROUPED,
        renormalised="always",
        memory_router=_GATE_AND_BIAS,
    )


_GROUP_LIMITED = (
    _like_deepseek_v3("deepseek_v3", dense_keys=_FIRST),
    _like_deepseek_v3("deepseek_v32", dense_keys=_FIRST + _TYPES),
    _like_deepseek_v3("axk1"),
    _like_deepseek_v3("axk2"),
    _like_deepseek_v3("dots1", dense_keys=_FIRST),
    _like_deepseek_v3("dots3_note_text"),
    _like_deepseek_v3("glm4_moe", dense_keys=_FIRST),
    _like_deepseek_v3("glm4_moe_lite"),
    _like_deepseek_v3("glm_moe_dsa", dense_keys=_FIRST + _TYPES),
    _like_deepseek_v3("solar_open", dense_keys=()),
    _like_deepseek_v3("hy_v4"),
    _like_deepseek_v3("mimo_v2_flash", shared=()),
    _like_deepseek_v3("beam", count_keys=COUNTS, shared=()),
    _like_deepseek_v3(
        "exaone_moe",
        count_keys=COUNTS,
        dense_keys=_FIRST + _TYPES,
        bias_on_disk=Sliced("e_score_correction_bias"),
    ),
    _like_deepseek_v3(
        "bailing_hybrid",
        count_keys=COUNTS,
        dense_keys=_FIRST + _TYPES,
        bias_on_disk=Sliced("gate.expert_bias"),
        group_keys=("num_expert_group", "topk_group"),
        top_k_key="num_experts_per_token",
    ),
    Family(
        "kimi_linear",
        block="model.layers.{layer}.block_sparse_moe",
        router=_GATE_AND_BIAS,
        top_k_key="num_experts_per_token",
        group_keys=("num_expert_group", "topk_group"),
        min_group=2,
        shared=("shared_experts",),
        dense_keys=_FIRST + _TYPES,
        router_kind=_GROUPED,
        renormalised="always",
        memory_block="model.layers.{layer}.mlp",
    ),
    Family(
        "nemotron_h",
        block="backbone.layers.{layer}.mixer",
        router=_GATE_AND_BIAS,
        count_keys=_ROUTED,
        group_keys=_GROUPS,
        min_group=2,
        shared=("shared_experts",),
        dense_keys=("layers_block_type", "hybrid_override_pattern"),
        router_kind=_GROUPED,
        renormalised="always",
        memory_block="model.layers.{layer}.mixer",
        memory_stacked=(Sliced("experts.up_proj"), Sliced("experts.down_proj")),
        stacked=(Sliced("experts.up_proj"), Sliced("experts.down_proj")),
    ),
)

_NO_GROUPS = (
    Family(
        "afmoe",
        router=(Sliced("router.gate.weight"), Sliced("expert_bias")),
        shared=("shared_experts",),
        dense_keys=("num_dense_layers",),
        router_kind=_UNGROUPED,
        renormalised="always",
    ),
    Family(
        "hy_v3",
        router=(Sliced("router.gate.weight"), Sliced("expert_bias")),
        shared=("shared_mlp", "shared_experts"),
        dense_keys=_TYPES,
        router_kind=_UNGROUPED,
        renormalised="always",
        memory_router=(Sliced("gate.weight"), Sliced("e_score_correction_bias")),
    ),
    Family(
        "laguna",
        router=(Sliced("gate.weight"), Sliced("experts.e_score_correction_bias")),
        shared=("shared_expert", "shared_experts"),
        dense_keys=_TYPES,
        router_kind=_UNGROUPED,
        renormalised="always",
        memory_router=_GATE_AND_BIAS,
    ),
    Family(
        "kolibri1",
        router=(Sliced("gate.weight"), Sliced("model.layers.{layer}.moe.router.expert_bias")),
        shared=("shared_experts",),
        router_kind="choice by logit + bias, sigmoid of the chosen, renormalised if norm_topk_prob",
        renormalised="always",
        memory_router=_GATE_AND_BIAS,
    ),
    Family(
        "lfm2_moe",
        block="model.layers.{layer}.feed_forward",
        router=(Sliced("gate.weight"), Sliced("expert_bias", optional=True)),
        dense_keys=("num_dense_layers",),
        router_kind=_UNGROUPED,
        renormalised="always",
    ),
    Family(
        "minimax_m2",
        block="model.layers.{layer}.block_sparse_moe",
        router=(Sliced("gate.weight"), Sliced("e_score_correction_bias")),
        router_kind=_UNGROUPED,
        renormalised="always",
        memory_block="model.layers.{layer}.mlp",
    ),
    Family(
        "minimax_m3_vl_text",
        router=_GATE_AND_BIAS,
        shared=("shared_experts",),
        dense_keys=_TYPES,
        router_kind=_UNGROUPED,
        renormalised="always",
    ),
    Family(
        "flint",
        shared=("shared_expert",),
        dense_keys=("mlp_only_layers", "decoder_sparse_step"),
        router_kind="sigmoid, top-k",
        renormalised="always",
    ),
)

ROWS = (*_GROUP_LIMITED, *_NO_GROUPS)
