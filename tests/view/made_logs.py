"""Small logs of known content, as files that `read` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from moeproxy.traces import LogTrace, RunInfo, Trace, parquet, read


def jsonl(*rows: dict[str, Any]) -> str:
    """Return rows as JSON lines; NaN and infinities as Python writes them."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def verl(steps: range, **values: float) -> str:
    """Return rows in verl's keys: the gradient norm is the step, other keys (`critic__score__mean`) as given."""
    cells = {key.replace("__", "/"): value for key, value in values.items()}
    return jsonl(*({"step": step, "actor/grad_norm": float(step), **cells} for step in steps))


def log_of(folder: Path, text: str, name: str = "x.log", **options: Any) -> LogTrace:
    """Write a log and read its only run."""
    (folder / name).write_text(text)
    (log,) = read(folder / name, **options)
    return log


def trace(model: str = "cluster-16", **signals: Any) -> Trace:
    """Return a run of the lab; a signal may hold None where nothing was logged."""
    n = len(next(iter(signals.values())))
    arrays = {name: pa.array(list(values), pa.float64(), from_pandas=False) for name, values in signals.items()}
    columns = {name: parquet.from_arrow(values) for name, values in arrays.items()}
    steps = pd.DataFrame(columns, index=pd.Index(np.arange(n)))
    return Trace(steps, None, RunInfo(model=model, method="cluster", n_experts=16, seed=0, source="recorded"))
