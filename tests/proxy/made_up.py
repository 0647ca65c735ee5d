"""Profiles and plans with a known answer, made without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.plan import KeepPlan


def plan_for(checkpoint: Checkpoint, n_keep: int, seed: int = 0) -> KeepPlan:
    """A random plan with another choice in each layer, without a profile."""
    rng = np.random.default_rng(seed)
    groups = np.array_split(np.arange(checkpoint.n_experts), checkpoint.n_group or 1)
    keep = {}
    for layer in checkpoint.moe_layers:
        ids = [rng.choice(group, n_keep // len(groups), replace=False) for group in groups]
        keep[layer] = tuple(sorted(int(i) for i in np.concatenate(ids)))
    label_LE = np.full((len(keep), checkpoint.n_experts), -1)
    return KeepPlan("random", n_keep, keep, label_LE, None, seed, checkpoint.fingerprint)


def merging_plan_for(checkpoint: Checkpoint, n_keep: int, seed: int = 0) -> KeepPlan:
    """`plan_for` with every dropped expert in the cluster of a kept one, merged with random shares."""
    plan, rng = plan_for(checkpoint, n_keep, seed), np.random.default_rng(seed)
    label_LE = rng.integers(0, n_keep, plan.label_LE.shape)
    for row, layer in enumerate(sorted(plan.keep)):
        label_LE[row, list(plan.keep[layer])] = np.arange(n_keep)
    share_LE = rng.uniform(0.1, 1, label_LE.shape)
    for share_E, label_E in zip(share_LE, label_LE, strict=True):
        share_E /= np.bincount(label_E, share_E)[label_E]
    return dataclasses.replace(plan, method="merge", label_LE=label_LE, merge_LE=share_LE)


def made_up(
    *,
    n_layers: int = 2,
    n_experts: int = 12,
    width: int = 16,
    n_group: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> ExpertProfile:
    """A random profile; `changes` replace fields."""
    rng = np.random.default_rng(seed)
    load_LE = rng.permuted(np.tile(np.arange(5, 5 + n_experts), (n_layers, 1)), axis=1).astype(np.int64)
    pairs_LEE = rng.integers(1, 9, (n_layers, n_experts, n_experts))
    fields: dict[str, Any] = {
        "checkpoint_fingerprint": "f" * 64,
        "model_type": "qwen3_moe",
        "moe_layers": tuple(range(1, n_layers + 1)),
        "n_tokens": int(load_LE[0].sum()) // 2,
        "top_k": 2,
        "n_group": n_group,
        "topk_group": 2 if n_group else None,
        "min_group": 2 if n_group else 1,
        "load_LE": load_LE,
        "gate_LE": load_LE * rng.uniform(0.2, 0.8, load_LE.shape),
        "saliency_LE": load_LE * rng.uniform(1, 2, load_LE.shape),
        "cooccur_LEE": pairs_LEE + pairs_LEE.transpose(0, 2, 1),
        "context_LED": rng.normal(size=(n_layers, n_experts, width)).astype(np.float32),
        "output_LED": rng.normal(size=(n_layers, n_experts, width)).astype(np.float32),
        "output_norm_LE": rng.uniform(1, 2, load_LE.shape).astype(np.float32),
        "peak_LE": rng.uniform(1, 2, load_LE.shape).astype(np.float32),
        "router_LED": rng.normal(size=(n_layers, n_experts, width)).astype(np.float32),
        "choices_TLK": np.zeros((0, n_layers, 2), np.int16),
        "weights_TLK": np.zeros((0, n_layers, 2), np.float16),
        "tokens_T": np.zeros(0, np.int32),
        "fold_cooccur_FLEE": np.zeros((0, n_layers, n_experts, n_experts), np.int32),
        "fold_gate_FLE": np.zeros((0, n_layers, n_experts)),
        "fold_context_FLEP": np.zeros((0, n_layers, n_experts, width), np.float32),
    }
    return ExpertProfile(**(fields | changes))


def planted(n_clusters: int, size: int, *, noise: float = 0.05, n_layers: int = 2, seed: int = 0) -> tuple[Any, Any]:
    """A profile whose experts form clusters in all three views, and the cluster of every expert (L, E)."""
    rng = np.random.default_rng(seed)
    n_experts = n_clusters * size
    truth_LE = rng.permuted(np.tile(np.arange(n_clusters).repeat(size), (n_layers, 1)), axis=1)

    def vectors(width: int) -> np.ndarray:
        centre_LCD = rng.normal(size=(n_layers, n_clusters, width))
        chosen_LED = np.take_along_axis(centre_LCD, truth_LE[..., None], axis=1)
        return (chosen_LED + noise * rng.normal(size=chosen_LED.shape)).astype(np.float32)

    # Members of a cluster are chosen together with the same partners.
    habit_LED = np.abs(vectors(n_experts))
    cooccur_LEE = np.rint(100 * habit_LED @ habit_LED.transpose(0, 2, 1)).astype(np.int64)
    profile = made_up(n_layers=n_layers, n_experts=n_experts, seed=seed)
    changes = {"router_LED": vectors(24), "context_LED": vectors(24), "output_LED": vectors(24)}
    changes |= {"cooccur_LEE": cooccur_LEE}
    return dataclasses.replace(profile, **changes), truth_LE
