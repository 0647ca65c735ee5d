"""The tiny program that is emulated, really run and recorded: 2 layers x 8 experts, seconds."""

from __future__ import annotations

from typing import Any

import pytest

from moeproxy.scale import GRPOProgram

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def program() -> GRPOProgram:
    return GRPOProgram(TINY, sequences=2, prompt=32, completion=32, learning_rate=1e-2)
