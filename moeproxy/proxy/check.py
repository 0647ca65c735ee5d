"""Prune a model in memory, and verify a proxy on disk against it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import Family, Sliced
from moeproxy.experts.load import load_model
from moeproxy.proxy.merge import Member, check_mergeable, merge_rows, stored_dtype
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.remap import remap_ids

# Attributes of modules that hold the number of experts (with or without the rows after them); all must follow, or
# the auxiliary loss crashes.
_COUNT_ATTRIBUTES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "total_experts",
    "n_total_experts",
    "num_router_classes",
)


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


def prune_in_memory(model: nn.Module, plan: KeepPlan, family: Family, *, stored: torch.dtype | None = None) -> Any:
    """Return a copy of a loaded model with only the planned experts, merged if planned; `model` is not changed.

    Args:
        model: a transformers causal language model of the family.
        plan: experts to keep.
        family: its row of the table.
        stored: dtype that merged weights are rounded to, as when a proxy is written; the model's own by default.
    """
    pruned = copy.deepcopy(model)
    n_experts = plan.label_LE.shape[1]
    tails = {rule: _tail(rule, pruned.config) for rule in family.in_memory}
    for layer, keep in plan.keep.items():
        members = plan.members_of(layer)
        for rule in family.in_memory:
            mixed = members if rule in family.memory_stacked else None
            _slice(_owner(pruned, family, layer, rule.name), rule, keep, n_experts, tails[rule], mixed, stored)
        for name in family.id_tables_in_memory:
            _remap(_owner(pruned, family, layer, name), keep, plan.label_of(layer))
    counts = {n_experts + tail: plan.n_keep + tail for tail in {0, *tails.values()}}
    for module in pruned.modules():
        _recount(module, counts)
    _recount_config(pruned.config, family, plan.n_keep)
    return pruned


def _config_part(config: Any, key: str) -> tuple[Any, str]:
    """The config object that holds a dotted key, and its last name; a text model has no `text_config` any more."""
    *parts, last = key.split(".")
    for part in parts:
        config = getattr(config, part, config)
    return config, last


def _tail(rule: Sliced, config: Any) -> int:
    if isinstance(rule.tail, int):
        return rule.tail
    part, name = _config_part(config, rule.tail)
    return int(getattr(part, name, 0) or 0)


def _owner(model: nn.Module, family: Family, layer: int, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor of a layer (relative to the block or absolute), and its name there."""
    full = name.format(layer=layer) if "{layer}" in name else f"{family.block_in_memory(layer)}.{name}"
    path, _, last = full.rpartition(".")
    return model.get_submodule(path), last


def _slice(
    found: tuple[nn.Module, str],
    rule: Sliced,
    keep: tuple[int, ...],
    n_experts: int,
    tail: int,
    members: list[list[Member]] | None,
    stored: torch.dtype | None,
) -> None:
    owner, name = found
    if rule.optional and getattr(owner, name, None) is None:
        return
    value = getattr(owner, name)
    if members:
        kept = merge_rows(value.detach(), rule.axis, members, n_experts, tail, stored)
    else:
        kept = _kept_rows(value.detach(), rule.axis, keep, n_experts, tail)
    if name in owner._parameters:
        setattr(owner, name, nn.Parameter(kept, requires_grad=value.requires_grad))
    else:
        owner._buffers[name] = kept
    if isinstance(owner, nn.Linear) and rule.axis == 0:
        owner.out_features = len(kept)


def _kept_rows(value: torch.Tensor, axis: int, keep: tuple[int, ...], n_experts: int, tail: int) -> torch.Tensor:
    size = value.shape[axis]
    per_expert = (size - tail) // n_experts
    rows = [e * per_expert + r for e in keep for r in range(per_expert)] + list(range(size - tail, size))
    return value.index_select(axis, torch.tensor(rows, device=value.device))


def _remap(found: tuple[nn.Module, str], keep: tuple[int, ...], label_E: np.ndarray) -> None:
    """Renumber a table of expert ids where the layer has one."""
    owner, name = found
    if (value := getattr(owner, name, None)) is not None:
        new = torch.from_numpy(remap_ids(value.detach().cpu().numpy(), keep, label_E)).to(value.device)
        value.data = new


def _recount(module: nn.Module, counts: dict[int, int]) -> None:
    for name in _COUNT_ATTRIBUTES:
        if isinstance(old := vars(module).get(name), int) and old in counts:
            setattr(module, name, counts[old])


def _recount_config(config: Any, family: Family, n_keep: int) -> None:
    for key in family.count_keys:
        part, name = _config_part(config, key)
        if hasattr(part, name):
            setattr(part, name, n_keep)


def check_paths(source: Path, proxy: Path, plan: KeepPlan, *, seed: int, tolerance: float) -> CheckReport:
    """Compare the logits of the proxy directory with those of the source pruned in memory.

    Raises:
        ProxyError: they differ or are not finite.
    """
    original, written = Checkpoint.open(source), Checkpoint.open(proxy)
    stored = None
    if plan.merge_LE is not None:
        check_mergeable(original)
        stored = stored_dtype(original)
    pruned = prune_in_memory(load_model(original), plan, original.family, stored=stored)
    expected = _logits(pruned, seed)
    del pruned
    found = _logits(load_model(written), seed)
    difference = float((found - expected).abs().max())
    report = CheckReport(difference, tolerance, found.numel(), float(expected.std()))
    if not report.passed:
        raise ProxyError(
            f"the written proxy {report.verdict}",
            expected="the logits of the original pruned in memory",
            remedy="do not use it; compare the checkpoint's names with moeproxy/experts/family_rows",
            where=proxy,
        )
    return report


def _logits(model: Any, seed: int) -> torch.Tensor:
    """Logits of random token ids (4 sequences of 64), float32 (B, T, V)."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, model.get_input_embeddings().num_embeddings, (4, 64), generator=generator)
    with torch.inference_mode():
        return model(input_ids=ids_BT, use_cache=False).logits.float()
