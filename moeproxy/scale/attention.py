"""Attention whose values are padded to the width of the queries, registered with transformers as `padded_sdpa`.

Multi-head latent attention (DeepSeek-V3) has narrower values than queries. torch's fused CPU kernel then gives way to
one that holds all scores, T x T values a head, which no GPU kernel does. Padding, as others do it for FlashAttention,
keeps the fused kernel; where the widths are equal it is transformers' own `sdpa`, unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "padded_sdpa"


def padded_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `sdpa` does; the result has the width of the values that were given."""
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out[..., :width], None


def register() -> None:
    """Make the name known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, padded_sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
