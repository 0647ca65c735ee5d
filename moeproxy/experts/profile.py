"""Calibration: pass texts through a model and record how it routes them to its experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeproxy.errors import ProfileError
from moeproxy.experts.batches import Totals, n_folds_of, pad, pieces, router_rows, watched, without_head, zeros
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import find_not_finite, load_model, load_tokenizer
from moeproxy.experts.observe import Batch, LayerTotals
from moeproxy.experts.requests import check_request, check_texts, fitted
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.experts.stream import run_streamed
from moeproxy.experts.stream_memory import should_stream
from moeproxy.experts.stream_weights import StreamedModel
from moeproxy.files import provenance

__all__ = ["ExpertProfile", "pad", "profile", "run", "tokenise"]

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
    stream: bool | None = None,
    scratch: str | Path | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> ExpertProfile:
    """Run calibration texts through the model and record how it routes them.

    Args:
        checkpoint: an opened checkpoint or its directory.
        prompts: texts, already with answers where those should be routed too (teacher forcing).
        batch_size: most texts a forward pass; fewer where long ones would make more than 512 padded tokens a text.
        device: torch device.
        dtype: dtype of the weights during the pass, "auto" for the stored one.
        keep_choices: keep every token and its choices (T * (L * K + 1) * 4 bytes).
        stream: hold one decoder layer's weights at a time, each read once (for models larger than memory); the result
            is the same. None streams when the weights would take more than 70 % of the memory that is free.
        scratch: folder for the hidden states of a streamed pass (T * D values, twice, on a disk); by default the
            system's folder for temporary files.
        max_tokens: cut texts to their first so many tokens.
        progress: called with (texts done, texts in all), in a streamed pass with both times the number of layers.

    Raises:
        CheckpointError: the checkpoint is unusable or holds NaN or infinite weights.
        ProfileError: there is no text, a text is longer than the model has positions, device or dtype cannot be used,
            the tokenizer is missing, `scratch` has no space left, or a quantised
            checkpoint is to be streamed.

    Example:
        >>> result = profile("data/models/qwen3_moe", ["12+7=19", "sort 312=123"])
        >>> result.load_LE.sum(axis=1) == result.n_tokens * result.top_k
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    check_request(batch_size, device, dtype, scratch)
    texts = fitted(tokenise(opened, prompts), opened, max_tokens)
    streams = should_stream(opened, dtype, device) if stream is None else stream
    how = _Pass(opened, texts, batch_size, device, dtype, keep_choices, progress)
    totals, router_LED = how.streamed(scratch) if streams else how.ordinary()
    _check_finite(totals, opened)
    settings = {"texts": len(texts), "batch_size": batch_size, "dtype": dtype, "device": device, "stream": streams}
    return _assemble(opened, list(totals.values()), router_LED, texts, settings)


@dataclass(frozen=True)
class _Pass:
    """A calibration pass to be made, in one of two ways; both return the totals by layer and the routers (L, E, R)."""

    checkpoint: Checkpoint
    texts: list[list[int]]
    batch_size: int
    device: str
    dtype: str
    keep_choices: bool
    progress: Progress | None

    def ordinary(self) -> tuple[Totals, torch.Tensor]:
        model = load_model(self.checkpoint, dtype=self.dtype, device=self.device)
        find_not_finite(model, self.checkpoint)
        totals = self._start(model)
        run(model, self.checkpoint, totals, self.texts, self.batch_size, self.progress)
        rows = [router_rows(model, self.checkpoint, layer) for layer in self.checkpoint.moe_layers]
        return totals, torch.stack(rows)

    def streamed(self, scratch: str | Path | None) -> tuple[Totals, torch.Tensor]:
        with StreamedModel.open(self.checkpoint, dtype=self.dtype, device=self.device) as streamed:
            totals = self._start(streamed.model)
            run_streamed(streamed, totals, self.texts, self.batch_size, scratch, self.progress)
            return totals, torch.stack([streamed.routers[layer] for layer in self.checkpoint.moe_layers])

    def _start(self, model: Any) -> Totals:
        _check_ids(self.texts, model.get_input_embeddings().num_embeddings, self.checkpoint)
        n_folds = min(FOLDS, len(self.texts))
        return {n: zeros(model, self.checkpoint, self.keep_choices, n_folds) for n in self.checkpoint.moe_layers}


def tokenise(checkpoint: Checkpoint, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text that has any; raises ProfileError if none has."""
    given = check_texts(prompts)
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokens for tokens in tokenizer(given)["input_ids"] if tokens] if given else []
    if not ids:
        raise ProfileError(
            f"the {len(given)} calibration texts hold no token",
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
    model: Any,
    checkpoint: Checkpoint,
    totals: Totals,
    texts: list[list[int]],
    batch_size: int,
    progress: Progress | None = None,
) -> None:
    """Pass lists of token ids through a loaded model and add what its experts do to `totals` (by layer).

    The base model runs, without the head: nobody needs logits here.
    """
    batch, device = Batch(), next(model.parameters()).device
    base = without_head(model, checkpoint)
    with watched(model, checkpoint, totals, batch), torch.inference_mode():
        for piece in pieces(texts, batch_size, n_folds_of(totals)):
            batch.show(piece.mask_BT, piece.fold_B)
            base(**piece.arguments(device))
            if progress:
                progress(piece.stop, len(texts))


def _check_finite(totals: dict[int, LayerTotals], checkpoint: Checkpoint) -> None:
    for layer, sums in totals.items():
        if not bool(sums.saliency_E.isfinite().all() and sums.context_ED.isfinite().all()):
            raise ProfileError(
                f"the activations of layer {layer} are NaN or infinite although the weights are finite",
                expected="finite hidden states and expert outputs",
                remedy="profile in another dtype (dtype='float32')",
                where=checkpoint.path,
            )


def _assemble(
    checkpoint: Checkpoint,
    totals: list[LayerTotals],
    router_LED: torch.Tensor,
    texts: list[list[int]],
    settings: dict[str, Any],
) -> ExpertProfile:
    def stack(name: str, dim: int = 0) -> np.ndarray:
        return torch.stack([getattr(layer, name) for layer in totals], dim=dim).numpy()

    def tokens(name: str) -> np.ndarray:
        return torch.stack([torch.cat(getattr(layer, name)) for layer in totals], dim=1).numpy()

    load_LE, gate_LE = stack("load_E"), stack("gate_E")
    token_ids = [token for text in texts for token in text]
    # An unused expert's sums are zero, so any divisor gives the zeros that are promised for it.
    context_LED = stack("context_ED") / np.where(gate_LE > 0, gate_LE, 1)[..., None]
    return ExpertProfile(
        checkpoint_fingerprint=checkpoint.fingerprint,
        model_type=checkpoint.family.model_type,
        moe_layers=checkpoint.moe_layers,
        n_tokens=len(token_ids),
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
        tokens_T=np.array(token_ids if totals[0].keep_choices else [], dtype=np.int32),
        fold_cooccur_FLEE=stack("fold_cooccur_FEE", 1).astype(np.int32),
        fold_gate_FLE=stack("fold_gate_FE", 1),
        fold_context_FLEP=stack("fold_context_FEP", 1).astype(np.float32),
        provenance=provenance(**settings),
    )
