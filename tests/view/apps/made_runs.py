"""Recorded runs of known answer for the fault panel: a fault adds a constant from its onset on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.lab.settings import GRPOSettings
from moeproxy.places import data_dir
from moeproxy.traces.trace import RunInfo, Trace
from moeproxy.view.apps.recordings import HEALTHY, Recordings

SETTINGS = GRPOSettings(steps=40, prompts=2, samples=2)
FAULTS = ("update_freeze", "kl_sign")
ONSETS = {"update_freeze": {0: 10, 1: 10}, "kl_sign": {0: 12, 1: 20}}
MODELS = ("original", "cluster-16", "random-16")
CALIBRATION = (100, 101, 102, 103)
EFFECT = {"update_freeze": ("update_norm", -0.5), "kl_sign": ("kl", 0.4)}
_LEVEL = {
    "policy_loss": 0.0,
    "grad_norm": 2.0,
    "reward_mean": 0.5,
    "logprob_diff_mean": 0.01,
    "update_norm": 1.0,
    "kl": 0.1,
    "entropy": 1.0,
    "router_load_entropy/0": 0.8,
    "router_load_entropy/1": 0.6,
}


@cache
def _fingerprint() -> str:
    return Checkpoint.open(model_path()).fingerprint


def model_path() -> Path:
    """The shipped model that the made runs pretend to start from."""
    return data_dir() / "models" / "qwen3-moe-tiny"


def run(
    model: str = "original",
    seed: int = 0,
    fault: str | None = None,
    *,
    onset: int = 10,
    steps: int = SETTINGS.steps,
    source: str = "recorded",
    settings: GRPOSettings = SETTINGS,
    **fixed: float,
) -> Trace:
    """Return one run; signals of `fixed` have that value at every step before the onset's effect."""
    step_S = np.arange(1, steps + 1)
    noise = np.random.default_rng([seed, len(model)])
    table = {name: level + 0.01 * noise.standard_normal(SETTINGS.steps)[:steps] for name, level in _LEVEL.items()}
    table |= {name: np.full(steps, value) for name, value in fixed.items()}
    if fault in EFFECT:
        name, effect = EFFECT[fault]
        table[name] = table[name] + effect * (step_S >= onset)
    method, _, count = model.rpartition("-")
    info = RunInfo(
        model=model,
        method=method or model,
        n_experts=int(count) if count.isdigit() else 32,
        seed=seed,
        fault=fault,
        strength=1.0 if fault else 0.0,
        onset=onset if fault else None,
        config=replace(settings, steps=steps).to_dict(),
        checkpoint_fingerprint=_fingerprint() if model == "original" else model,
        source=source,  # pyright: ignore[reportArgumentType]
    )
    return Trace(pd.DataFrame(table, index=step_S), None, info)


@cache
def all_runs() -> tuple[Trace, ...]:
    """Every recorded run: healthy twins and calibration runs, one with another learning rate, and broken ones."""
    traces = [run(model, seed) for model in MODELS for seed in (0, 1, *CALIBRATION)]
    traces.append(run(seed=200, settings=replace(SETTINGS, learning_rate=1.0)))
    broken = [(model, fault, seed) for model in MODELS for fault in FAULTS for seed in (0, 1)]
    return (*traces, *(run(model, seed, fault, onset=ONSETS[fault][seed]) for model, fault, seed in broken))


def recordings(traces: Sequence[Trace] | None = None) -> Recordings:
    """The made runs as the panel takes them."""
    known = all_runs() if traces is None else tuple(traces)
    index = pd.DataFrame([_row(trace) for trace in known])

    def read(model: str, fault: str) -> list[Trace]:
        chosen = [trace for trace in known if trace.provenance.model == model]
        return [trace for trace in chosen if (trace.provenance.fault or HEALTHY) == fault]

    healthy = [trace.provenance for trace in read("original", HEALTHY)]
    return Recordings(index, healthy, read, Path("made"))


def _row(trace: Trace) -> dict[str, Any]:
    info = trace.provenance
    names = ("model", "method", "n_experts", "strength", "seed")
    return {name: getattr(info, name) for name in names} | {"fault": info.fault or HEALTHY, "onset": info.onset or 0}
