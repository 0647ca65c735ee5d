"""Tiny random models of every family of the table: one builder, and a row of settings where a family needs its own."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch

EXPERTS, KEEP, TOP_K, LAYERS, VOCABULARY, WIDTH = 12, 6, 2, 4, 96, 32

_FIRST_DENSE = ["dense"] + ["sparse"] * (LAYERS - 1)

# Given to every family whose config knows the key.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    # Expert counts under every name; the config takes the ones it knows.
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    # Latent attention, linear attention, state space and index layers.
    "q_lora_rank": 14,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

_GROUPS = {"n_group": 2, "topk_group": 1}
_NUMBERED_GROUPS = {"num_expert_group": 2, "topk_group": 1}
_ALL_HEADS = {"num_key_value_heads": 4}
_SPARSE_AFTER = {"mlp_layer_types": _FIRST_DENSE}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
_INKLING2 = {
    "unpadded_vocab_size": VOCABULARY - 4,
    "sliding_window_size": 16,
    "rel_extent": 16,
    "d_rel": 4,
    **_SWA,
}

# What a family needs beyond the common settings; None takes a common setting away.
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _GROUPS | _ALL_HEADS | _SPARSE_AFTER,
    "axk2": _ALL_HEADS | _SPARSE_AFTER,
    "bailing_hybrid": _NUMBERED_GROUPS | _ALL_HEADS,
    "beam": _GROUPS | _SPARSE_AFTER,
    "deepseek_v2": _GROUPS | _ALL_HEADS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _GROUPS | _ALL_HEADS,
    "deepseek_v32": _GROUPS | _ALL_HEADS | _SPARSE_AFTER | {"first_k_dense_replace": None},
    "dots1": _GROUPS | _ALL_HEADS,
    "dots3_note_text": _ALL_HEADS
    | _SPARSE_AFTER
    | {
        "head_dim": 16,
        "n_group": 1,
        "layer_types": ["indexed_attention", "sliding_attention"] * (LAYERS // 2),
        "per_layer_config": {1: {"v_head_dim": 10}, 3: {"v_head_dim": 10}},
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": LAYERS - 1},
    "exaone_moe": _GROUPS | _SPARSE_AFTER | {"first_k_dense_replace": None},
    "gemma4_text": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": _ALTERNATING,
        "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
        "tie_word_embeddings": True,
    },
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _GROUPS | _ALL_HEADS | _SPARSE_AFTER,
    "glm_moe_dsa": _GROUPS | _ALL_HEADS | _SPARSE_AFTER | {"first_k_dense_replace": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hy_v4": _GROUPS,
    "inkling2_loop_text": _INKLING2,
    "inkling2_text": _INKLING2,
    "jamba": {
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": _NUMBERED_GROUPS | _ALL_HEADS | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "llama4_text": {
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 20,
        "intermediate_size_mlp": 40,
    },
    "longcat_flash": {
        "zero_expert_num": 3,
        "expert_ffn_hidden_size": 20,
        "ffn_hidden_size": 40,
        "num_layers": 2,
        **_ALL_HEADS,
    },
    "mimo_v2_flash": _GROUPS | _SPARSE_AFTER,
    "minimax": {"block_size": 8},
    "nemotron_h": _GROUPS | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * LAYERS, "hc_lowrank": 8, "ple_embed_dim": 8},
    "solar_open": _GROUPS,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_PATCHES = {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "patch_size": 4, "out_hidden_size": WIDTH}

# Vision part of the families that wrap a text model.
_VISION: dict[str, dict[str, int]] = {
    "gemma4": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    "llama4": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    },
    "qwen3_5_moe": _PATCHES,
    "qwen4_exp": _PATCHES,
}

# Not random: tables of positions and decays, which other values make meaningless or infinite.
_FIXED = re.compile(r"inv_freq|rotary|A_log|dt_bias|slope|decay")


def _dbrx() -> Any:
    from transformers import DbrxConfig

    return DbrxConfig(
        d_model=WIDTH,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={
            "ffn_hidden_size": 20,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    )


def config(model_type: str) -> Any:
    """The tiny config of a model type."""
    from transformers import CONFIG_MAPPING

    if model_type == "dbrx":
        return _dbrx()
    kind: Any = CONFIG_MAPPING[model_type]
    if model_type in _VISION:
        hidden = 64 if model_type == "llama4" else 16
        vision = {"hidden_size": 16, "intermediate_size": hidden, **_VISION[model_type]}
        return kind(text_config=config(f"{model_type}_text").to_dict(), vision_config=vision)
    alias = getattr(kind, "attribute_map", None) or {}
    known = {*kind().to_dict(), *alias}
    own = _OWN.get(model_type, {})
    settings = {key: value for key, value in _COMMON.items() if key in known} | own
    # A config must not be given a setting both by its name and by its alias.
    twice = {key for key in settings if alias.get(key) in settings and key not in own}
    return kind(**{k: v for k, v in settings.items() if v is not None and k not in twice})


@lru_cache(maxsize=4)
def model(model_type: str) -> Any:
    """A random model of a type, biases and buffers random too; not to be changed."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    maker: Any = AutoModelForImageTextToText if model_type in _VISION else AutoModelForCausalLM
    built = maker.from_config(config(model_type)).float().eval()
    randomise(built)
    return built


def randomise(built: Any) -> None:
    """Fill every stored tensor with seeded noise of a size at which all experts and routers matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in built.state_dict().items():
            if name.endswith("tid2eid"):
                rows = [torch.randperm(EXPERTS, generator=generator)[: value.shape[1]] for _ in range(len(value))]
                value.copy_(torch.stack(rows))
            elif value.is_floating_point() and not _FIXED.search(name):
                value.copy_(_noise(name, value, generator))


def _noise(name: str, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(value.shape, generator=generator)
    if ("norm" in name and value.ndim == 1) or name.endswith("layer_scalar"):
        return 1 + 0.1 * noise
    if name.endswith("balancing_biases"):
        noise[-1] = -1 / 0.3  # transformers resets this entry to -1 whenever it loads the model
    if name.endswith(("bias", "biases")) and value.numel() >= EXPERTS and re.search("correction|expert|balanc", name):
        return 0.3 * noise
    is_router = name.endswith("weight") and EXPERTS in value.shape
    return (1.0 if is_router else 0.15) * noise
