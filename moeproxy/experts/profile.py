"""Calibration: pass texts through a model and record how it routes them to its experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import find_not_finite, load_model, load_tokenizer
from moeproxy.experts.observe import Batch, LayerTotals, observed
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import provenance

__all__ = ["ExpertProfile", "profile"]

Progress = Callable[[int, int], None]
FOLDS = 10


def profile(
    checkpoint: Checkpoint | str | Path,
    prompts: Sequence[str],
    *,
    batch_size: int = 32,
    device: str = "cpu",
    dtype: str = "float32",
    keep_choices: bool = True,
    progress: Progress | None = None,
) -> ExpertProfile:
    """Run calibration texts through the model and record how it routes them.

    Args:
        checkpoint: an opened checkpoint or its directory.
        prompts: texts, already with answers where those should be routed too (teacher forcing).
        batch_size: texts a forward pass.
        device: torch device.
        dtype: dtype of the weights during the pass, "auto" for the stored one.
        keep_choices: keep every token and its choices (T * (L * K + 1) * 4 bytes).
        progress: called with (texts done, texts in all).

    Raises:
        CheckpointError: the checkpoint is unusable or holds NaN or infinite weights.
        ProfileError: there is no text, the tokenizer is missing, or the family's experts cannot be observed.

    Example:
        >>> result = profile("data/models/qwen3_moe", ["12+7=19", "sort 312=123"])
        >>> result.load_LE.sum(axis=1) == result.n_tokens * result.top_k
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    if batch_size < 1:
        raise ProfileError(f"batch_size is {batch_size}", expected="1 or more", remedy="use 32")
    _check_can_be_observed(opened)
    texts = tokenise(opened, prompts)
    model = load_model(opened, dtype=dtype, device=device)
    find_not_finite(model, opened)
    _check_ids(texts, model.get_input_embeddings().num_embeddings, opened)
    n_folds = min(FOLDS, len(texts))
    totals = {layer: _totals(model, opened, keep_choices, n_folds) for layer in opened.moe_layers}
    run(model, opened, totals, texts, batch_size, progress)
    _check_finite(totals, opened)
    settings = {"texts": len(prompts), "batch_size": batch_size, "dtype": dtype, "device": device}
    tokens = [token for text in texts for token in text] if keep_choices else []
    return _assemble(opened, list(totals.values()), _routers(model, opened), tokens, settings)


def _check_can_be_observed(checkpoint: Checkpoint) -> None:
    if not checkpoint.family.experts_module:
        raise ProfileError(
            f"the experts of {checkpoint.family.model_type} cannot be observed yet",
            expected="an experts module that is called with hidden states, chosen experts and weights",
            remedy="make a KeepPlan by other means; the checkpoint can be pruned, but not profiled",
            where=checkpoint.path,
        )


def tokenise(checkpoint: Checkpoint, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text that has any; raises ProfileError if none has."""
    if isinstance(prompts, str):
        raise ProfileError("prompts is one string", expected="a list of texts", remedy="put it into a list")
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokens for tokens in tokenizer(list(prompts))["input_ids"] if tokens] if len(prompts) else []
    if not ids:
        raise ProfileError(
            f"the {len(prompts)} calibration texts hold no token",
            expected="at least one text with text in it",
            remedy="pass calibration texts that resemble the training prompts",
            where=checkpoint.path,
        )
    return ids


def _check_ids(texts: list[list[int]], n_embeddings: int, checkpoint: Checkpoint) -> None:
    highest = max(max(text) for text in texts)
    if highest >= n_embeddings:
        raise ProfileError(
            f"the tokenizer gives token {highest}, but the model has {n_embeddings} embeddings",
            expected="the tokenizer that the model was trained with",
            remedy="restore the tokenizer files that belong to the weights",
            where=checkpoint.path,
        )


def run(
    model: nn.Module,
    checkpoint: Checkpoint,
    totals: dict[int, LayerTotals],
    texts: list[list[int]],
    batch_size: int,
    progress: Progress | None = None,
) -> None:
    """Pass lists of token ids through a loaded model and add what its experts do to `totals` (by layer)."""
    family = checkpoint.family
    blocks = {layer: model.get_submodule(family.block_in_memory(layer)) for layer in totals}
    modules = {layer: block.get_submodule(family.experts_module) for layer, block in blocks.items()}
    batch, n_folds = Batch(), next(iter(totals.values())).fold_gate_FE.shape[0]
    device = next(model.parameters()).device
    with observed(modules, totals, batch), torch.inference_mode():
        for start in range(0, len(texts), batch_size):
            ids_BT, mask_BT = pad(texts[start : start + batch_size])
            # Texts are dealt to the folds in turn, so that each fold has its share of every part of the list.
            batch.show(mask_BT, torch.arange(start, start + len(ids_BT)) % n_folds)
            model(input_ids=ids_BT.to(device), attention_mask=mask_BT.long().to(device), use_cache=False)
            if progress:
                progress(min(start + batch_size, len(texts)), len(texts))


def _totals(model: nn.Module, checkpoint: Checkpoint, keep_choices: bool, n_folds: int = 1) -> LayerTotals:
    width = _routers(model, checkpoint).shape[-1]
    return LayerTotals.zeros(checkpoint.n_experts, width, checkpoint.top_k, keep_choices, n_folds)


def _routers(model: nn.Module, checkpoint: Checkpoint) -> torch.Tensor:
    """Rows of every layer's router weight, float32 (L, E, D), without the tail."""
    family = checkpoint.family
    name = (family.memory_router or family.router)[0].name
    blocks = [model.get_submodule(family.block_in_memory(layer)) for layer in checkpoint.moe_layers]
    rows = [block.get_parameter(name).detach()[: checkpoint.n_experts] for block in blocks]
    return torch.stack([row.float().cpu() for row in rows])


def _check_finite(totals: dict[int, LayerTotals], checkpoint: Checkpoint) -> None:
    for layer, sums in totals.items():
        if not bool(sums.saliency_E.isfinite().all() and sums.context_ED.isfinite().all()):
            raise ProfileError(
                f"the activations of layer {layer} are NaN or infinite although the weights are finite",
                expected="finite hidden states and expert outputs",
                remedy="profile in another dtype (dtype='float32')",
                where=checkpoint.path,
            )


def pad(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad with token 0; return ids and the mask of valid tokens (the mask, not the id, decides)."""
    rows = [torch.tensor(text) for text in texts]
    mask_BT = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask_BT


def _assemble(
    checkpoint: Checkpoint,
    totals: list[LayerTotals],
    router_LED: torch.Tensor,
    token_ids: list[int],
    settings: dict[str, Any],
) -> ExpertProfile:
    def stack(name: str, dim: int = 0) -> np.ndarray:
        return torch.stack([getattr(layer, name) for layer in totals], dim=dim).numpy()

    def tokens(name: str) -> np.ndarray:
        return torch.stack([torch.cat(getattr(layer, name)) for layer in totals], dim=1).numpy()

    load_LE, gate_LE = stack("load_E"), stack("gate_E")
    # An unused expert's sums are zero, so any divisor gives the zeros that are promised for it.
    context_LED = stack("context_ED") / np.where(gate_LE > 0, gate_LE, 1)[..., None]
    return ExpertProfile(
        checkpoint_fingerprint=checkpoint.fingerprint,
        model_type=checkpoint.family.model_type,
        moe_layers=checkpoint.moe_layers,
        n_tokens=int(load_LE[0].sum()) // checkpoint.top_k,
        top_k=checkpoint.top_k,
        n_group=checkpoint.n_group,
        topk_group=checkpoint.topk_group,
        min_group=checkpoint.family.min_group,
        load_LE=load_LE,
        gate_LE=gate_LE,
        saliency_LE=stack("saliency_E"),
        cooccur_LEE=stack("cooccur_EE"),
        context_LED=context_LED.astype(np.float32),
        output_LED=(stack("output_ED") / np.maximum(load_LE, 1)[..., None]).astype(np.float32),
        output_norm_LE=(stack("norm_E") / np.maximum(load_LE, 1)).astype(np.float32),
        peak_LE=stack("peak_E").astype(np.float32),
        router_LED=router_LED.numpy(),
        choices_TLK=tokens("choices"),
        weights_TLK=tokens("weights"),
        tokens_T=np.array(token_ids, dtype=np.int32),
        fold_cooccur_FLEE=stack("fold_cooccur_FEE", 1).astype(np.int32),
        fold_gate_FLE=stack("fold_gate_FE", 1),
        fold_context_FLEP=stack("fold_context_FEP", 1).astype(np.float32),
        provenance=provenance(**settings),
    )
