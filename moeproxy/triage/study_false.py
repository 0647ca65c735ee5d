"""False responses: healthy runs against healthy runs, judged like a fault by thresholds that never saw them.

Axes: C healthy run, O onset, X signal, W window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.trace import Trace
from moeproxy.triage.study_protocol import Protocol
from moeproxy.triage.study_scores import Grid, ModelScores
from moeproxy.triage.study_spread import FEWEST, HealthySpread, calibrate, healthy_means, strength


def false_table(models: Mapping[str, ModelScores], grid: Grid) -> pd.DataFrame:
    """Return how often healthy pairs of each model are called a response.

    Each part of the calibration runs is judged by thresholds from the other parts, the healthy runs of the scored
    seeds by thresholds from all of them. Columns: `false_responses` (share of pairs called a response, with an
    interval over runs), `false_entries` (share of signal-windows beyond their threshold), and `other_settings`, the
    share called a response when a healthy run at another learning rate or temperature is held against default ones.
    """
    return pd.DataFrame([_row(scores, grid) for scores in models.values()])


def _row(model: ModelScores, grid: Grid) -> dict[str, Any]:
    runs = model.runs
    calibration_CXS = _values(runs.calibration, grid)
    judged = [*_folds(calibration_CXS, grid)]
    if len(runs.scored_healthy) > 1:
        judged.append(_judge(_values(runs.scored_healthy, grid), None, model.spread, grid))
    called = np.concatenate([part[0] for part in judged]) if judged else np.empty(0)
    entries = np.concatenate([part[1] for part in judged]) if judged else np.empty(0)
    low, high = _over_runs(called, grid.protocol)
    others = np.empty(0)
    if runs.other_healthy:
        others = _judge(_values(runs.other_healthy, grid), calibration_CXS, model.spread, grid)[0]
    return {
        "model": runs.label,
        "calibration_runs": len(runs.calibration),
        "judged_runs": len(called),
        "false_responses": _mean(called),
        "low": low,
        "high": high,
        "false_entries": _mean(entries),
        "run_threshold": model.spread.run_threshold,
        "other_runs": len(runs.other_healthy),
        "other_settings": _mean(others),
    }


def _values(traces: Sequence[Trace], grid: Grid) -> np.ndarray:
    return np.stack([grid.values(trace) for trace in traces])


def _folds(values_CXS: np.ndarray, grid: Grid) -> list[tuple[np.ndarray, np.ndarray]]:
    """Judge each part of the calibration runs by thresholds from the others."""
    part_C = np.arange(len(values_CXS)) % max(1, min(grid.protocol.folds, len(values_CXS) // 2))
    parts = [part_C == fold for fold in np.unique(part_C) if (part_C != fold).sum() >= FEWEST]
    judged = []
    for mine_C in parts:
        spread = calibrate(values_CXS[~mine_C], grid.steps_S, grid.names, grid.protocol)
        judged.append(_judge(values_CXS[mine_C], None, spread, grid))
    return judged


def _judge(
    values_CXS: np.ndarray, against_CXS: np.ndarray | None, spread: HealthySpread, grid: Grid
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each run, the share of pairs called a response and the share of entries beyond the threshold.

    The other side of the pairs is `against_CXS`, or every other run of `values_CXS`.
    """
    protocol = grid.protocol
    mine_OCXW = healthy_means(values_CXS, grid.steps_S, protocol)
    theirs_OCXW = mine_OCXW if against_CXS is None else healthy_means(against_CXS, grid.steps_S, protocol)
    called, entries = [], []
    for c in range(mine_OCXW.shape[1]):
        other = np.delete(theirs_OCXW, c, axis=1) if against_CXS is None else theirs_OCXW
        scores = spread.scores(mine_OCXW[:, c : c + 1], other)
        called.append((strength(scores, protocol.run_entries) > spread.run_threshold).mean())
        entries.append((np.abs(scores[np.isfinite(scores)]) > 1).mean())
    return np.array(called), np.array(entries)


def _over_runs(share_C: np.ndarray, protocol: Protocol) -> tuple[float, float]:
    if len(share_C) < 2:
        return (np.nan, np.nan)
    rng = np.random.default_rng(protocol.bootstrap_seed)
    drawn = share_C[rng.integers(0, len(share_C), (protocol.resamples, len(share_C)))]
    low, high = np.quantile(drawn.mean(1), [0.025, 0.975])
    return (float(low), float(high))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
