"""One signal of a run as it is drawn: values, what is no number, what was replaced, and the same for a part of it.

Everything of the run is kept; `drawn` and `marks` say what of it is shown when the screen shows some of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pandas as pd

from moeproxy.traces.attempts import divisor
from moeproxy.traces.logs.cells import NUMERIC, Status
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.view.sampling import MAX_POINTS, Marks, extremes, marked

_NONE = np.zeros(0, np.int64)
_NUMERIC = [int(status) for status in NUMERIC]


@dataclass(frozen=True)
class Kind:
    """States of a cell that are marked alike.

    Args:
        name: what the legend says.
        states: of `moeproxy.traces.logs.cells.Status`.
        symbol: plotly's name of the mark.
        height: where it stands, 0 at the bottom of the panel and 1 at its top.
        breaks: whether the line is interrupted there; a step at which nothing was logged is no interruption.
    """

    name: str
    states: tuple[Status, ...]
    symbol: str
    height: float
    breaks: bool = True


KINDS = (
    Kind("NaN", (Status.NAN, Status.NAN_TEXT), "x", 0.06),
    Kind("+Inf", (Status.POS_INF, Status.POS_INF_TEXT), "triangle-up", 0.95),
    Kind("-Inf", (Status.NEG_INF, Status.NEG_INF_TEXT), "triangle-down", 0.06),
    Kind("not finite, logged as something else", (Status.NONFINITE, Status.FILTERED), "diamond", 0.06),
    Kind("null or text", (Status.NULL, Status.TEXT, Status.OTHER), "square", 0.06),
    Kind("not logged at this step", (Status.MISSING, Status.EMPTY), "line-ns-open", 0.025, breaks=False),
)
"""Everything that is no number, in the order of the legend."""


@dataclass(frozen=True, eq=False)
class Series:
    """One signal of one run.

    Args:
        steps_S: int64, increasing.
        values_S: float64; NaN wherever there is no finite number.
        states_S: uint8, of `Status`.
        key: what the log calls it.
        definition: how it differs from the canonical signal, "" when it does not.
        replaced_steps_R: steps of finite values that another value of the same step took the place of, ascending.
        replaced_values_R: those values.
        replaced_words_R: why, for each of them.
        replaced_places: steps of replaced values that were no finite number, ascending, by the name of the mark.
    """

    steps_S: np.ndarray
    values_S: np.ndarray
    states_S: np.ndarray
    key: str = ""
    definition: str = ""
    replaced_steps_R: np.ndarray = field(default_factory=lambda: _NONE)
    replaced_values_R: np.ndarray = field(default_factory=lambda: np.zeros(0))
    replaced_words_R: np.ndarray = field(default_factory=lambda: np.zeros(0, object))
    replaced_places: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def _finite(self) -> np.ndarray:
        return np.flatnonzero(np.isfinite(self.values_S))

    @cached_property
    def _finite_steps(self) -> np.ndarray:
        return self.steps_S[self._finite]

    @cached_property
    def _breaks_before(self) -> np.ndarray:
        """For every finite value the number of interruptions before it."""
        broken = np.isin(self.states_S, [state for kind in KINDS if kind.breaks for state in kind.states])
        return np.cumsum(broken)[self._finite]

    @cached_property
    def places(self) -> Mapping[str, np.ndarray]:
        """Steps of each kind of mark, by its name; kinds without any are left out."""
        found = {kind.name: self.steps_S[np.isin(self.states_S, kind.states)] for kind in KINDS}
        return MappingProxyType({name: steps for name, steps in found.items() if steps.size})

    @property
    def finite_S(self) -> np.ndarray:
        """The finite values."""
        return self.values_S[self._finite]

    @property
    def n_replaced(self) -> int:
        """How many values were replaced, finite or not."""
        return self.replaced_steps_R.size + sum(map(len, self.replaced_places.values()))

    def counts(self) -> dict[str, int]:
        """Return how many steps there are of each kind of mark."""
        return {name: len(steps) for name, steps in self.places.items()}

    def drawn(self, low: float, high: float, n: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values to draw when [low, high] is seen; NaN in both interrupts the line.

        One point beyond either end is among them, so that the line runs out of the picture. Within it, all points are
        returned when there are at most n, otherwise the smallest and the largest of every column of pixels.
        """
        start = max(int(np.searchsorted(self._finite_steps, low, "left")) - 1, 0)
        stop = int(np.searchsorted(self._finite_steps, high, "right")) + 1
        at = self._finite[start:stop]
        chosen = extremes(self.steps_S[at], self.values_S[at], n)
        x, y = self.steps_S[at][chosen].astype(float), self.values_S[at][chosen]
        gaps = np.flatnonzero(np.diff(self._breaks_before[start:stop][chosen])) + 1
        return np.insert(x, gaps, np.nan), np.insert(y, gaps, np.nan)

    def marks(self, kind: Kind, low: float, high: float) -> Marks:
        """Return the marks of a kind when [low, high] is seen."""
        return marked(self.places.get(kind.name, _NONE), low, high)

    def replaced_marks(self, kind: Kind, low: float, high: float) -> Marks:
        """Return the marks of replaced values of a kind when [low, high] is seen."""
        return marked(self.replaced_places.get(kind.name, _NONE), low, high)

    def replaced(self, low: float, high: float, n: int = MAX_POINTS // 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return steps, values and reasons of replaced values to draw when [low, high] is seen."""
        start, stop = np.searchsorted(self.replaced_steps_R, [low, np.nextafter(high, np.inf)])
        steps, values = self.replaced_steps_R[start:stop], self.replaced_values_R[start:stop]
        chosen = extremes(steps, values, n) if len(steps) else _NONE
        return steps[chosen], values[chosen], self.replaced_words_R[start:stop][chosen]


def series_of(run: LogTrace | Trace, signal: str) -> Series:
    """Return a signal of a run.

    Raises:
        TraceError: the run has no such signal.
    """
    trace = run if isinstance(run, Trace) else run.trace
    values = trace.values(signal)
    finite = np.where(np.isfinite(values), values, np.nan)
    steps = trace.steps.index.to_numpy()
    if isinstance(run, Trace):
        return Series(steps, finite, _states(values, trace.missing(signal)), signal)
    states = run.status[signal].cat.codes.to_numpy().astype(np.uint8)
    replaced = _replaced(run, signal)
    return Series(steps, finite, states, run.info.keys[signal], run.info.definitions[signal], *replaced)


def _states(values_S: np.ndarray, missing_S: np.ndarray) -> np.ndarray:
    states = np.full(len(values_S), Status.MEASURED, np.uint8)
    states[np.isnan(values_S)] = Status.NAN
    states[np.isposinf(values_S)] = Status.POS_INF
    states[np.isneginf(values_S)] = Status.NEG_INF
    states[missing_S] = Status.MISSING
    return states


def _replaced(log: LogTrace, signal: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return steps, values and reasons of finite values that do not count and differ from those that do, and the rest.

    The rest are steps at which what does not count was NaN or infinite, by the name of the mark.
    """
    key = log.info.keys[signal]
    steps, shown = (log.places[name].to_numpy() for name in ("step", "shown"))
    states = log.original_status[key].cat.codes.to_numpy()
    has = np.isin(states, _NUMERIC) & (steps >= 0)
    counts = np.zeros(len(steps), bool)
    later = np.flatnonzero(has & shown)[::-1]
    counts[later[np.unique(steps[later], return_index=True)[1]]] = True  # of several rows of a step the last
    old = np.flatnonzero(has & ~counts)
    old = old[np.argsort(steps[old], kind="stable")]
    logged = pd.to_numeric(pd.Series(log.original[key].to_numpy()[old]), errors="coerce")
    values = np.asarray(logged, np.float64) / divisor(log, signal)
    kept = np.isfinite(values) & (values != _now(log, signal, steps[old]))
    words = np.where(shown[old], "written again for the same step", "replaced after a resume").astype(object)
    places = {kind.name: steps[old[np.isin(states[old], kind.states)]] for kind in KINDS}
    found = {name: where for name, where in places.items() if where.size}
    return steps[old[kept]], values[kept], words[kept], found


def _now(log: LogTrace, signal: str, steps_R: np.ndarray) -> np.ndarray:
    return pd.Series(log.trace.values(signal), index=log.trace.steps.index).reindex(steps_R).to_numpy()
