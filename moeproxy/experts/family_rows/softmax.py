"""Families whose router takes the softmax of the logits, before or after choosing the top k.

Layouts were read off checkpoints written by transformers 5.24.
"""

from __future__ import annotations

from moeproxy.experts.family import Family, Sliced

_SPARSE_KEYS = ("mlp_only_layers", "decoder_sparse_step")
_SHARED_EXPERT = ("shared_expert", "shared_expert_gate")
_IF_CONFIGURED = "softmax, top-k, renormalised if norm_topk_prob"
_ALWAYS = "softmax, top-k, renormalised"
_AFTER = "top-k, softmax over the chosen"
_ROUTER = (Sliced("router.weight"),)

QWEN2_MOE = Family("qwen2_moe", shared=_SHARED_EXPERT, dense_keys=_SPARSE_KEYS, router_kind=_IF_CONFIGURED)
QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", shared=_SHARED_EXPERT, router_kind=_ALWAYS, renormalised="always")
QWEN4_EXP_TEXT = Family("qwen4_exp_text", shared=_SHARED_EXPERT, router_kind=_IF_CONFIGURED)

_QWEN_LIKE = (
    QWEN2_MOE,
    Family(
        "qwen3_moe",
        write_keys=("num_experts", "num_local_experts"),
        dense_keys=_SPARSE_KEYS,
        router_kind=_IF_CONFIGURED,
    ),
    Family("qwen3_next", shared=_SHARED_EXPERT, dense_keys=_SPARSE_KEYS, router_kind=_IF_CONFIGURED),
    QWEN3_5_MOE_TEXT,
    QWEN4_EXP_TEXT,
    Family("olmoe", router_kind=_IF_CONFIGURED),
    Family("flex_olmo", router_kind=_IF_CONFIGURED),
    Family("mellum", dense_keys=("mlp_layer_types",), router_kind=_IF_CONFIGURED),
    Family("lara_mini", shared=("shared_expert",), router_kind=_IF_CONFIGURED),
    Family(
        "cohere2_moe",
        shared=("shared_experts",),
        dense_keys=("mlp_layer_types",),
        router_kind="top-k, softmax or sigmoid of the chosen",
        renormalised="always",
    ),
    Family(
        "hunyuan_v1_moe",
        router=(Sliced("gate.wg.weight"),),
        top_k_key="moe_topk",
        shared=("shared_mlp",),
        router_kind=_ALWAYS,
        renormalised="always",
    ),
)

# The block is block_sparse_moe with w1, w2, w3 on disk and mlp in memory.
_MIXTRAL_LIKE = (
    Family(
        "mixtral",
        block="model.layers.{layer}.block_sparse_moe",
        memory_block="model.layers.{layer}.mlp",
        router_kind=_ALWAYS,
        renormalised="always",
    ),
    Family(
        "minimax",
        block="model.layers.{layer}.block_sparse_moe",
        memory_block="model.layers.{layer}.mlp",
        router_kind=_ALWAYS,
        renormalised="always",
    ),
    Family(
        "phimoe",
        block="model.layers.{layer}.block_sparse_moe",
        memory_block="model.layers.{layer}.mlp",
        memory_router=_ROUTER,
        min_group=2,  # with one expert left, SparseMixer's logits are not finite
        router_kind="SparseMixer top-2 (sampled in training)",
        renormalised="unknown",
    ),
)

_STACKED_ON_DISK = (
    Family(
        "gpt_oss",
        router=(Sliced("router.weight"), Sliced("router.bias")),
        stacked=(
            Sliced("experts.gate_up_proj"),
            Sliced("experts.gate_up_proj_bias"),
            Sliced("experts.down_proj"),
            Sliced("experts.down_proj_bias"),
        ),
        memory_stacked=(
            Sliced("experts.gate_up_proj"),
            Sliced("experts.gate_up_proj_bias"),
            Sliced("experts.down_proj"),
            Sliced("experts.down_proj_bias"),
        ),
        router_kind=_AFTER,
        renormalised="always",
    ),
    Family(
        "aria_text",
        router=_ROUTER,
        stacked=(Sliced("experts.fc1.weight"), Sliced("experts.fc2.weight")),
        count_keys=("moe_num_experts",),
        top_k_key="moe_topk",
        shared=("shared_experts",),
        router_kind=_AFTER,
        renormalised="always",
    ),
    Family(
        "granitemoe_swa",
        block="model.layers.{layer}.block_sparse_moe",
        router=_ROUTER,
        router_kind=_AFTER,
        renormalised="always",
    ),
    *(
        Family(
            model_type,
            block="model.layers.{layer}.block_sparse_moe",
            router=(Sliced("router.layer.weight"),),
            stacked=(Sliced("input_linear.weight"), Sliced("output_linear.weight")),
            memory_router=_ROUTER,
            router_kind=_AFTER,
            renormalised="always",
        )
        for model_type in ("granitemoe", "granitemoeshared", "granitemoehybrid")
    ),
)

_NEVER_RENORMALISED = (
    Family(
        "deepseek_v2",
        count_keys=("n_routed_experts", "num_experts", "num_local_experts"),
        group_keys=("n_group", "topk_group"),
        shared=("shared_experts",),
        dense_keys=("first_k_dense_replace",),
        router_kind="softmax, top-k within the groups with the best expert, not renormalised, scaled",
        renormalised="never",
    ),
    Family(
        "jamba",
        block="model.layers.{layer}.feed_forward",
        router=_ROUTER,
        dense_keys=("expert_layer_period", "expert_layer_offset"),
        router_kind="softmax, top-k, not renormalised",
        renormalised="never",
    ),
)

ROWS = (*_QWEN_LIKE, *_MIXTRAL_LIKE, *_STACKED_ON_DISK, *_NEVER_RENORMALISED)
