"""Synthetic benchmark of known answer for the fidelity study: planted responses, onsets that differ from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from moeproxy.traces import RunInfo, Trace
from moeproxy.triage.study_protocol import Protocol
from tests.triage.synthetic import columns, level, noise, wobble

STEPS = 60
SEEDS = (0, 1, 2)
CALIBRATION = tuple(range(100, 116))
PROTOCOL = replace(Protocol(), resamples=200, spread_onsets=(10, 20, 30))

FAULTS: dict[str, dict[str, float]] = {
    "update_freeze": {"update_norm": -20, "reward_mean": -9, "entropy": 12},
    "reward_spike": {"reward_mean": 14, "reward_std": 10, "grad_norm": 8},
    "stale_rollout": {"logprob_diff_mean": 15, "logprob_diff_max": 12, "kl": 8, "clip_fraction_high": 9},
    "router_frozen": {"grad_norm_router": -15, "router_max_violation": 10, "router_load_entropy": -12},
    "entropy_collapse": {"entropy": -14, "kl": 9, "grad_norm": -8},
    "response_too_long": {"response_length": 14, "reward_mean": -8, "reward_std": -7},
}
"""Planted response of each fault by signal, in units of the step noise."""

Effects = Mapping[str, Mapping[str, float]]


def onset_of(fault: str, seed: int) -> int:
    """Return an onset from 10 to 30 that is equal on all models."""
    return int(noise("onset", fault, seed).integers(10, 31))


def run(
    model: str,
    seed: int,
    *,
    fault: str | None = None,
    effect: Mapping[str, float] | None = None,
    strength: float = 1.0,
    onset: int | None = None,
    scale: float = 1.0,
    method: str = "",
    with_table: bool = True,
    config: Mapping[str, float] | None = None,
) -> Trace:
    """Return one run. From the onset on a broken run has noise of its own, and `effect` from the first step on."""
    start = onset if onset is not None else onset_of(fault or "", seed)
    step = np.arange(STEPS)
    data = {}
    for column in columns():
        moves = wobble(noise(model, seed, column, str(config)), STEPS, 0.5)
        if fault is not None:
            other = wobble(noise(model, seed, column, fault, strength), STEPS, 0.5)
            moves = np.where(step < start, moves, other + (effect or {}).get(column.partition("/")[0], 0.0) * strength)
        data[column] = level(column.partition("/")[0], moves, scale)
    info = RunInfo(
        model=model,
        method=method or model.partition("-")[0],
        n_experts=32 if model == "original" else 16,
        seed=seed,
        fault=fault,
        strength=strength if fault else 0.0,
        onset=start if fault else None,
        checkpoint_fingerprint=f"print-of-{model}",
        source="recorded",
        config=dict(config or {}),
    )
    table = trajectories(model, seed, fault or "") if with_table else None
    return Trace(pd.DataFrame(data, index=pd.Index(step)), table, info)


def trajectories(model: str, seed: int, fault: str) -> pd.DataFrame:
    """Return 60 steps of 2 prompts x 4 samples whose advantages are the group-centred rewards."""
    rng = noise(model, seed, fault, "trajectories")
    reward_SPG = rng.integers(0, 2, (STEPS, 2, 4)).astype(float)
    advantage_SPG = reward_SPG - reward_SPG.mean(2, keepdims=True)
    shape = (STEPS, 2, 4)
    return pd.DataFrame(
        {
            "step": np.repeat(np.arange(STEPS), 8),
            "prompt": np.broadcast_to(np.arange(2)[:, None], shape).ravel(),
            "reward": reward_SPG.ravel(),
            "length": rng.integers(2, 6, shape).ravel(),
            "repetition_ratio": rng.random(shape).ravel() / 10,
            "advantage": advantage_SPG.ravel(),
        }
    )


def runs(
    model: str,
    effects: Effects,
    *,
    scale: float = 1.0,
    method: str = "",
    strengths: Sequence[float] = (1.0,),
    with_table: bool = True,
) -> list[Trace]:
    """Return healthy runs of all seeds and broken ones of the scored seeds."""
    healthy = [run(model, seed, scale=scale, method=method, with_table=with_table) for seed in (*SEEDS, *CALIBRATION)]
    broken = [
        run(
            model,
            seed,
            fault=fault,
            effect=effect,
            strength=strength,
            scale=scale,
            method=method,
            with_table=with_table,
        )
        for fault, effect in effects.items()
        for strength in strengths
        for seed in SEEDS
    ]
    return healthy + broken


def permuted(effects: Effects) -> dict[str, Mapping[str, float]]:
    """Return the effects with each fault showing what the next one should."""
    names = list(effects)
    return {name: effects[names[(i + 1) % len(names)]] for i, name in enumerate(names)}


def unrelated(effects: Effects) -> dict[str, dict[str, float]]:
    """Return effects on the same number of signals, drawn at random for each fault."""
    names = [column for column in dict.fromkeys(c.partition("/")[0] for c in columns()) if column != "seconds_per_step"]
    drawn = {}
    for fault, effect in effects.items():
        rng = noise("unrelated", fault)
        chosen = rng.choice(names, len(effect), replace=False)
        drawn[fault] = {str(name): float(rng.choice([-12, 12])) for name in chosen}
    return drawn
