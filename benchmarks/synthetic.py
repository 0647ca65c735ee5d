"""A made-up Qwen3-MoE checkpoint of real shape, written tensor by tensor, for benchmarks of large checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeproxy.lab.tokens import build_tokenizer, vocabulary_size

WIDTH, HEADS, KEY_HEADS, HEAD, EXPERT_WIDTH, EXPERTS, TOP_K = 2048, 32, 4, 128, 768, 128, 8
_POOL = 1 << 24  # random values that all tensors are cut from: drawing each anew would take minutes


def write_checkpoint(path: Path, layers: int, seed: int = 0, layers_a_shard: int = 2) -> Path:
    """Write a checkpoint of `layers` layers (1.25 GB each, bfloat16) in several shards; return its directory."""
    path.mkdir(parents=True)
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
    rng = np.random.default_rng(seed)
    parts = [list(range(first, min(first + layers_a_shard, layers))) for first in range(0, layers, layers_a_shard)]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        shapes = dict(_shapes(part, last=number == len(parts) - 1))
        weight_map |= dict.fromkeys(shapes, file)
        _write_shard(path / file, shapes, pool, rng)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(_config(layers), indent=2))
    build_tokenizer().save_pretrained(path)
    return path


def _shapes(layers: list[int], last: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if layers[0] == 0:
        yield "model.embed_tokens.weight", (vocabulary_size(), WIDTH)
    for layer in layers:
        start = f"model.layers.{layer}."
        for name, rows, columns in (
            ("q", HEADS * HEAD, WIDTH),
            ("k", KEY_HEADS * HEAD, WIDTH),
            ("v", KEY_HEADS * HEAD, WIDTH),
        ):
            yield f"{start}self_attn.{name}_proj.weight", (rows, columns)
        yield f"{start}self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)
        for name, size in (("self_attn.q_norm", HEAD), ("self_attn.k_norm", HEAD)):
            yield f"{start}{name}.weight", (size,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}{name}.weight", (WIDTH,)
        yield f"{start}mlp.gate.weight", (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                yield f"{start}mlp.experts.{expert}.{name}_proj.weight", (EXPERT_WIDTH, WIDTH)
            yield f"{start}mlp.experts.{expert}.down_proj.weight", (WIDTH, EXPERT_WIDTH)
    if last:
        yield "model.norm.weight", (WIDTH,)
        yield "lm_head.weight", (vocabulary_size(), WIDTH)


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]], pool: Tensor, rng: np.random.Generator) -> None:
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape in shapes.items():
            stream.write(_values(name, shape, pool, rng).view(torch.uint8).numpy().data)


def _values(name: str, shape: tuple[int, ...], pool: Tensor, rng: np.random.Generator) -> Tensor:
    """Ones for norms; a stretch of the pool for weights, larger ones for routers so that they decide."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    size = int(np.prod(shape))
    start = int(rng.integers(0, _POOL - size))
    return pool[start : start + size].clone() * (4 if "mlp.gate." in name else 1)


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": WIDTH,
        "intermediate_size": 6144,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary_size(),
        "attention_bias": False,
        "router_aux_loss_coef": 0.001,
    }
