"""Hooks that watch the experts module during a forward pass and add up what it did, padding left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeproxy.errors import ProfileError

PROJECTED_WIDTH = 256
NO_EXPERT = -1  # a slot of a token that chose no expert: a zero expert or the skip slot


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

    def add_pairs(self, index_TK: Tensor, weight_TK: Tensor, output_TKD: Tensor, gated: bool = False) -> None:
        """Add what experts did for tokens: chosen experts, gate weights, outputs.

        A slot whose expert is NO_EXPERT counts for none, whatever its weight and output. `gated` says that the gate
        weight is in the outputs already (it multiplied the input), so that saliency does not apply it again.
        """
        n_experts = len(self.load_E)
        # Such slots go to a place after the last expert: picking the others would copy all outputs.
        flat_S = torch.where(index_TK < 0, n_experts, index_TK).flatten()
        gate_S, outputs_SD = weight_TK.flatten().double(), output_TKD.flatten(0, 1).float()
        norm_S = outputs_SD.norm(dim=-1).double()
        # The largest absolute value, without a copy of all outputs.
        peak_S = torch.maximum(outputs_SD.amax(dim=-1), -outputs_SD.amin(dim=-1)).double()

        def total(value_S: Tensor | None) -> Tensor:
            return torch.bincount(flat_S, value_S, n_experts + 1)[:n_experts].cpu()

        self.load_E += total(None)
        self.gate_E += total(gate_S)
        self.norm_E += total(norm_S)
        self.saliency_E += total(norm_S if gated else gate_S * norm_S)
        peak_E = torch.zeros(n_experts + 1, dtype=torch.float64)
        peak_E.scatter_reduce_(0, flat_S.cpu(), peak_S.cpu(), "amax")
        self.peak_E = torch.maximum(self.peak_E, peak_E[:n_experts])
        sums_ED = torch.zeros(n_experts + 1, outputs_SD.shape[1], device=flat_S.device)
        self.output_ED += sums_ED.index_add_(0, flat_S, outputs_SD)[:n_experts].cpu().double()

    def add_tokens(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, fold_T: Tensor) -> None:
        """Add tokens: hidden states, chosen experts, gate weights, folds."""
        weight_TK = weight_TK.masked_fill(index_TK < 0, 0)
        gate_TE = _spread(index_TK, weight_TK.float(), len(self.load_E))
        self.context_ED += (gate_TE.T @ hidden_TD.float()).cpu().double()
        self._add_folds(hidden_TD, index_TK, gate_TE, fold_T)
        if self.keep_choices:
            self.choices.append(index_TK.to(torch.int16).cpu())
            self.weights.append(weight_TK.to(torch.float16).cpu())

    def _add_folds(self, hidden_TD: Tensor, index_TK: Tensor, gate_TE: Tensor, fold_T: Tensor) -> None:
        # float32 counts are exact below 2**24 tokens a batch, far above any batch.
        chosen_TE = _spread(index_TK, (index_TK >= 0).float(), gate_TE.shape[1])
        matrix_DP = projection(hidden_TD.shape[1])
        narrow_TP = hidden_TD.float() if matrix_DP is None else hidden_TD.float() @ matrix_DP.to(hidden_TD.device)
        # Sorted by fold once, so that a fold's tokens are views.
        order_T = fold_T.argsort(stable=True).to(index_TK.device)
        sizes = torch.bincount(fold_T, minlength=len(self.fold_gate_FE)).tolist()
        sorted_ = (value.index_select(0, order_T).split(sizes) for value in (chosen_TE, gate_TE, narrow_TP))
        for fold, (chosen, gate, narrow) in enumerate(zip(*sorted_, strict=True)):
            self.fold_cooccur_FEE[fold] += (chosen.T @ chosen).cpu().long()
            self.fold_gate_FE[fold] += gate.sum(dim=0).cpu().double()
            self.fold_context_FEP[fold] += (gate.T @ narrow).cpu().double()


def _spread(index_TK: Tensor, value_TK: Tensor, n_experts: int) -> Tensor:
    """Values of the chosen experts in a row over all experts (T, E); slots without an expert must hold 0."""
    wide_TE = torch.zeros(len(index_TK), n_experts, device=index_TK.device)
    return wide_TE.scatter_add_(1, index_TK.clamp(min=0), value_TK)


class Observer(ABC):
    """Records what the experts of one MoE block do in `totals`, through hooks on the block's modules."""

    def __init__(self, totals: LayerTotals, batch: Batch) -> None:
        self.totals = totals
        self._batch = batch
        self._routed: tuple[Tensor, ...] | None = None  # what one hook leaves for the next

    @abstractmethod
    def attach(self, block: nn.Module, experts: str) -> list[RemovableHandle]:
        """Hook a MoE block, whose experts module has the path `experts`; return the handles."""

    def taken(self) -> tuple[Tensor, ...]:
        """What the hook before left, forgotten here."""
        routed, self._routed = self._routed, None
        if routed is None:
            raise ProfileError(
                "the experts ran without their router",
                expected="a MoE block that calls its router, then its experts",
                remedy="correct the observer in the family's row (moeproxy/experts/family_rows)",
            )
        return routed

    def record(
        self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor, output_TKD: Tensor, gated: bool = False
    ) -> None:
        """Add the tokens of the batch in flight that are no padding (T with padding) to the totals."""
        valid_T = self._batch.valid_T.to(index_TK.device)
        fold_T = self._batch.fold_T[self._batch.valid_T]
        self.totals.add_pairs(index_TK.masked_fill(~valid_T.unsqueeze(1), NO_EXPERT), weight_TK, output_TKD, gated)
        self.totals.add_tokens(hidden_TD[valid_T], index_TK[valid_T], weight_TK[valid_T], fold_T)


class PairsObserver(Observer):
    """Forward hooks on one experts module that let it compute each expert's own output, and record it.

    The module is called with every (token, expert) pair as a token of its own with gate weight 1, so its
    output is the experts' outputs before gating; the hook then applies the gate weights and sums over k as
    the module would. The routing is the model's own, and nothing is computed twice.
    """

    def attach(self, block: nn.Module, experts: str) -> list[RemovableHandle]:
        """Hook the experts module before and after its forward pass."""
        module = block.get_submodule(experts)
        return [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the arguments by one pair a row."""
        hidden, index_TK, weight_TK = _arguments(args, kwargs)
        self._routed = (hidden, index_TK, weight_TK)
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        pairs_SD = hidden_TD.repeat_interleave(index_TK.shape[1], dim=0)
        return (pairs_SD, *self.slots(module, index_TK.reshape(-1, 1), torch.ones_like(weight_TK).reshape(-1, 1))), {}

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Record the experts' outputs and return their gated sum."""
        hidden, index_TK, weight_TK = self.taken()
        output_TKD = output.view(*index_TK.shape, -1)
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        self.record(hidden_TD, self.chosen(index_TK, weight_TK), weight_TK, output_TKD)
        return (output_TKD * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden.dtype).view(hidden.shape)

    def slots(self, module: Any, index_S1: Tensor, weight_S1: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights to call the module with, one pair a row."""
        return index_S1, weight_S1

    def chosen(self, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Chosen experts (T, K), NO_EXPERT where a slot chose none."""
        return index_TK


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    names = ("hidden_states", "top_k_index", "top_k_weights")
    values = [*args, *(kwargs[name] for name in names[len(args) :])]
    return values[0], values[1], values[2]


@contextmanager
def observed(
    blocks: dict[int, nn.Module],
    totals: dict[int, LayerTotals],
    batch: Batch,
    observer: type[Observer] = PairsObserver,
    experts: str = "experts",
) -> Iterator[None]:
    """Hook the MoE blocks (by layer) for the duration of the block; the hooks are always removed."""
    handles: list[RemovableHandle] = []
    try:
        for layer, module in blocks.items():
            handles.extend(observer(totals[layer], batch).attach(module, experts))
        yield
    finally:
        for handle in handles:
            handle.remove()
