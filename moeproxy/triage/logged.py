"""A run as it is judged, whether it was recorded here or read from somebody's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from moeproxy.errors import ComparisonError
from moeproxy.traces import parquet
from moeproxy.traces.logs.cells import WORDS, Status
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace

TRAILING = 3
"""Nulls at the end of a signal from which on they stand for values that are not finite."""


def trace_of(run: Trace | LogTrace) -> Trace:
    """Return the trace of a run, with NaN where its log hides that a value was not finite.

    Some loggers put another value there (`filtered`), others write NaN as null. A null may also mean that nothing was
    measured; so it counts only where a signal has numbers first and nothing but nulls to its end.

    Raises:
        TraceError: the log holds no metric.
        ComparisonError: it is neither a trace nor a log.
    """
    if isinstance(run, Trace):
        return run
    if not isinstance(run, LogTrace):
        raise ComparisonError(
            f"{type(run).__name__} instead of a run", expected="a Trace, or a LogTrace of moeproxy.traces.read"
        )
    trace, changed = run.trace, {}
    for name in trace.signals:
        hidden_S = _hidden(run.status[name]) if name in run.status else np.zeros(0, bool)
        if hidden_S.any():
            values = np.where(hidden_S, np.nan, trace.values(name))
            column = parquet.from_arrow(pa.array(values, mask=trace.missing(name) & ~hidden_S, from_pandas=False))
            changed[name] = column.set_axis(trace.steps.index)
    return Trace(trace.steps.assign(**changed), trace.trajectories, trace.provenance) if changed else trace


def traces_of(runs: Sequence[Trace | LogTrace]) -> list[Trace]:
    """Return the traces of runs, see `trace_of`.

    Raises:
        ComparisonError: it is one run in place of several.
    """
    if isinstance(runs, Trace | LogTrace):
        raise ComparisonError(
            f"one {type(runs).__name__} in place of several runs", expected="a list of runs", remedy="give [run, ...]"
        )
    return [trace_of(run) for run in runs]


def _hidden(status: Any) -> np.ndarray:
    filtered_S = (status == WORDS[Status.FILTERED]).to_numpy()
    null_S = (status == WORDS[Status.NULL]).to_numpy()
    first = len(null_S) - int(np.argmin(null_S[::-1])) if not null_S.all() else 0
    trailing_S = np.arange(len(null_S)) >= first
    told = bool((status.iloc[:first] == WORDS[Status.MEASURED]).any()) and not null_S[:first].any()
    return filtered_S | (trailing_S if told and trailing_S.sum() >= TRAILING else np.zeros(len(null_S), bool))
