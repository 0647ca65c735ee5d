"""Synthetic runs of known answer: planted responses on seeded noise, models of different scale."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from moeproxy.traces import SIGNALS, RunInfo, Trace

ONSET, STEPS = 20, 60
CALIBRATION, SCORED = (10, 11, 12), (0, 1, 2)
LAYERS = 2

FAULTS: dict[str, dict[str, float]] = {
    "quiet_update": {"update_norm": -12, "grad_norm": 4, "reward_mean": -6, "kl": -9, "entropy": 8},
    "wrong_logp": {
        "logprob_diff_mean": 15,
        "logprob_diff_max": 12,
        "clip_fraction_high": 8,
        "kl": 5,
        "entropy": -4,
    },
}
"""Planted response of each fault by signal, in units of the step noise."""


def noise(*key: object) -> np.random.Generator:
    """Return a generator that depends on the key only."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def columns() -> list[str]:
    """Return every column of a synthetic run."""
    plain = [name for name, signal in SIGNALS.items() if not signal.per_layer]
    layered = [name for name, signal in SIGNALS.items() if signal.per_layer]
    return plain + [f"{name}/{layer}" for name in layered for layer in range(LAYERS)]


def run(
    model: str,
    seed: int,
    *,
    method: str = "",
    n_experts: int = 16,
    fault: str | None = None,
    effect: Mapping[str, float] | None = None,
    scale: float = 1.0,
    drift: float = 0.5,
    source: str = "recorded",
    n_steps: int = STEPS,
) -> Trace:
    """Return one run; a fault adds `effect` (in step noises, ramped over five steps) after the onset.

    Before the onset the runs of one seed are the same; after it the faulty run has noise of its own.
    """
    effect = effect or {}
    step = np.arange(n_steps)
    ramp = np.clip((step - ONSET + 1) / 5, 0, 1)
    data = {}
    for column in columns():
        healthy, name = noise(model, seed, column), column.partition("/")[0]
        moves = wobble(healthy, n_steps, drift)
        if fault is not None:
            other = wobble(noise(model, seed, column, fault), n_steps, drift)
            moves = np.where(step < ONSET, moves, other) + effect.get(name, 0.0) * ramp
        data[column] = level(name, moves, scale)
    info = RunInfo(
        model=model,
        method=method or model.partition("-")[0],
        n_experts=n_experts,
        seed=seed,
        fault=fault,
        strength=1.0 if fault else 0.0,
        onset=ONSET if fault else None,
        checkpoint_fingerprint=f"print-of-{model}",
        source=source,
    )  # pyright: ignore
    return Trace(pd.DataFrame(data, index=step), None, info)


def runs(
    model: str,
    n_experts: int,
    effects: Mapping[str, Mapping[str, float]],
    *,
    method: str = "",
    scale: float = 1.0,
    seeds: Sequence[int] = SCORED,
    calibration: Sequence[int] = CALIBRATION,
) -> list[Trace]:
    """Return healthy runs of all seeds and faulty ones of the scored seeds."""
    common = {"method": method, "n_experts": n_experts, "scale": scale}
    healthy = [run(model, seed, **common) for seed in (*calibration, *seeds)]  # pyright: ignore
    broken = [
        run(model, seed, fault=fault, effect=effect, **common)  # pyright: ignore
        for fault, effect in effects.items()
        for seed in seeds
    ]
    return healthy + broken


def scaled(effects: Mapping[str, Mapping[str, float]], factor: float) -> dict[str, dict[str, float]]:
    """Return effects multiplied by a factor."""
    return {fault: {name: factor * value for name, value in effect.items()} for fault, effect in effects.items()}


def wobble(rng: np.random.Generator, n_steps: int, drift: float) -> np.ndarray:
    """Return step noise of size 1 on a slow drift (S,)."""
    walk = np.cumsum(rng.normal(size=n_steps)) / np.sqrt(n_steps)
    return rng.normal(size=n_steps) + drift * walk


def level(name: str, moves: np.ndarray, scale: float) -> np.ndarray:
    """Return a signal of plausible size that moves by `moves` step noises on its scale."""
    signal = SIGNALS[name]
    if signal.scale == "log":
        return scale * max(1.0, 1e4 * signal.resolution) * np.exp(0.1 * moves)
    if signal.scale == "logit":
        return 1 / (1 + np.exp(-(4 + 0.1 * moves)))
    return scale * (0.5 + 0.02 * moves)
