"""A trainer's state, and the weights that rollouts need, as bytes to send, hold in memory or write to disk."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moeproxy.errors import RecoveryError


def pack(state: Mapping[str, Any]) -> bytes:
    """Return nested mappings and lists of tensors and plain values as bytes."""
    stream = io.BytesIO()
    torch.save(dict(state), stream)
    return stream.getvalue()


def unpack(payload: bytes) -> dict[str, Any]:
    """Return what `pack` packed; no code in the bytes is run.

    Raises:
        RecoveryError: the bytes are something else.
    """
    try:
        return dict(torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))
    except Exception as error:  # torch has no class of its own for this
        raise RecoveryError(f"no state of a trainer ({error!r})", expected="what `pack` made") from error


def sent_weights(model: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """Return copies of what travels to a rollout engine: parameters in `dtype`, and the kept buffers as they are."""
    sent, kept = getattr(torch, dtype), model.state_dict()
    parameters = {name: value.detach().to(sent, copy=True) for name, value in model.named_parameters()}
    return parameters | {name: value.clone() for name, value in model.named_buffers() if name in kept}


@torch.no_grad()
def receive_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights that `sent_weights` returned into a rollout engine's model."""
    for name, mine in (*model.named_parameters(), *model.named_buffers()):
        if name in weights:
            mine.copy_(weights[name])
