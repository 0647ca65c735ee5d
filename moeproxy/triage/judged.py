"""What a run is judged by: step signals, aggregates of its responses, and per-layer router signals, as one table.

Axes: R row (a signal, or one layer of it), S step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS, signal_of
from moeproxy.traces.trace import Trace
from moeproxy.triage.arrays import finite
from moeproxy.triage.response import LOG_FLOOR, columns_of, transform
from moeproxy.triage.study_signals import DERIVED, STEP_SIGNALS, floors, logged, signal_table

_PER_LAYER = tuple(name for name, signal in SIGNALS.items() if signal.per_layer)
_SCALARS = (*(name for name in STEP_SIGNALS if name not in _PER_LAYER), *DERIVED)
_FURTHER = tuple(name for name, signal in LOG_SIGNALS.items() if name != "learning_rate")


ROUNDING = 1e-13
"""Size below which a mean on a linear scale is zero: running sums leave that much."""


@dataclass(frozen=True)
class Judged:
    """The judged signals of one run, transformed so that differences mean the same at every size.

    Args:
        rows: a signal's name, or `name/<layer>`.
        steps_S: the run's steps, ascending.
        values_RS: transformed values (see `traces.signals.Signal.scale`); NaN is missing, ±inf was not finite.
        floor_R: smallest spread believed, on the transformed scale.
        sparse: signals that are left out, since they are logged at less than half of the steps.
    """

    rows: tuple[str, ...]
    steps_S: np.ndarray
    values_RS: np.ndarray
    floor_R: np.ndarray
    sparse: tuple[str, ...] = ()

    @staticmethod
    def of(trace: Trace) -> Judged:
        """Return the table of a run; what it does not log, or seldom, has no row."""
        if trace.steps.empty:
            return Judged((), np.zeros(0, int), np.empty((0, 0)), np.zeros(0))
        steps_S = trace.steps.index.to_numpy()
        known = logged(trace, _SCALARS)
        scalars = tuple(name for name in _SCALARS if name in known)
        columns = [column for name in (*_PER_LAYER, *_FURTHER) for column in columns_of(trace, name)]
        parts = [transform(trace, column, signal_of(column))[None] for column in columns]
        if scalars:
            parts.insert(0, signal_table(trace, scalars, steps_S))
        floor = [_floor(column) for column in columns]
        values_RS = np.concatenate(parts) if parts else np.empty((0, len(steps_S)))
        whole = Judged((*scalars, *columns), steps_S, _tamed(values_RS), np.array([*floors(scalars), *floor]))
        return whole._dense()

    def _dense(self) -> Judged:
        """Leave out steps without any value, then signals that are logged at few of the others."""
        logged_RS = ~np.isnan(self.values_RS)
        here_S = logged_RS.any(0)
        often_R = logged_RS[:, here_S].mean(1) >= 0.5 if here_S.any() else np.zeros(len(self.rows), bool)
        rows = tuple(row for row, often in zip(self.rows, often_R, strict=True) if often)
        kept = {signal_name(row) for row in rows}
        sparse = tuple(dict.fromkeys(n for n in map(signal_name, self.rows) if n not in kept))
        values_RS = self.values_RS[often_R][:, here_S]
        return Judged(rows, self.steps_S[here_S], values_RS, self.floor_R[often_R], sparse)

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the signals, each once however many layers it has."""
        return tuple(dict.fromkeys(signal_name(row) for row in self.rows))

    @cached_property
    def finite_RS(self) -> np.ndarray:
        """The values without those that were not finite."""
        return finite(self.values_RS)

    @property
    def moves(self) -> bool:
        """Whether any signal takes more than one value, or is not finite."""
        known = [np.unique(values_S[np.isfinite(values_S)]) for values_S in self.values_RS]
        return bool(self.broken_RS.any()) or any(len(values) > 1 for values in known)

    @cached_property
    def broken_RS(self) -> np.ndarray:
        """Where a value was logged that is not finite."""
        return np.isinf(self.values_RS)

    def at(self, rows: tuple[str, ...], steps_S: np.ndarray) -> np.ndarray:
        """Return transformed values (R, S) of these rows at these steps, NaN where this run has none."""
        values_RS = np.full((len(rows), len(steps_S)), np.nan)
        _, theirs, ours = np.intersect1d(steps_S, self.steps_S, return_indices=True)
        place = {row: index for index, row in enumerate(self.rows)}
        for index, row in enumerate(rows):
            if row in place:
                values_RS[index, theirs] = self.values_RS[place[row], ours]
        return values_RS


def _tamed(values_RS: np.ndarray) -> np.ndarray:
    """Bound finite values so that sums and squares of them stay finite; a loss of 1e308 is as bad as one of 1e60."""
    return np.where(np.isfinite(values_RS), np.clip(values_RS, -1e60, 1e60), values_RS)


def signal_name(row: str) -> str:
    """Return the signal of a row."""
    return row.partition("/")[0]


def unit_of(row: str) -> str:
    """Return the unit of a row in words, "" when it has none."""
    name = signal_name(row)
    return "" if name in DERIVED else signal_of(row).unit


def meaning_of(row: str) -> str:
    """Return what a row measures, in one clause."""
    name = signal_name(row)
    return DERIVED[name].doc if name in DERIVED else signal_of(row).doc


def scale_of(row: str) -> str:
    """Return the scale on which a row is judged: "linear", "log" or "logit"."""
    name = signal_name(row)
    return DERIVED[name].scale if name in DERIVED else signal_of(row).scale


def original_value(row: str, transformed: float) -> float:
    """Return a transformed value in the signal's own unit."""
    name, scale = signal_name(row), scale_of(row)
    if scale == "log":
        tiny = DERIVED[name].resolution if name in DERIVED else signal_of(row).resolution
        return 0.0 if transformed <= np.log(tiny) + 1e-9 else float(np.exp(min(transformed, 700.0)))
    if scale == "logit":
        return float(1 / (1 + np.exp(-transformed)))
    return float(transformed) if abs(transformed) > ROUNDING else 0.0


def groups(rows: tuple[str, ...]) -> list[tuple[str, np.ndarray]]:
    """Return (signal, indices of its rows), in order of first appearance."""
    names = [signal_name(row) for row in rows]
    return [(name, np.array([i for i, n in enumerate(names) if n == name])) for name in dict.fromkeys(names)]


def _floor(column: str) -> float:
    signal = signal_of(column)
    return signal.resolution if signal.scale == "linear" else LOG_FLOOR
