"""Families with a layout of their own: extra router rows, flat or shared tensors, routing by token id.

Layouts were read off checkpoints written by transformers 5.24.
"""

from __future__ import annotations

from moeproxy.experts.family import Family, Sliced

_ZERO = "zero_expert_num"
_IN_MEMORY_BIAS = Sliced("gate.e_score_correction_bias")
_MOA = "model.layers.{layer}.self_attention.experts."  # JetMoe: attention heads are experts too
_JETMOE = (Sliced("input_linear.weight"), Sliced("output_linear.weight"))
_JETMOE += (Sliced(f"{_MOA}input_linear.weight"), Sliced(f"{_MOA}output_linear.weight"))
_DBRX = (Sliced("experts.mlp.w1"), Sliced("experts.mlp.v1"), Sliced("experts.mlp.w2"))

# The block of Gemma 4 is the whole decoder layer, so everything else of the layer is listed as shared.
GEMMA4_SHARED = (
    "self_attn",
    "mlp",
    "router.scale",
    "layer_scalar",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
)
GEMMA4_ROUTER = (Sliced("router.proj.weight"), Sliced("router.per_expert_scale"))

_INKLING2 = tuple(
    Family(
        model_type,
        block="model.llm.layers.{layer}.mlp",
        router=(Sliced("gate.weight"), Sliced("gate.bias")),
        stacked=(Sliced("experts.w13_weight"), Sliced("experts.w2_weight")),
        count_keys=("n_routed_experts",),
        router_kind="sigmoid + bias",
        renormalised="unknown",
        memory_block="model.layers.{layer}.mlp",
        memory_router=(Sliced("gate.weight"), _IN_MEMORY_BIAS),
    )
    for model_type in ("inkling2_text", "inkling2_loop_text")
)

ROWS = (
    Family(
        "dbrx",
        block="transformer.blocks.{layer}.ffn",
        router=(Sliced("router.layer.weight"),),
        stacked=_DBRX,  # flat: n_experts * ffn rows
        count_keys=("ffn_config.moe_num_experts",),
        top_k_key="ffn_config.moe_top_k",
        router_kind="softmax, top-k, renormalised (p-norm)",
        renormalised="always",
        memory_stacked=_DBRX,
        grouped_mm=False,
    ),
    Family(
        "deepseek_v4",
        block="model.layers.{layer}.ffn",
        also_blocks=("layers.{layer}.ffn",),
        router=(Sliced("gate.weight"), Sliced("gate.bias", optional=True)),
        id_tables=("gate.tid2eid",),
        count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
        shared=("shared_experts",),
        dense_keys=("mlp_layer_types",),
        router_kind="sqrt(softplus) + bias, renormalised; first layers by token id",
        renormalised="unknown",
        memory_block="model.layers.{layer}.mlp",
        memory_router=(Sliced("gate.weight"), Sliced("gate.e_score_correction_bias", optional=True)),
    ),
    Family(
        "ernie4_5_moe",
        router=(Sliced("gate.weight"), Sliced("moe_statics.e_score_correction_bias", axis=1)),
        count_keys=("moe_num_experts",),
        top_k_key="moe_k",
        shared=("shared_experts",),
        dense_keys=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        router_kind="softmax, choice by score + bias, renormalised",
        renormalised="always",
        memory_router=(Sliced("gate.weight"), Sliced("gate.moe_statics.e_score_correction_bias", axis=1)),
    ),
    Family(
        "gemma4_text",
        block="model.layers.{layer}",
        router=GEMMA4_ROUTER,
        top_k_key="top_k_experts",
        shared=GEMMA4_SHARED,
        router_kind="softmax, top-k, renormalised, times a scale for each expert",
        renormalised="always",
    ),
    *_INKLING2,
    Family(
        "inkling_text",
        router=(Sliced("gate.weight", tail="n_shared_experts"), _IN_MEMORY_BIAS),
        count_keys=("n_routed_experts",),
        shared=("shared_experts", "gate.global_scale"),
        dense_keys=("mlp_layer_types",),
        router_kind="sigmoid + bias; shared experts are scored with the routed ones",
        renormalised="unknown",
    ),
    Family(
        "jetmoe",
        router=(Sliced("router.layer.weight"), Sliced(f"{_MOA}router.layer.weight")),
        stacked=_JETMOE,
        shared=("bias", f"{_MOA}bias"),
        router_kind="top-k, softmax over the chosen; the attention has as many experts, kept alike",
        renormalised="always",
        memory_stacked=_JETMOE,
        experts_module="",  # the block itself holds the experts' linear layers
        observer="sorted",
        grouped_mm=False,
    ),
    Family(
        "llama4_text",
        block="model.layers.{layer}.feed_forward",
        router=(Sliced("router.weight"),),
        shared=("shared_expert",),
        dense_keys=("interleave_moe_layer_step", "moe_layers"),
        router_kind="top-k, sigmoid, which multiplies the expert's input",
        renormalised="always",
        observer="gated_input",
        grouped_mm=False,
    ),
    Family(
        "longcat_flash",
        router=(
            Sliced("router.classifier.weight", tail=_ZERO),
            Sliced("router.e_score_correction_bias", tail=_ZERO),
        ),
        each_tail=_ZERO,
        count_keys=("n_routed_experts",),
        top_k_key="moe_topk",
        layer_keys=("num_layers",),
        stacked=(Sliced("experts.gate_up_proj", tail=_ZERO), Sliced("experts.down_proj")),
        router_kind="softmax, choice by score + bias, scaled; some experts pass their input on",
        renormalised="never",
        memory_stacked=(Sliced("experts.gate_up_proj", tail=_ZERO), Sliced("experts.down_proj")),
        observer="zero_experts",
        grouped_mm=False,
    ),
    Family(
        "zaya",
        router=(Sliced("gate.router_mlp.out_proj.weight", tail=1), Sliced("gate.balancing_biases", tail=1)),
        shared=(
            "gate.router_states_scale",
            "gate.down_proj",
            "gate.router_mlp.norm",
            "gate.router_mlp.fc1",
            "gate.router_mlp.fc2",
        ),
        router_kind="MLP router with balancing bias, softmax, a slot that skips",
        renormalised="unknown",
        observer="skip",
    ),
)
