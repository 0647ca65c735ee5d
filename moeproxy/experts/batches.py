"""Calibration texts as batches, and what every way of passing them through a model needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeproxy.experts.adapters import OBSERVERS
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.observe import Batch, LayerTotals, observed

Totals = dict[int, LayerTotals]
TOKENS_A_TEXT = 512  # padded tokens a batch may hold, times the batch size


@dataclass(frozen=True)
class Piece:
    """Some texts padded to one length (B texts, T tokens).

    Attributes:
        ids_BT: int64, token ids.
        mask_BT: bool, which are no padding.
        fold_B: int64, fold of each text.
        stop: number of texts up to and with this piece.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    fold_B: torch.Tensor
    stop: int

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        """Arguments of the base model's forward pass."""
        mask_BT = self.mask_BT.long().to(device)
        return {"input_ids": self.ids_BT.to(device), "attention_mask": mask_BT, "use_cache": False}


def pieces(texts: list[list[int]], batch_size: int, n_folds: int) -> Iterator[Piece]:
    """Cut lists of token ids into batches; the texts are dealt to the folds in turn.

    In turn, so that each fold has its share of every part of the list. A batch ends early where one long text would
    pad the others beyond TOKENS_A_TEXT tokens each.
    """
    start = 0
    while start < len(texts):
        stop = _end(texts, start, batch_size)
        ids_BT, mask_BT = pad(texts[start:stop])
        yield Piece(ids_BT, mask_BT, torch.arange(start, stop) % n_folds, stop)
        start = stop


def _end(texts: list[list[int]], start: int, batch_size: int) -> int:
    """Number of the first text that no longer belongs to the batch that begins at `start`."""
    longest = 0
    for stop in range(start, min(start + batch_size, len(texts))):
        longest = max(longest, len(texts[stop]))
        if stop > start and longest * (stop + 1 - start) > TOKENS_A_TEXT * batch_size:
            return stop
    return min(start + batch_size, len(texts))


def pad(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad with token 0; return ids and the mask of valid tokens (the mask, not the id, decides)."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    ids_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids_BT, torch.arange(width) < lengths.unsqueeze(1)


def n_folds_of(totals: Totals) -> int:
    """Number of folds that the totals keep apart."""
    return next(iter(totals.values())).fold_gate_FE.shape[0]


def zeros(model: Any, checkpoint: Checkpoint, keep_choices: bool, n_folds: int = 1) -> LayerTotals:
    """Totals of one layer before the first token."""
    width = model.config.get_text_config().hidden_size
    return LayerTotals.zeros(checkpoint.n_experts, width, checkpoint.top_k, keep_choices, n_folds)


def layers_path(checkpoint: Checkpoint) -> str:
    """Module path of the list of decoder layers in a loaded model."""
    return (checkpoint.family.memory_block or checkpoint.family.block).partition(".{layer}")[0]


def without_head(model: Any, checkpoint: Checkpoint) -> nn.Module:
    """The model that ends before the head, so that no logits are computed."""
    if model.base_model is not model:
        return model.base_model
    # Llama 4's text model does not say which of its parts that is: the one with the layers.
    return model.get_submodule(layers_path(checkpoint).rpartition(".")[0])


def watched(model: nn.Module, checkpoint: Checkpoint, totals: Totals, batch: Batch) -> AbstractContextManager[None]:
    """Hook the MoE blocks of the layers in `totals` as their family needs it, for the duration of the block."""
    family = checkpoint.family
    blocks = {layer: model.get_submodule(family.block_in_memory(layer)) for layer in totals}
    return observed(blocks, totals, batch, OBSERVERS[family.observer], family.experts_module)


def router_rows(model: nn.Module, checkpoint: Checkpoint, layer: int) -> torch.Tensor:
    """Rows of a layer's router weight, float32 (E, R) on the CPU, without the tail.

    R is the model's width, but for routers with a narrower last layer (ZAYA).
    """
    family = checkpoint.family
    name = (family.memory_router or family.router)[0].name
    block = model.get_submodule(family.block_in_memory(layer))
    return block.get_parameter(name).detach()[: checkpoint.n_experts].float().cpu()
