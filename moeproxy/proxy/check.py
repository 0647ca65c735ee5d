"""Prune a model in memory, and verify a proxy on disk against it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import Family, Sliced
from moeproxy.experts.load import load_model
from moeproxy.proxy.plan import KeepPlan

# Attributes of modules that hold the number of experts; all must follow, or the auxiliary loss crashes.
_COUNT_ATTRIBUTES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class CheckReport:
    """Comparison of a reloaded proxy with the original pruned in memory.

    Attributes:
        max_difference: largest absolute difference of logits.
        tolerance: the largest allowed.
        n_logits: number of logits compared.
        logit_spread: standard deviation of the logits, to read the difference against.
    """

    max_difference: float
    tolerance: float
    n_logits: int
    logit_spread: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within tolerance (False for NaN)."""
        return self.max_difference <= self.tolerance

    @property
    def verdict(self) -> str:
        """The result in words."""
        word = "reloads equal" if self.passed else "DIFFERS"
        return f"{word} (largest logit difference {self.max_difference:.1e}, allowed {self.tolerance:.0e})"

    def __repr__(self) -> str:
        return f"CheckReport({self.verdict}, {self.n_logits:,} logits)"


def prune_in_memory(
    model: nn.Module, plan: KeepPlan, family: Family, tails: dict[str, int] | None = None
) -> Any:
    """Return a copy of a loaded model with only the planned experts; `model` is not changed.

    Args:
        model: a transformers causal language model of the family.
        plan: experts to keep.
        family: its row of the table.
        tails: rows after the experts' to keep, by sliced tensor name, where they differ from the table's
            numbers.
    """
    pruned = copy.deepcopy(model)
    n_experts = plan.label_LE.shape[1]
    for layer, keep in plan.keep.items():
        block = pruned.get_submodule(family.block_in_memory(layer))
        for rule in family.in_memory:
            tail = (tails or {}).get(rule.name, rule.tail if isinstance(rule.tail, int) else 0)
            _slice(block, rule, keep, n_experts, tail)
    for module in pruned.modules():
        _recount(module, n_experts, plan.n_keep)
    _recount_config(pruned.config, family, plan.n_keep)
    return pruned


def _slice(block: nn.Module, rule: Sliced, keep: tuple[int, ...], n_experts: int, tail: int) -> None:
    path, _, name = rule.name.rpartition(".")
    owner = block.get_submodule(path)
    value = getattr(owner, name)
    size = value.shape[rule.axis]
    per_expert = (size - tail) // n_experts
    rows = [e * per_expert + r for e in keep for r in range(per_expert)] + list(range(size - tail, size))
    kept = value.detach().index_select(rule.axis, torch.tensor(rows, device=value.device))
    if name in owner._parameters:
        setattr(owner, name, nn.Parameter(kept, requires_grad=value.requires_grad))
    else:
        owner._buffers[name] = kept


def _recount(module: nn.Module, old: int, new: int) -> None:
    for name in _COUNT_ATTRIBUTES:
        if vars(module).get(name) == old:
            setattr(module, name, new)


def _recount_config(config: Any, family: Family, n_keep: int) -> None:
    part = getattr(config, family.config_path) if family.config_path else config
    for key in family.count_keys:
        if hasattr(part, key):
            setattr(part, key, n_keep)


def check_paths(source: Path, proxy: Path, plan: KeepPlan, *, seed: int, tolerance: float) -> CheckReport:
    """Compare the logits of the proxy directory with those of the source pruned in memory.

    Raises:
        ProxyError: they differ or are not finite.
    """
    original, written = Checkpoint.open(source), Checkpoint.open(proxy)
    tails = {rule.name: original.tail(rule) for rule in original.family.in_memory}
    pruned = prune_in_memory(load_model(original), plan, original.family, tails)
    expected = _logits(pruned, seed)
    del pruned
    found = _logits(load_model(written), seed)
    difference = float((found - expected).abs().max())
    report = CheckReport(difference, tolerance, found.numel(), float(expected.std()))
    if not report.passed:
        raise ProxyError(
            f"the written proxy {report.verdict}",
            expected="the logits of the original pruned in memory",
            remedy="do not use it; compare the checkpoint's names with moeproxy/experts/families.py",
            where=proxy,
        )
    return report


def _logits(model: Any, seed: int) -> torch.Tensor:
    """Logits of random token ids (4 sequences of 64), float32 (B, T, V)."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, model.get_input_embeddings().num_embeddings, (4, 64), generator=generator)
    with torch.inference_mode():
        return model(input_ids=ids_BT, use_cache=False).logits.float()
