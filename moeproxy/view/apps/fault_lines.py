"""Runs as lines: the mean of several seeds, the range of healthy runs, on one axis of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeproxy.traces.trace import Trace
from moeproxy.view.apps.fault_runs import Asked, ModelRuns

_Placed = Sequence[tuple[Trace, int]]
"""Runs, each with the step that becomes 0."""


@dataclass(frozen=True, eq=False)
class Lines:
    """One signal of one model; NaN where there is no finite value.

    Args:
        steps_S: steps, or steps since the onset where onsets differ.
        low_S, high_S: range of all healthy runs.
        healthy_S: mean of the broken runs' healthy twins.
        broken_S: mean of the broken runs.
        ends: index of the last finite value of the broken runs if they went on after it, else None.
    """

    steps_S: np.ndarray
    low_S: np.ndarray
    high_S: np.ndarray
    healthy_S: np.ndarray
    broken_S: np.ndarray
    ends: int | None = None


def lines(asked: Asked, runs: ModelRuns, name: str) -> Lines:
    """Return one signal of one model's runs."""
    shifts = {seed: asked.onsets[seed] if asked.aligned else 0 for seed in asked.seeds}
    broken = [(trace, shifts[seed]) for seed, trace in runs.broken.items()]
    # Without broken runs their twins are drawn all the same: it is what there is.
    twins = [(trace, shifts[seed]) for seed, trace in runs.healthy.items() if seed in runs.broken or not runs.broken]
    band = [(trace, shift) for trace in runs.band for shift in dict.fromkeys(shifts.values())]
    placed = [*broken, *twins, *band]
    if not placed:
        none = np.empty(0)
        return Lines(none, none, none, none, none)
    steps_S = np.unique(np.concatenate([trace.steps.index.to_numpy() - shift for trace, shift in placed]))
    band_RS = np.ma.masked_invalid(_stack(band, name, steps_S))
    low_S, high_S = (np.asarray(part.filled(np.nan)) for part in (band_RS.min(0), band_RS.max(0)))
    healthy_S, broken_S = (_mean(group, name, steps_S) for group in (twins, broken))
    return Lines(steps_S, low_S, high_S, healthy_S, broken_S, _ends(broken, name, steps_S, broken_S))


def signal(trace: Trace, name: str) -> np.ndarray | None:
    """Return a signal by step (S,), the mean over layers for a per-layer one; None when it was not logged."""
    layers = [column for column in trace.signals if column.partition("/")[0] == name]
    return np.mean([trace.values(column) for column in layers], axis=0) if layers else None


def _ends(broken: _Placed, name: str, steps_S: np.ndarray, broken_S: np.ndarray) -> int | None:
    logged = [
        int(trace.steps.index.to_numpy().max()) - shift for trace, shift in broken if signal(trace, name) is not None
    ]
    seen = np.flatnonzero(np.isfinite(broken_S))
    return int(seen[-1]) if seen.size and logged and max(logged) > steps_S[seen[-1]] else None


def _mean(placed: _Placed, name: str, steps_S: np.ndarray) -> np.ndarray:
    values_RS = np.ma.masked_invalid(_stack(placed, name, steps_S))
    return np.asarray(values_RS.mean(0).filled(np.nan))


def _stack(placed: _Placed, name: str, steps_S: np.ndarray) -> np.ndarray:
    """Return a signal of some runs on a common axis (R, S), NaN where there is none."""
    values_RS = np.full((max(len(placed), 1), len(steps_S)), np.nan)
    for row, (trace, shift) in enumerate(placed):
        logged = signal(trace, name)
        if logged is not None:
            values_RS[row, np.searchsorted(steps_S, trace.steps.index.to_numpy() - shift)] = logged
    return values_RS
