"""Runs of RFT-FaultBench as logs, so that `read` takes their folders like any other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.logs.cells import Status, classify
from moeproxy.traces.logtrace import LogInfo, LogTrace, words
from moeproxy.traces.readers.jsonl import ABSENT
from moeproxy.traces.readers.rft_faultbench import STEP_FILE, RftRun, canonical, read_run, run_folder
from moeproxy.traces.readers.rft_registry import read_registries

REGISTRIES = Path("metadata") / "registries"


def folders_below(root: Path) -> dict[Path, Mapping[str, str]]:
    """Return every run's folder below `root`, `root` included, with the registry's row of it (empty without one).

    Raises:
        TraceError: a registry is unusable.
    """
    found = sorted(root.rglob(STEP_FILE))
    above = next((place for place in (root, *root.resolve().parents[:3]) if (place / REGISTRIES).is_dir()), None)
    rows = read_registries(above / REGISTRIES) if found and above is not None else {}
    folders = dict.fromkeys(root if file.parent == root else run_folder(file, rows) for file in found)
    return {folder: rows.get(folder.name, {}) for folder in folders}


def read_folder(folder: Path, row: Mapping[str, str]) -> LogTrace:
    """Read one run.

    Raises:
        TraceError: as in `read_run`.
    """
    return as_log(read_run(folder, row, repeated="last"), folder)


def as_log(run: RftRun, folder: Path) -> LogTrace:
    """Return a run as a log: trace, states of its cells, and every column as it was written."""
    values, lines = run.steps.values, run.steps.lines
    states = {str(name): _states(values.loc[:, name], run.steps.kinds.loc[:, name]) for name in values}
    rows = pd.RangeIndex(len(values), name="row")
    original = values.set_axis(rows)
    original_status = pd.DataFrame({name: words(found) for name, found in states.items()}, index=rows)
    keys: dict[str, str] = {}
    for name in states:
        signal = canonical(name)
        if signal is not None and run.steps.numeric(name):
            keys.setdefault(signal, name)  # the first, as in the trace
    status = pd.DataFrame({signal: words(states[name]) for signal, name in keys.items()}, index=values.index)
    info = LogInfo(
        name=run.name,
        framework="openrlhf",
        container="RFT-FaultBench run",
        files=tuple(str(file) for file in sorted(folder.rglob(STEP_FILE))[:1]),
        lines=max(lines, default=0),
        rows=len(values),
        clock="step",
        keys=keys,
        definitions=dict.fromkeys(keys, "as RFT-FaultBench logs it, with OpenRLHF"),
        notes=(f"label of the registry: {run.label}", *run.notes),
        facts={"label": run.label, "injected": run.injected, "registry": dict(run.registry_row)},
    )
    return LogTrace(info, status, original, original_status, _places(run, info), run.trace)


def _states(values: pd.Series, kinds: pd.Series) -> np.ndarray:
    return np.array([_state(value, kind) for value, kind in zip(values, kinds, strict=True)], np.uint8)


def _state(value: Any, kind: str) -> Status:
    if kind == ABSENT:
        return Status.MISSING
    if kind == "null":
        return Status.NULL
    if kind == "bool":
        return Status.BOOL
    # A column of numbers holds what was text in the file as a number already.
    if kind == "number in quotes" and isinstance(value, float):
        return _in_quotes(value)
    return classify(value.item() if isinstance(value, np.generic) else value)[1]


def _in_quotes(value: float) -> Status:
    if math.isfinite(value):
        return Status.NUMBER_TEXT
    return Status.NAN_TEXT if math.isnan(value) else Status.POS_INF_TEXT if value > 0 else Status.NEG_INF_TEXT


def _places(run: RftRun, info: LogInfo) -> pd.DataFrame:
    count = len(run.steps.values)
    return pd.DataFrame(
        {
            "file": pd.Categorical([info.files[0] if info.files else ""] * count),
            "line": np.array(run.steps.lines, np.int64),
            "process": pd.Categorical([""] * count),
            "step": run.steps.values.index.to_numpy(np.int64),
            "attempt": np.zeros(count, np.int32),
            "shown": np.ones(count, bool),
        },
        index=pd.RangeIndex(count, name="row"),
    )
