"""ExpertProfile: what a calibration pass says about every expert, from the model's real routing."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint, html_table
from moeproxy.experts.load import find_not_finite, load_model, load_tokenizer
from moeproxy.experts.observe import LayerTotals, observed
from moeproxy.files import atomic_file, provenance

FORMAT = 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExpertProfile:
    """Per-layer statistics of a calibration pass over T valid tokens (padding excluded).

    Axes: L MoE layers in the order of `moe_layers`, E experts, T tokens, K experts a token, D model width.

    Attributes:
        checkpoint_fingerprint: of the checkpoint that was profiled.
        model_type: its family.
        moe_layers: decoder layer numbers of the L axis.
        n_tokens: T.
        top_k: K.
        n_group: number of expert groups or None.
        topk_group: groups a token may use or None.
        min_group: smallest group size the router can score.
        load_LE: int64, tokens routed to each expert; sums to T * K in every layer.
        gate_LE: float64, sum of gate weights.
        saliency_LE: float64, sum over routed tokens of gate weight times output L2 norm (REAP, arXiv 2510.13999).
        cooccur_LEE: int64, tokens that chose both experts; the diagonal is `load_LE`.
        context_LED: float32, gate-weighted mean hidden state routed to each expert; zeros for unused experts.
        output_norm_LE: float32, mean L2 norm of the expert's output before gating; zeros for unused experts.
        peak_LE: float32, largest absolute output activation of the down projection ("super experts", arXiv 2507.23279).
        router_LED: float32, rows of the router weight.
        choices_TLK: int16, chosen experts of every token (zero length if not kept).
        weights_TLK: float16, their gate weights (zero length if not kept).
        provenance: versions, command, time, settings.
    """

    checkpoint_fingerprint: str
    model_type: str
    moe_layers: tuple[int, ...]
    n_tokens: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    min_group: int
    load_LE: Int[np.ndarray, "L E"]
    gate_LE: Float[np.ndarray, "L E"]
    saliency_LE: Float[np.ndarray, "L E"]
    cooccur_LEE: Int[np.ndarray, "L E E"]
    context_LED: Float[np.ndarray, "L E D"]
    output_norm_LE: Float[np.ndarray, "L E"]
    peak_LE: Float[np.ndarray, "L E"]
    router_LED: Float[np.ndarray, "L E D"]
    choices_TLK: Int[np.ndarray, "T L K"]
    weights_TLK: Float[np.ndarray, "T L K"]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_experts(self) -> int:
        """Experts a layer (E)."""
        return self.load_LE.shape[1]

    def save(self, path: str | Path) -> Path:
        """Write one `.npz` file, complete or not at all; return its path."""
        target = Path(path)
        if target.suffix != ".npz":
            raise ProfileError(f"a profile is saved as .npz, not '{target.suffix}'", remedy="use NAME.npz", where=path)
        facts = {name: getattr(self, name) for name in _FACTS} | {"format": FORMAT}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        with atomic_file(target) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, facts=np.array(json.dumps(facts)), **arrays)
        return target

    @classmethod
    def load(cls, path: str | Path) -> ExpertProfile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileError: the file is missing, cut off, damaged, no profile, or of another format version.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                if facts.pop("format", None) != FORMAT:
                    raise _unreadable(path, "the profile has another format version")
                arrays = {name: stored[name] for name in _ARRAYS}
        except FileNotFoundError as error:
            raise _unreadable(path, "there is no such file") from error
        except (OSError, EOFError, KeyError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
            raise _unreadable(path, "the file is cut off, damaged or no profile") from error
        except ProfileError:
            raise
        except ValueError as error:
            raise _unreadable(path, "the file is cut off, damaged or no profile") from error
        facts["moe_layers"] = tuple(facts["moe_layers"])
        return cls(**facts, **arrays)

    def __repr__(self) -> str:
        unused = int((self.load_LE == 0).sum())
        return (
            f"ExpertProfile({self.model_type}, {len(self.moe_layers)} layers x {self.n_experts} experts, "
            f"top-{self.top_k}, {self.n_tokens:,} tokens, {unused} never used)"
        )

    def _repr_html_(self) -> str:
        share_LE = self.load_LE / max(self.n_tokens * self.top_k, 1)
        rows = {
            "model type": self.model_type, "layers with experts": len(self.moe_layers),
            "experts per layer": self.n_experts, "experts per token": self.top_k,
            "calibration tokens": f"{self.n_tokens:,}", "never used": int((self.load_LE == 0).sum()),
            "largest share of a layer": f"{share_LE.max():.1%}", "checkpoint": self.checkpoint_fingerprint[:12],
        }  # fmt: skip
        return html_table("Expert profile", rows)


_FACTS = (
    "checkpoint_fingerprint", "model_type", "moe_layers", "n_tokens", "top_k", "n_group", "topk_group", "min_group",
    "provenance",
)  # fmt: skip
_ARRAYS = (
    "load_LE", "gate_LE", "saliency_LE", "cooccur_LEE", "context_LED", "output_norm_LE", "peak_LE", "router_LED",
    "choices_TLK", "weights_TLK",
)  # fmt: skip


def _unreadable(path: str | Path, found: str) -> ProfileError:
    return ProfileError(
        found,
        expected=f"a profile of format {FORMAT} written by ExpertProfile.save",
        remedy="run moeproxy.profile again and save the result",
        where=path,
    )


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
        keep_choices: keep every token's choices (T * L * K * 4 bytes).
        progress: called with (texts done, texts in all).

    Raises:
        CheckpointError: the checkpoint is unusable or holds NaN or infinite weights.
        ProfileError: there is no text, or the tokenizer is missing.

    Example:
        >>> result = profile("data/models/qwen3_moe", ["12+7=19", "sort 312=123"])
        >>> result.load_LE.sum(axis=1) == result.n_tokens * result.top_k
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    texts = tokenise(opened, prompts)
    model = load_model(opened, dtype=dtype, device=device)
    find_not_finite(model, opened)
    totals, router_LED = run(model, opened, texts, batch_size, progress)
    return _assemble(opened, totals, router_LED, keep_choices, {"texts": len(prompts), "dtype": dtype})


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


def run(
    model: nn.Module, checkpoint: Checkpoint, texts: list[list[int]], batch_size: int, progress: Progress | None
) -> tuple[list[LayerTotals], torch.Tensor]:
    """Pass token id lists through a loaded model; return the totals and router rows of each MoE layer."""
    family, layers = checkpoint.family, checkpoint.moe_layers
    blocks = {layer: model.get_submodule(family.block_in_memory(layer)) for layer in layers}
    routers = [blocks[layer].get_parameter((family.memory_router or family.router)[0].name) for layer in layers]
    router_LED = torch.stack([router.detach().float().cpu()[: checkpoint.n_experts] for router in routers])
    totals = {layer: LayerTotals.zeros(checkpoint.n_experts, router_LED.shape[-1]) for layer in layers}
    modules = {layer: block.get_submodule(family.experts_module) for layer, block in blocks.items()}
    mask: list[torch.Tensor] = [torch.empty(0)]
    device = next(model.parameters()).device
    with observed(modules, totals, mask), torch.inference_mode():
        for start in range(0, len(texts), batch_size):
            ids_BT, mask[0] = _pad(texts[start : start + batch_size])
            model(input_ids=ids_BT.to(device), attention_mask=mask[0].long().to(device), use_cache=False)
            if progress:
                progress(min(start + batch_size, len(texts)), len(texts))
    return [totals[layer] for layer in layers], router_LED


def _pad(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad with token 0; return ids and the mask of valid tokens (the mask, not the id, decides)."""
    rows = [torch.tensor(text) for text in texts]
    mask_BT = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), mask_BT


def _assemble(
    checkpoint: Checkpoint, totals: list[LayerTotals], router_LED: torch.Tensor, keep: bool, settings: dict[str, Any]
) -> ExpertProfile:
    def stack(name: str) -> np.ndarray:
        return torch.stack([getattr(layer, name) for layer in totals]).numpy()

    def tokens(name: str) -> np.ndarray:
        joined = torch.stack([torch.cat(getattr(layer, name)) for layer in totals], dim=1).numpy()
        return joined if keep else joined[:0]

    load_LE, gate_LE = stack("load_E"), stack("gate_E")
    context_LED = np.divide(stack("context_ED"), gate_LE[..., None], where=gate_LE[..., None] > 0,
                            out=np.zeros(router_LED.shape))  # fmt: skip
    return ExpertProfile(
        checkpoint.fingerprint, checkpoint.family.model_type, checkpoint.moe_layers,
        n_tokens=int(load_LE[0].sum()) // checkpoint.top_k, top_k=checkpoint.top_k,
        n_group=checkpoint.n_group, topk_group=checkpoint.topk_group, min_group=checkpoint.family.min_group,
        load_LE=load_LE, gate_LE=gate_LE, saliency_LE=stack("saliency_E"), cooccur_LEE=stack("cooccur_EE"),
        context_LED=context_LED.astype(np.float32),
        output_norm_LE=(stack("norm_E") / np.maximum(load_LE, 1)).astype(np.float32),
        peak_LE=stack("peak_E").astype(np.float32), router_LED=router_LED.numpy(),
        choices_TLK=tokens("choices"), weights_TLK=tokens("weights"), provenance=provenance(**settings),
    )  # fmt: skip
