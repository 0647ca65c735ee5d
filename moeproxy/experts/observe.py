"""Hooks that watch the experts module during a forward pass and add up what it did, padding left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

PROJECTED_WIDTH = 256


@dataclass
class Batch:
    """The batch in flight, shared by the observers of all layers (T tokens, padding included).

    Attributes:
        valid_T: which tokens are no padding.
        fold_T: fold of the text that each token belongs to.
    """

    valid_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    fold_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def show(self, mask_BT: Tensor, fold_B: Tensor) -> None:
        """Say which batch comes next: its mask of valid tokens and the fold of each text."""
        self.valid_T = mask_BT.reshape(-1)
        self.fold_T = fold_B.unsqueeze(1).expand_as(mask_BT).reshape(-1)


@lru_cache(maxsize=8)
def projection(width: int) -> Tensor | None:
    """Seeded random projection (D, P) for the folds' contexts of wide models; None where P would be D.

    Gaussian with variance 1 / P, so that inner products are kept in the mean (Johnson and Lindenstrauss).
    """
    if width <= PROJECTED_WIDTH:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(width, PROJECTED_WIDTH, generator=generator) / PROJECTED_WIDTH**0.5


@dataclass
class LayerTotals:
    """Running sums of one MoE layer over all valid tokens (E experts, D width, F folds, P projected width)."""

    load_E: Tensor
    gate_E: Tensor
    saliency_E: Tensor
    norm_E: Tensor
    peak_E: Tensor
    output_ED: Tensor
    context_ED: Tensor
    fold_gate_FE: Tensor
    fold_cooccur_FEE: Tensor
    fold_context_FEP: Tensor
    choices: list[Tensor]
    weights: list[Tensor]
    keep_choices: bool

    @classmethod
    def zeros(cls, n_experts: int, width: int, top_k: int, keep_choices: bool, n_folds: int = 1) -> LayerTotals:
        """Sums before the first token, in float64 (counts in int64)."""
        one = torch.zeros(n_experts, dtype=torch.float64)
        wide = torch.zeros(n_experts, width, dtype=torch.float64)
        narrow = torch.zeros(n_folds, n_experts, min(width, PROJECTED_WIDTH), dtype=torch.float64)
        return cls(
            load_E=torch.zeros(n_experts, dtype=torch.int64),
            gate_E=one.clone(),
            saliency_E=one.clone(),
            norm_E=one.clone(),
            peak_E=one.clone(),
            output_ED=wide.clone(),
            context_ED=wide.clone(),
            fold_gate_FE=torch.zeros(n_folds, n_experts, dtype=torch.float64),
            fold_cooccur_FEE=torch.zeros(n_folds, n_experts, n_experts, dtype=torch.int64),
            fold_context_FEP=narrow,
            choices=[torch.zeros(0, top_k, dtype=torch.int16)],
            weights=[torch.zeros(0, top_k, dtype=torch.float16)],
            keep_choices=keep_choices,
        )

    @property
    def cooccur_EE(self) -> Tensor:
        """Tokens that chose both experts, over all folds."""
        return self.fold_cooccur_FEE.sum(dim=0)

    def add(
        self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, output_TKD: Tensor, fold_T: Tensor | None = None
    ) -> None:
        """Add valid tokens: hidden states, chosen experts, gate weights, outputs before gating, folds (default 0)."""
        n_experts = len(self.load_E)
        flat_S, gate_S = index_TK.flatten(), weight_TK.flatten().double()
        outputs_SD = output_TKD.flatten(0, 1).float()
        norm_S = outputs_SD.norm(dim=-1).double()
        peak_S = outputs_SD.abs().amax(dim=-1).double()
        self.load_E += torch.bincount(flat_S, minlength=n_experts).cpu()
        self.gate_E += torch.bincount(flat_S, gate_S, n_experts).cpu()
        self.norm_E += torch.bincount(flat_S, norm_S, n_experts).cpu()
        self.saliency_E += torch.bincount(flat_S, gate_S * norm_S, n_experts).cpu()
        self.peak_E.scatter_reduce_(0, flat_S.cpu(), peak_S.cpu(), "amax")
        sums_ED = torch.zeros(n_experts, outputs_SD.shape[1], device=flat_S.device)
        self.output_ED += sums_ED.index_add_(0, flat_S, outputs_SD).cpu().double()
        gate_TE = torch.zeros(len(index_TK), n_experts, device=index_TK.device).scatter_(1, index_TK, weight_TK.float())
        self.context_ED += (gate_TE.T @ hidden_TD.float()).cpu().double()
        self._add_folds(hidden_TD, index_TK, gate_TE, fold_T if fold_T is not None else torch.zeros(len(index_TK)))
        if self.keep_choices:
            self.choices.append(index_TK.to(torch.int16).cpu())
            self.weights.append(weight_TK.to(torch.float16).cpu())

    def _add_folds(self, hidden_TD: Tensor, index_TK: Tensor, gate_TE: Tensor, fold_T: Tensor) -> None:
        # float32 counts are exact below 2**24 tokens a batch, far above any batch.
        chosen_TE = torch.zeros_like(gate_TE).scatter_(1, index_TK, 1.0)
        matrix_DP = projection(hidden_TD.shape[1])
        narrow_TP = hidden_TD.float() if matrix_DP is None else hidden_TD.float() @ matrix_DP.to(hidden_TD.device)
        for fold in fold_T.unique().long().tolist():
            mine_T = (fold_T == fold).to(index_TK.device)
            chosen, gate = chosen_TE[mine_T], gate_TE[mine_T]
            self.fold_cooccur_FEE[fold] += (chosen.T @ chosen).cpu().long()
            self.fold_gate_FE[fold] += gate.sum(dim=0).cpu().double()
            self.fold_context_FEP[fold] += (gate.T @ narrow_TP[mine_T]).cpu().double()


class ExpertsObserver:
    """Forward hooks on one experts module that let it compute each expert's own output, and record it.

    The module is called with every (token, expert) pair as a token of its own with gate weight 1, so its
    output is the experts' outputs before gating; the hook then applies the gate weights and sums over k as
    the module would. The routing is the model's own, and nothing is computed twice.
    """

    def __init__(self, totals: LayerTotals, batch: Batch) -> None:
        self.totals = totals
        self._batch = batch
        self._arguments: tuple[Tensor, Tensor, Tensor] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the arguments by one pair a row."""
        hidden_TD, index_TK, weight_TK = _arguments(args, kwargs)
        self._arguments = (hidden_TD, index_TK, weight_TK)
        pairs_SD = hidden_TD.repeat_interleave(index_TK.shape[1], dim=0)
        return (pairs_SD, index_TK.reshape(-1, 1), torch.ones_like(weight_TK).reshape(-1, 1)), {}

    def after(self, module: nn.Module, args: Any, kwargs: Any, output_SD: Tensor) -> Tensor:
        """Record the experts' outputs and return their gated sum."""
        if self._arguments is None:  # cannot happen: `before` runs first
            return output_SD
        hidden_TD, index_TK, weight_TK = self._arguments
        self._arguments = None
        output_TKD = output_SD.view(*index_TK.shape, -1)
        valid_T = self._batch.valid_T.to(index_TK.device)
        fold_T = self._batch.fold_T[self._batch.valid_T]
        self.totals.add(hidden_TD[valid_T], index_TK[valid_T], weight_TK[valid_T], output_TKD[valid_T], fold_T)
        return (output_TKD * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    names = ("hidden_states", "top_k_index", "top_k_weights")
    values = [*args, *(kwargs[name] for name in names[len(args) :])]
    return values[0], values[1], values[2]


@contextmanager
def observed(modules: dict[int, nn.Module], totals: dict[int, LayerTotals], batch: Batch) -> Iterator[None]:
    """Hook the experts modules (by layer) for the duration of the block; the hooks are always removed."""
    handles = []
    try:
        for layer, module in modules.items():
            observer = ExpertsObserver(totals[layer], batch)
            handles.append(module.register_forward_pre_hook(observer.before, with_kwargs=True))
            handles.append(module.register_forward_hook(observer.after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
