"""Families whose config and weights wrap a text model of another row (vision and text)."""

from __future__ import annotations

from dataclasses import replace

from moeproxy.experts.family import Family
from moeproxy.experts.family_rows import softmax, special

_TEXT = "text_config."


def _wrapping(model_type: str, text: Family, *prefixes: str) -> Family:
    """A row whose counts lie in `text_config` and whose text layers have other prefixes on disk.

    In memory the block stays the text model's: AutoModelForCausalLM loads the text part.
    """
    end = text.block.partition("layers.{layer}")[2]
    return replace(
        text,
        model_type=model_type,
        also_blocks=tuple(f"{prefix}layers.{{layer}}{end}" for prefix in prefixes),
        count_keys=tuple(_TEXT + key for key in text.count_keys),
        top_k_key=_TEXT + text.top_k_key,
        layer_keys=tuple(_TEXT + key for key in text.layer_keys),
        dense_keys=tuple(_TEXT + key for key in text.dense_keys),
        mtp_keys=tuple(_TEXT + key for key in text.mtp_keys),
        norm_key=_TEXT + text.norm_key,
    )


_BY_TYPE = {row.model_type: row for row in special.ROWS}
_INSIDE = "model.language_model."

ROWS = (
    _wrapping("qwen3_5_moe", softmax.QWEN3_5_MOE_TEXT, _INSIDE),
    _wrapping("qwen4_exp", softmax.QWEN4_EXP_TEXT, _INSIDE),
    _wrapping("llama4", _BY_TYPE["llama4_text"], "language_model.model.", _INSIDE),
    replace(
        _wrapping("gemma4", _BY_TYPE["gemma4_text"]),
        block="model.language_model.layers.{layer}",
        also_blocks=("model.layers.{layer}",),
    ),
)
