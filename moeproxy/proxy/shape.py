"""ModelShape: what decides the memory of training and rollout, from a checkpoint or from a config alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.config import Counts
from moeproxy.experts.families import family_of
from moeproxy.proxy.cost import cost
from moeproxy.proxy.plan import allowed_counts, possible_counts

SIZES = (
    "hidden_size",
    "vocab_size",
    "moe_intermediate_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "q_lora_rank",
    "n_shared_experts",
    "first_k_dense_replace",
)
"""Sizes that decide memory; a config must give those that its family has."""
MAY_BE_NONE = ("q_lora_rank", "n_shared_experts", "head_dim", "num_key_value_heads")
"""Sizes for which a config may say null: the model has no such part, or works the size out."""
MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")
MOST = 2**31
"""No size of a model is larger (transformers' and torch's indices end near it)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a MoE model in weights and widths (numbers, not bytes).

    Args:
        n_experts, top_k: routed experts a layer, experts a token.
        n_layers, moe_layers: decoder layers, and those with experts.
        fixed: weights outside routed experts and router rows.
        per_expert: weights of one expert and its router row, all layers together.
        hidden, vocabulary, expert_width: model width, tokens, inner width of an expert.
        attention_width: values of queries, keys and values of a token in a layer.
        normed_width: values of queries and keys, where the model norms each head's (Qwen3); else 0.
        kv_values: values a token leaves in a layer's key-value cache (a compressed one where the model has it).
        counts: numbers of experts that a proxy can have, the original's included.
        positions: longest sequence; None where the config does not say.
    """

    n_experts: int
    top_k: int
    n_layers: int
    moe_layers: int
    fixed: int
    per_expert: int
    hidden: int
    vocabulary: int
    expert_width: int
    attention_width: int
    normed_width: int
    kv_values: int
    counts: tuple[int, ...]
    positions: int | None = None

    def params(self, n_experts: int) -> int:
        """Return the number of weights with `n_experts` experts a layer."""
        return self.fixed + self.per_expert * n_experts

    def moe_layer(self, n_experts: float) -> float:
        """Return the weights of one MoE layer that holds `n_experts` experts (fewer where they are spread)."""
        dense = max(self.fixed - 2 * self.vocabulary * self.hidden, 0) / self.n_layers
        return dense + self.per_expert * n_experts / self.moe_layers

    @classmethod
    def of(cls, model: Checkpoint | Mapping[str, Any]) -> ModelShape:
        """Return the shape of a checkpoint or of a parsed config.

        A checkpoint's weights are counted in its headers; for a config transformers builds the model without memory.

        Raises:
            ProxyError: the config lacks a width, or transformers cannot build the model.
        """
        if isinstance(model, Checkpoint):
            shape = _from_checkpoint(model)
            return cls(**(shape | _widths(model.config, _norms_heads(model.tensors))))
        shape, names = _from_config(model)
        return cls(**(shape | _widths(model, _norms_heads(names))))


def _from_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    counts = tuple(allowed_counts(checkpoint))
    whole, smallest = cost(checkpoint), cost(checkpoint, counts[0])
    each = (whole.params - smallest.params) // max(checkpoint.n_experts - counts[0], 1)
    return {
        "n_experts": checkpoint.n_experts,
        "top_k": checkpoint.top_k,
        "n_layers": checkpoint.n_layers,
        "moe_layers": len(checkpoint.moe_layers),
        "fixed": whole.params - each * checkpoint.n_experts,
        "per_expert": each,
        "counts": counts,
    }


def _from_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], Iterable[str]]:
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_of(config)
    check_values(config)
    settings = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        made = AutoConfig.for_model(family.model_type, **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ProxyError(
            f"transformers cannot build a {family.model_type} model from the config ({error})",
            expected="a complete config.json",
            remedy="give the checkpoint instead",
        ) from error
    check_sizes(config, made)
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    n_layers = int(made.get_text_config().num_hidden_layers)
    rows = {
        layer: sum(sizes.get(f"{family.block_in_memory(layer)}.{part.name}", 0) for part in family.in_memory)
        for layer in range(n_layers)
    }
    if not any(rows.values()):
        raise no_expert_layer(family.model_type)
    counts = Counts.read(config, family, Path("config.json"))
    each = sum(rows.values()) // counts.n_experts
    shape = {
        "n_experts": counts.n_experts,
        "top_k": counts.top_k,
        "n_layers": n_layers,
        "moe_layers": sum(size > 0 for size in rows.values()),
        "fixed": sum(sizes.values()) - each * counts.n_experts,
        "per_expert": each,
        "counts": tuple(
            possible_counts(counts.n_experts, counts.top_k, counts.n_group, counts.topk_group, family.min_group)
        ),
    }
    return shape, sizes


def no_expert_layer(model_type: str) -> ProxyError:
    """Return the error for a config of which a model without any expert layer is built."""
    return ProxyError(
        f"no layer of the {model_type} model that the config describes has experts",
        expected="at least one layer with experts",
        remedy="look at first_k_dense_replace, mlp_layer_types, mlp_only_layers, decoder_sparse_step and the number of "
        "layers",
    )


def check_values(config: Mapping[str, Any]) -> None:
    """Raise ProxyError for a size that cannot be one, whatever the family; lists (a size by layer) are left alone."""
    nested = config.get("text_config")
    given = {**(nested if isinstance(nested, Mapping) else {}), **config}
    for name in SIZES:
        value, least = given.get(name, 1), 0 if name in MAY_BE_ZERO else 1
        if isinstance(value, list | tuple | Mapping) or (value is None and name in MAY_BE_NONE):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ProxyError(
                f"the config says {name} is {value!r}",
                expected=f"a whole number, {least} to {MOST:,}",
                remedy=f"take {name} from the model's own config.json",
            )
    heads, groups = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ProxyError(
            f"the config says {heads} attention heads and {groups} key-value heads",
            expected="key-value heads that divide the attention heads",
            remedy="take num_attention_heads and num_key_value_heads from the model's own config.json",
        )


def check_sizes(config: Mapping[str, Any], made: Any) -> None:
    """Raise ProxyError for a size that the config does not give and transformers would take from its defaults.

    Args:
        config: what was given, a parsed `config.json`.
        made: what transformers made of it.
    """
    nested = config.get("text_config")
    given = {**(nested if isinstance(nested, Mapping) else {}), **config}
    text = made.get_text_config()  # its class has the defaults; what it works out itself (None there) may be left out
    names: Mapping[str, str] = getattr(text, "attribute_map", {})
    lacking = [
        name
        for name in SIZES
        if isinstance(getattr(type(text), name, None), int)
        and name not in given
        and names.get(name) not in given
        and not (name == "first_k_dense_replace" and "mlp_layer_types" in given)  # says the same of every layer
    ]
    if lacking:
        raise ProxyError(
            f"the config of {config.get('model_type')} says no {', no '.join(lacking)}",
            expected="a complete config.json: transformers' defaults are of another model",
            remedy=f"add {', '.join(lacking)} from the model's own config.json",
        )


def _norms_heads(names: Iterable[str]) -> bool:
    return any(name.endswith("self_attn.q_norm.weight") for name in names)


def _widths(config: Mapping[str, Any], norms_heads: bool) -> dict[str, Any]:
    nested = config.get("text_config")
    found: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config

    def width(*names: str, default: int | None = None) -> int:
        value = next((found[name] for name in names if isinstance(found.get(name), int)), default)
        if value is None:
            raise ProxyError(
                f"the config has no {names[0]}", expected=f"one of {', '.join(names)}", remedy="complete config.json"
            )
        return value

    hidden, heads = width("hidden_size", "n_embd", "d_model"), width("num_attention_heads", "n_head", "n_heads")
    if isinstance(found.get("kv_lora_rank"), int):  # multi-head latent attention keeps a compressed cache
        key = width("qk_nope_head_dim") + width("qk_rope_head_dim")
        attention = heads * (2 * key + width("v_head_dim"))
        cache = width("kv_lora_rank") + width("qk_rope_head_dim")
    else:
        each, groups = width("head_dim", default=hidden // heads), width("num_key_value_heads", default=heads)
        attention, cache = each * (heads + 2 * groups), 2 * groups * each
    return {
        "hidden": hidden,
        "vocabulary": width("vocab_size"),
        "expert_width": width("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
        "attention_width": attention,
        "normed_width": attention - cache // 2 if norms_heads else 0,
        "kv_values": cache,
        "positions": longest if isinstance(longest := found.get("max_position_embeddings"), int) else None,
    }
