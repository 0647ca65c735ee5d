"""The attempts of a run that was resumed: what stood in the log before each resume took its later steps away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from moeproxy.traces import parquet
from moeproxy.traces.keys import FRAMEWORKS, GENERIC
from moeproxy.traces.logs.cells import NUMERIC, Status
from moeproxy.traces.logs.joining import Resume
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace

_NUMERIC = [int(status) for status in NUMERIC]
_VALUES = {
    Status.NAN: np.nan,
    Status.NAN_TEXT: np.nan,
    Status.POS_INF: np.inf,
    Status.POS_INF_TEXT: np.inf,
    Status.NEG_INF: -np.inf,
    Status.NEG_INF_TEXT: -np.inf,
    Status.NONFINITE: np.nan,
}


@dataclass(frozen=True, eq=False)
class Attempt:
    """A run as its log had it when it was resumed.

    Args:
        trace: the canonical signals up to then, what earlier resumes had replaced left out.
        resume: where the log went back to afterwards.
    """

    trace: Trace
    resume: Resume


def attempts(log: LogTrace) -> tuple[Attempt, ...]:
    """Return what the log held before each of its resumes, in order; nothing for a run that was never resumed.

    The trace of the log itself is the last attempt: what it took over from before, and what followed the last resume.
    Numbers are read by the same keys; a loss that a framework writes in place of NaN is taken as it stands.

    Args:
        log: a run read from a log.

    Example:
        >>> [attempt.resume.before for attempt in attempts(read("train.log")[0])]
        [35]
    """
    if not (log.has_metrics and log.info.resumes):
        return ()
    steps, number = (log.places[name].to_numpy() for name in ("step", "attempt"))
    columns = {name: logged(log, name) for name in log.trace.signals}
    found = []
    for count, resume in enumerate(log.info.resumes):
        rows = np.flatnonzero((number <= count) & (steps >= 0))
        rows = rows[~_taken_back(steps[rows], number[rows], log.info.resumes[:count])]
        table = {name: _at(values[rows], known[rows], steps[rows]) for name, (values, known) in columns.items()}
        if any(len(column) for column in table.values()):
            found.append(Attempt(_trace(log, table), resume))
    return tuple(found)


def logged(log: LogTrace, signal: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values (N,) of a signal in every row of the log, in its own unit, and where there is one."""
    key = log.info.keys[signal]
    states = log.original_status[key].cat.codes.to_numpy()
    numbers: Any = pd.to_numeric(pd.Series(log.original[key].to_numpy()), errors="coerce")
    values = numbers.to_numpy(np.float64) / divisor(log, signal)
    for state, value in _VALUES.items():
        values = np.where(states == state, value, values)
    return values, np.isin(states, _NUMERIC)


def divisor(log: LogTrace, signal: str) -> float:
    """Return what logged numbers are divided by; the definition tells a user's mapping from the framework's own key."""
    framework = FRAMEWORKS.get(log.info.framework, GENERIC)
    name, definition = log.info.keys[signal], log.info.definitions[signal]
    for key in framework.keys:
        if key.signal == signal and key.definition == definition and name in framework.names(key.name):
            return key.divisor
    return 1.0


def _taken_back(steps: np.ndarray, number: np.ndarray, resumes: tuple[Resume, ...]) -> np.ndarray:
    """Return which rows an earlier resume had replaced: those before it whose step it went back to, or later."""
    gone = np.zeros(len(steps), bool)
    for count, resume in enumerate(resumes):
        gone |= (number <= count) & (steps >= resume.step)
    return gone


def _at(values: np.ndarray, known: np.ndarray, steps: np.ndarray) -> pd.Series:
    """Return values by step; of several rows of a step the last counts."""
    return pd.Series(values[known], index=steps[known]).groupby(level=0).last(skipna=False)


def _trace(log: LogTrace, table: dict[str, pd.Series]) -> Trace:
    here = {name: column for name, column in table.items() if len(column)}
    steps = np.unique(np.concatenate([column.index.to_numpy() for column in here.values()]))
    frame = {}
    for name, column in here.items():
        there = np.isin(steps, column.index.to_numpy())
        values = np.full(len(steps), np.nan)
        values[there] = column.to_numpy()
        frame[name] = parquet.from_arrow(pa.array(values, mask=~there, from_pandas=False)).set_axis(steps)
    return Trace(pd.DataFrame(frame, index=pd.Index(steps)), None, replace(log.trace.provenance))
