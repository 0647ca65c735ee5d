"""Tiny random MoE checkpoints with tokenizer, in the layouts that tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789+-*=yrsm "
TEXTS = ["12+7=19", "r123=321", "9*8=72", "s4213=1234", "5", "m91=9", "70-7=63 12+7=19"]


def tokenizer() -> Any:
    """A character tokenizer: 0 pad, 1 begin, 2 end, then the characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *CHARACTERS]
    model = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def qwen3_moe(seed: int = 0, **changes: Any) -> Any:
    """A random Qwen3-MoE model: 3 layers, 8 experts, top-2."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": len(CHARACTERS) + 3,
        "hidden_size": 24,
        "intermediate_size": 32,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).eval()


def deepseek_v3(seed: int = 0, **changes: Any) -> Any:
    """A random DeepSeek-V3 model: 3 layers, the first dense, 16 experts in 4 groups, top-3, a shared
    expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": len(CHARACTERS) + 3,
        "hidden_size": 24,
        "intermediate_size": 32,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,
        "num_nextn_predict_layers": 0,
    }
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(settings | changes))).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


MODELS = {"qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}


def save(model: Any, path: Path, **options: Any) -> Path:
    """Save model and tokenizer; options go to save_pretrained (max_shard_size, save_original_format)."""
    model.save_pretrained(path, **options)
    tokenizer().save_pretrained(path)
    return path


def write(path: Path, kind: str = "qwen3_moe", seed: int = 0, **options: Any) -> Path:
    """Write a tiny checkpoint of a kind (a key of MODELS)."""
    return save(MODELS[kind](seed), path, **options)
