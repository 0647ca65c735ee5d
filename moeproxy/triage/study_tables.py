"""From single runs to tables: means with intervals over faults and seeds, paired differences between models.

Axes: F fault, R seed, B bootstrap resample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from moeproxy.triage.study_frames import where
from moeproxy.triage.study_measures import MEASURES
from moeproxy.triage.study_protocol import Protocol
from moeproxy.triage.study_runs import ABSENT, CRASHED, NO_EFFECT

RETRIEVAL = ("top1", "top1_forced", "top3", "reciprocal_rank", "top1_consequences", "direction", "rank")
"""Measures of which proxies and controls are subtracted."""


def interval(values_FR: np.ndarray, protocol: Protocol) -> tuple[float, float, float]:
    """Return the mean over faults of the mean over seeds, and its 95 % bootstrap interval over faults and seeds.

    Faults and seeds are both drawn with replacement; a seed is drawn for all faults together, since runs of one seed
    saw the same prompts. Three seeds give a coarse interval; most of its width comes from the faults.
    """
    middle = float(_means(values_FR[None])[0])
    n_faults, n_seeds = values_FR.shape
    if np.isnan(middle) or n_faults * n_seeds == 1:
        return (middle, np.nan, np.nan)
    rng = np.random.default_rng(protocol.bootstrap_seed)
    fault_BF1 = rng.integers(0, n_faults, (protocol.resamples, n_faults))[:, :, None]
    seed_B1R = rng.integers(0, n_seeds, (protocol.resamples, n_seeds))[:, None, :]
    low, high = np.nanquantile(_means(values_FR[fault_BF1, seed_B1R]), [0.025, 0.975])
    return (middle, float(low), float(high))


def mean(values_FR: np.ndarray) -> float:
    """Return the mean over faults of the mean over seeds; what is undefined is left out."""
    return float(_means(values_FR[None])[0])


def _means(values_BFR: np.ndarray) -> np.ndarray:
    seen_BFR = np.isfinite(values_BFR)
    count_BF = seen_BFR.sum(2)
    mean_BF = np.where(seen_BFR, values_BFR, 0).sum(2) / np.maximum(count_BF, 1)
    faults_B = (count_BF > 0).sum(1)
    return np.where(faults_B > 0, mean_BF.sum(1) / np.maximum(faults_B, 1), np.nan)


def values(cells: pd.DataFrame, measure: str) -> Any:
    """Return one measure of one model and level as faults x seeds."""
    return cells.pivot(index="fault", columns="seed", values=measure)


def _groups(frame: Any, *keys: str) -> list[tuple[tuple[Any, ...], Any]]:
    return [(key, part) for key, part in frame.groupby(list(keys), sort=False)]


def model_table(cells: pd.DataFrame, protocol: Protocol) -> pd.DataFrame:
    """Return every measure of every model and level, with interval, counts of faults and runs, and states of runs."""
    rows = []
    for (_, level), part in _groups(cells, "model", "level"):
        for name in MEASURES:
            middle, low, high = interval(values(part, name).to_numpy(float), protocol)
            rows.append(_named(part) | {"level": level, "measure": name, "mean": middle, "low": low, "high": high})
    return pd.DataFrame(rows)


def _named(part: Any) -> dict[str, Any]:
    status = part["status"]
    counts = {"runs": int((status != ABSENT).sum()), "faults": part.loc[status != ABSENT, "fault"].nunique()}
    states = {"no_effect": int((status == NO_EFFECT).sum()), "crashed": int((status == CRASHED).sum())}
    first = part.iloc[0]
    return {"model": first["model"], "method": first["method"], "n_experts": int(first["n_experts"])} | counts | states


def fault_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the means over the seeds for every model, level and fault, with the answers seed by seed."""
    rows = []
    keys = ["model", "level", "family", "fault"]
    for key, part in _groups(cells, *keys):
        means = {name: mean(part[name].to_numpy(float)[None]) for name in (*MEASURES, "signals", "others")}
        told = {
            "answers": ", ".join(where(part, top1=[0.0, 1.0])["nearest"]),
            "status": ", ".join(dict.fromkeys(part["status"])),
        }
        rows.append(dict(zip(keys, key, strict=True)) | means | told)
    return pd.DataFrame(rows)


def family_table(cells: pd.DataFrame, protocol: Protocol) -> pd.DataFrame:
    """Return top-1 and top-3 of every model, level and family of faults."""
    rows = []
    for (model, level, family), part in _groups(cells, "model", "level", "family"):
        row: dict[str, Any] = {"model": model, "level": level, "family": family, "faults": part["fault"].nunique()}
        for name in ("top1", "top3"):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = interval(values(part, name).to_numpy(float), protocol)
        rows.append(row)
    return pd.DataFrame(rows)


def difference_table(cells: pd.DataFrame, controls: Sequence[str], protocol: Protocol) -> pd.DataFrame:
    """Return proxy minus control, fault by fault and seed by seed, with interval and a sign test over faults."""
    rows = []
    proxies = [model for model in dict.fromkeys(cells["model"]) if model not in (*controls, protocol.original)]
    for level in dict.fromkeys(cells["level"]):
        at = {model: part for (model,), part in _groups(where(cells, level=level), "model")}
        pairs = [(proxy, control) for proxy in proxies for control in controls if {proxy, control} <= set(at)]
        for proxy, control in pairs:
            rows += [_difference(at[proxy], at[control], name, protocol) for name in RETRIEVAL]
    return pd.DataFrame(rows)


def _difference(proxy: Any, control: Any, name: str, protocol: Protocol) -> dict[str, Any]:
    gap = values(proxy, name) - values(control, name)
    middle, low, high = interval(gap.to_numpy(float), protocol)
    by_fault = gap.mean(axis=1).dropna()
    better, worse = int((by_fault > 0).sum()), int((by_fault < 0).sum())
    p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    first, second = proxy.iloc[0], control.iloc[0]
    return {
        "proxy": first["model"],
        "control": second["model"],
        "level": first["level"],
        "measure": name,
        "mean": middle,
        "low": low,
        "high": high,
        "better": better,
        "worse": worse,
        "equal": len(by_fault) - better - worse,
        "p_sign": p,
    }
