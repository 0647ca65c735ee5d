"""Result objects of known content for the tests of figures and report."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd

from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.fidelity import Fidelity
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.stability import Stability
from moeproxy.traces import Trace
from tests.proxy.made_up import made_up
from tests.triage.synthetic import FAULTS, run, runs, scaled

N_LAYERS, N_EXPERTS, N_KEEP = 2, 8, 4


def profile() -> ExpertProfile:
    """Return a profile in which expert 0 is busiest and expert 7 unused."""
    load_LE = np.tile(np.arange(N_EXPERTS)[::-1] * 10, (N_LAYERS, 1)).astype(np.int64)
    none = np.zeros((N_LAYERS, N_EXPERTS), np.float32)
    return made_up(
        n_layers=N_LAYERS,
        n_experts=N_EXPERTS,
        width=6,
        checkpoint_fingerprint="ab12",
        moe_layers=(0, 1),
        n_tokens=140,
        load_LE=load_LE,
        gate_LE=load_LE.astype(float),
        saliency_LE=load_LE.astype(float),
        output_norm_LE=none,
        peak_LE=none,
    )


def plan() -> KeepPlan:
    """Return a plan that keeps experts 0, 2, 4, 6, each standing for itself and the next one."""
    keep = (0, 2, 4, 6)
    label_LE = np.tile(np.repeat(np.arange(N_KEEP), 2), (N_LAYERS, 1))
    weights = (1 / 3, 1 / 3, 1 / 3)
    return KeepPlan("cluster", N_KEEP, {0: keep, 1: keep}, label_LE, weights, 0, "ab12")


def traces() -> list[Trace]:
    """Return recorded runs of the original and two proxies, and live ones of one fault."""
    fault, effect = "quiet_update", FAULTS["quiet_update"]
    live = [
        run(model, 0, n_experts=n, fault=broken, effect=effect if broken else None, source="live")
        for model, n in (("original", 32), ("cluster-16", 16))
        for broken in (None, fault)
    ]
    return [
        *runs("original", 32, FAULTS),
        *runs("cluster-16", 16, FAULTS, scale=0.5),
        *runs("random-16-s0", 16, scaled(FAULTS, 0.2), method="random"),
        *live,
    ]


def costs() -> pd.DataFrame:
    """Return costs of three models; one measure is missing for the last."""
    return pd.DataFrame(
        {
            "model": ["original", "cluster-16", "cluster-8"],
            "params": [1_900_000, 1_100_000, 700_000],
            "nbytes": [7_600_000, 4_400_000, 2_800_000],
            "seconds_per_step": [0.31, 0.22, np.nan],
        }
    )


def accuracy() -> pd.DataFrame:
    """Return accuracies of three ways to choose at two sizes."""
    rows = [
        {"method": method, "n_experts": n, "accuracy": value, "low": value - 0.03, "high": value + 0.03}
        for n, base in ((16, 0.7), (8, 0.5))
        for method, value in (("cluster", base), ("frequency", base + 0.05), ("random", base - 0.2))
    ]
    return pd.DataFrame(rows)


def checkpoint() -> SimpleNamespace:
    """Return what the report reads of a checkpoint."""
    return SimpleNamespace(
        family=SimpleNamespace(model_type="qwen3_moe"),
        n_layers=3,
        moe_layers=(1, 2),
        n_experts=N_EXPERTS,
        top_k=2,
        n_params=1_900_000,
        nbytes=7_600_000,
        fingerprint="ab12",
    )


def stability() -> Stability:
    """Return the agreement of three resamples in two layers."""
    agreement_RL = np.array([[0.2, 1.0], [0.4, 0.8], [0.6, 0.9]])
    low_L, high_L = np.quantile(agreement_RL, [0.05, 0.95], axis=0)
    kept_share_LE = np.tile([1.0, 0.5] * (N_EXPERTS // 2), (N_LAYERS, 1))
    mean_L = agreement_RL.mean(axis=0)
    return Stability(
        "cluster", N_KEEP, (0, 1), "adjusted Rand index", agreement_RL, mean_L, low_L, high_L, kept_share_LE
    )


def fidelity() -> Fidelity:
    """Return a proxy of two layers that is close to its original."""
    return Fidelity(N_KEEP, N_EXPERTS, "cluster", 140, 3.0, 3.5, 0.2, 0.8, (0, 1), (1.0, 0.8), (0.95, 0.9))
