"""ExpertProfile: what a calibration pass says about every expert. Needs no torch, so redrawing is quick."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import html_table
from moeproxy.files import atomic_file

FORMAT = 2


@dataclass(frozen=True)
class ExpertProfile:
    """Per-layer statistics of a calibration pass over T valid tokens (padding excluded).

    Axes: L MoE layers in the order of `moe_layers`, E experts, T tokens, K experts a token, D model width, F folds
    (text number modulo F; blocks of the bootstrap), P projected width (D, or 256 where D is larger), R width of the
    router's rows (D, but for ZAYA, whose router is narrower).

    In two families a slot may choose no expert: a zero expert (LongCat-Flash) or the skip slot (ZAYA). Such a slot
    counts for no expert: it is -1 in `choices_TLK`, with weight 0, and the loads sum to less than T * K. In Llama 4
    the gate multiplies the expert's input, so outputs have it in them (`adapters.GatedInputObserver`). Of JetMoe
    the MLP's experts are described, not those of the attention (`adapters.SortedObserver`).

    Attributes:
        checkpoint_fingerprint: of the checkpoint that was profiled.
        model_type: its family.
        moe_layers: decoder layer numbers of the L axis.
        n_tokens: T.
        top_k: K.
        n_group: number of expert groups or None.
        topk_group: groups a token may use or None.
        min_group: smallest group size the router can score.
        load_LE: int64, tokens routed to each expert; sums to T * K in every layer (less: see above).
        gate_LE: float64, sum of gate weights.
        saliency_LE: float64, sum over routed tokens of gate weight times output L2 norm (REAP, arXiv
            2510.13999).
        cooccur_LEE: int64, tokens that chose both experts; the diagonal is `load_LE`.
        context_LED: float32, gate-weighted mean hidden state routed to each expert; zeros for unused experts.
        output_LED: float32, mean output of the expert before gating; zeros for unused experts.
        output_norm_LE: float32, mean L2 norm of the expert's output before gating; zeros for unused experts.
        peak_LE: float32, largest absolute output activation of the down projection ("super experts", arXiv
            2507.23279).
        router_LED: float32, rows of the router weight.
        choices_TLK: int16, chosen experts of every token, -1 for none (zero length if not kept).
        weights_TLK: float16, their gate weights (zero length if not kept).
        tokens_T: int32, token ids in the same order (zero length if not kept).
        fold_cooccur_FLEE: int32, `cooccur_LEE` by fold; the diagonal is the load.
        fold_gate_FLE: float64, `gate_LE` by fold.
        fold_context_FLEP: float32, gate-weighted *sum* of hidden states by fold, randomly projected to P columns
            where the model is wider than that (`observe.projection`).
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
    output_LED: Float[np.ndarray, "L E D"]
    output_norm_LE: Float[np.ndarray, "L E"]
    peak_LE: Float[np.ndarray, "L E"]
    router_LED: Float[np.ndarray, "L E R"]
    choices_TLK: Int[np.ndarray, "T L K"]
    weights_TLK: Float[np.ndarray, "T L K"]
    tokens_T: Int[np.ndarray, " T"]
    fold_cooccur_FLEE: Int[np.ndarray, "F L E E"]
    fold_gate_FLE: Float[np.ndarray, "F L E"]
    fold_context_FLEP: Float[np.ndarray, "F L E P"]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_experts(self) -> int:
        """Experts a layer (E)."""
        return self.load_LE.shape[1]

    def save(self, path: str | Path) -> Path:
        """Write one `.npz` file, complete or not at all; return its path.

        Raises:
            ProfileError: another suffix, or the file cannot be written.
        """
        target = Path(path)
        if target.suffix != ".npz":
            found = f"a profile is saved as .npz, not '{target.suffix}'"
            raise ProfileError(found, remedy="name the file NAME.npz", where=path)
        facts = {name: getattr(self, name) for name in _FACTS} | {"format": FORMAT}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        try:
            with atomic_file(target) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, facts=np.array(json.dumps(facts)), **arrays)
        except OSError as error:
            found = f"the profile cannot be written ({error.strerror or error})"
            remedy = "choose a path you may write to, with space left"
            raise ProfileError(found, remedy=remedy, where=target) from error
        return target

    @classmethod
    def load(cls, path: str | Path) -> ExpertProfile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileError: the file is missing, cut off, damaged, no profile, or of another format version.
        """
        try:
            # Opened here: np.load leaves a broken file open.
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                if facts.pop("format", None) != FORMAT:
                    raise _unreadable(path, "the profile has another format version")
                arrays = {name: stored[name] for name in _ARRAYS}
            facts["moe_layers"] = tuple(facts["moe_layers"])
            return cls(**facts, **arrays)
        except FileNotFoundError as error:
            raise _unreadable(path, "there is no such file") from error
        except ProfileError:
            raise
        except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error, zipfile.BadZipFile) as error:
            raise _unreadable(path, "the file is cut off, damaged or no profile") from error

    def __repr__(self) -> str:
        size = f"{len(self.moe_layers)} layers x {self.n_experts} experts, top-{self.top_k}"
        unused = int((self.load_LE == 0).sum())
        return f"ExpertProfile({self.model_type}, {size}, {self.n_tokens:,} tokens, {unused} never used)"

    def _repr_html_(self) -> str:
        share_LE = self.load_LE / max(self.n_tokens * self.top_k, 1)
        rows = {
            "model type": self.model_type,
            "layers with experts": len(self.moe_layers),
            "experts per layer": self.n_experts,
            "experts per token": self.top_k,
            "calibration tokens": f"{self.n_tokens:,}",
            "never used": int((self.load_LE == 0).sum()),
            "largest share of a layer": f"{share_LE.max():.1%}",
            "checkpoint": self.checkpoint_fingerprint[:12],
        }
        return html_table("Expert profile", rows)


_ARRAYS = tuple(item.name for item in fields(ExpertProfile) if re.search("_[FLTEKDP]+$", item.name))
_FACTS = tuple(item.name for item in fields(ExpertProfile) if item.name not in _ARRAYS)


def _unreadable(path: str | Path, found: str) -> ProfileError:
    return ProfileError(
        found,
        expected=f"a profile of format {FORMAT} written by ExpertProfile.save",
        remedy="run moeproxy.profile again and save the result",
        where=path,
    )
