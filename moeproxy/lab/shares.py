"""Put together what the processes of one run recorded of a step, each of its own share of the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, float]
Columns = dict[str, list[float]]


def gathered(row: Row, trajectories: Columns, n_processes: int) -> tuple[Row, Columns]:
    """Return a step's signals and trajectories over all processes; a single one's are returned as they are."""
    if n_processes == 1:
        return row, trajectories
    from accelerate.utils import gather_object

    parts: list[Any] = gather_object([(row, trajectories)])
    return mean_row([row for row, _ in parts]), joined([columns for _, columns in parts])


def mean_row(rows: Sequence[Row]) -> Row:
    """Return the mean of every signal; for those that are a largest value the largest, for seconds the slowest.

    Shares are of equal size, and gradients and weights are the same on all, so the mean is the whole step's value but
    for correlations, which are those of the shares.
    """
    return {name: _combined(name, [row[name] for row in rows]) for name in rows[0]}


def _combined(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max") or name == "seconds_per_step":
        return math.nan if any(map(math.isnan, values)) else max(values)
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the trajectories of all processes one after the other, prompts numbered through."""
    whole: Columns = {name: [] for name in parts[0]}
    for columns in parts:
        start = max(whole["prompt"], default=-1) + 1
        for name, values in columns.items():
            whole[name] += [start + value for value in values] if name == "prompt" else list(values)
    return whole
