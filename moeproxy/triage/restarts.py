"""Restarts and slow machines in a log, told from training faults: a restart is not a loss spike.

A restart shows as a log that goes back to an earlier step, or as one step that took many times as long as the others.
If the run goes on as if nothing had happened (steps done again give the same numbers, and no signal jumps just there),
a machine failed and recovery worked. If a signal jumps exactly there, the restart lost something: optimizer state, the
order of the data, a generator's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.signals import SIGNALS
from moeproxy.traces.trace import Trace
from moeproxy.triage.logged import trace_of

SECONDS = "seconds_per_step"
LONG = 5.0
"""How many times the median a step has to take to count as an outage."""
SLOW = 1.5
"""How many times as long steps have to take, from some step to the end, to count as a slow machine."""
_FEWEST = 8
_ALIKE = 2
"""Steps that have to be the same when done again: of a lost optimizer state only the second shows anything."""
_BEFORE = 3
_NAMED = 8
_SIZE = 6.0
_MARGIN = 1.5


@dataclass(frozen=True)
class Restart:
    """A place where a run was interrupted and went on, or where one step took long.

    Args:
        step: first step after it.
        before: last step before it; `step - 1` where no step was done again.
        evidence: what shows it.
        again: steps that stand in the log twice.
        agree: how many of these are the same the second time, before the first that is not.
        differ: signals whose values are not the same at the step that follows these.
        apart: that step; None where all steps done again are the same.
        moved: signals that jump exactly there, more than anywhere else in the run.
        long: whether a long step shows it, not a log that goes back.
        sign: what else the log says of a failure there; "" for nothing.
    """

    step: int
    before: int
    evidence: str
    again: int = 0
    agree: int = 0
    differ: tuple[str, ...] = ()
    apart: int | None = None
    moved: tuple[str, ...] = ()
    long: bool = False
    sign: str = ""

    @property
    def clean(self) -> bool:
        """Whether the restart lost nothing: what was done again began with the same numbers, and no signal jumps."""
        return not self.moved and (self.apart is None or self.agree >= _ALIKE)

    @property
    def lone(self) -> bool:
        """Whether a long step is all there is: it need not be an interruption."""
        return self.long and not self.moved and not self.sign

    def __str__(self) -> str:
        if self.lone:
            return f"a long step, {self.evidence}; no signal jumps there: an evaluation, a checkpoint or a slow machine"
        head = f"interrupted before step {self.step}: {self.evidence}{f', and {self.sign}' if self.sign else ''}"
        if self.clean and self.apart is not None:
            return (
                f"{head}; the first {self.agree} steps done again give the same numbers, so the restart itself lost "
                f"nothing; from step {self.apart} on the two tries differ (first in {', '.join(self.differ)})"
            )
        if self.clean:
            same = f"{self.again} steps done again give the same numbers, " if self.again else ""
            return f"{head}; {same}no signal jumps there: a machine fault, not a loss spike"
        said = []
        if self.differ:
            said.append(f"steps done again differ from step {self.apart} on, first in {', '.join(self.differ)}")
        if self.moved:
            said.append(f"{', '.join(self.moved)} jump exactly there")
        return f"{head}; {' and '.join(said)}: the restart lost state (optimizer, data order, generators)"


@dataclass(frozen=True)
class Slowdown:
    """Steps that take longer from some step to the end, while the rest of the run is not asked.

    Args:
        step: the first slow step.
        times: how many times as long.
    """

    step: int
    times: float

    def __str__(self) -> str:
        return (
            f"from step {self.step} on steps take {self.times:.1f} times as long: a slow machine, or longer responses"
        )


def restarts(run: Trace | LogTrace) -> tuple[Restart, ...]:
    """Return every restart that a run shows, in order.

    Args:
        run: a trace, or a log that `moeproxy.traces.read` read; only a log holds what a restart replaced.

    Raises:
        TraceError: the log holds no metric.

    Example:
        >>> [str(found) for found in restarts(read("job.log")[0])]
    """
    trace = trace_of(run)
    found: dict[int, Restart] = {}
    if isinstance(run, LogTrace):
        for number in range(1, len(run.info.resumes) + 1):
            again = _resumed(run, number, trace)
            found[again.step] = again
    for step, times, seconds in _long_steps(trace):
        # The step in which a resume began is often a long one, too: one restart, not two.
        if not any(item.step <= step <= item.before + 1 for item in found.values()):
            words = f"step {step} took {times:.0f} times as long as the others ({seconds:.3g} s)"
            found[step] = Restart(step, step - 1, words, moved=_moved(trace, step), long=True, sign=_sign(run, step))
    return tuple(found[step] for step in sorted(found))


def restart_notes(run: Trace | LogTrace) -> tuple[str, ...]:
    """Return every restart and long step in words; several long steps without another sign in one sentence.

    Raises:
        TraceError: the log holds no metric.
    """
    found = restarts(run)
    lone = [one for one in found if one.lone]
    if len(lone) < 2:
        return tuple(map(str, found))
    steps = ", ".join(str(one.step) for one in lone[:_NAMED]) + (", ..." if len(lone) > _NAMED else "")
    told = (
        f"{len(lone)} long steps ({steps}), each over {LONG:.0f} times as long as most; no signal jumps there: "
        "evaluations, checkpoints or a slow machine"
    )
    return (*(str(one) for one in found if not one.lone), told)


def slowdown(run: Trace | LogTrace) -> Slowdown | None:
    """Return from where on a run's steps are slow, or None; one long step is no slowdown.

    Raises:
        TraceError: the log holds no metric.
    """
    steps, seconds = _seconds(trace_of(run))
    if len(seconds) < 2 * _FEWEST:
        return None
    # Where two levels describe the clock best; by absolute deviations, so that a lone long step decides nothing.
    place = min(range(_FEWEST, len(seconds) - _FEWEST + 1), key=lambda cut: _spread(seconds[:cut], seconds[cut:]))
    before, after = seconds[:place], seconds[place:]
    # Nearly all steps after it, not their median alone, against nearly all before it.
    if np.quantile(after, 0.1) < SLOW * np.quantile(before, 0.9):
        return None
    return Slowdown(int(steps[place]), float(np.median(after) / np.median(before)))


def _spread(*parts: np.ndarray) -> float:
    logs = [np.log(part) for part in parts]
    return float(sum(np.abs(part - np.median(part)).sum() for part in logs))


def _seconds(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    if SECONDS not in trace.signals:
        return np.empty(0, int), np.empty(0)
    values = trace.values(SECONDS)
    known = np.isfinite(values) & (values > 0)
    return np.asarray(trace.steps.index)[known], values[known]


def _long_steps(trace: Trace) -> list[tuple[int, float, float]]:
    """Return (step, times the median, seconds) of lone long steps; the first is long in every run: it warms up."""
    steps, seconds = _seconds(trace)
    if len(seconds) < _FEWEST:
        return []
    times = seconds / np.median(seconds)
    return [(int(steps[i]), float(times[i]), float(seconds[i])) for i in np.flatnonzero(times > LONG) if i > 0]


def _sign(run: Trace | LogTrace, step: int) -> str:
    """Return what the log says of a failure between the rows of the step before and those of `step`, "" for nothing."""
    if not isinstance(run, LogTrace):
        return ""
    places: Any = run.places
    here = places[places["step"] == step]
    before = places[(places["step"] >= 0) & (places["step"] < step)]
    if here.empty or before.empty:
        return ""
    last = before[before["step"] == before["step"].max()]["line"].max()
    first, files = here["line"].max(), {"", *map(str, here["file"])}
    told = [f for f in run.info.findings if f.kind != "progress" and last <= f.line <= first and f.file in files]
    return f"the log has a {told[0].kind} on line {told[0].line}" if told else ""


def _resumed(run: LogTrace, number: int, trace: Trace) -> Restart:
    """Return what resume `number` shows: where its first steps are as before, no signal jumps because of it."""
    resume = run.info.resumes[number - 1]
    words = f"the log goes back from step {resume.before} to step {resume.step}"
    before, after = (_attempt(run, run.places["attempt"] == n) for n in (number - 1, number))
    common = before.index.intersection(after.index).sort_values()
    known = [str(name) for name in before.columns.intersection(after.columns) if _compared(str(name))]
    agree, differ = 0, tuple[str, ...]()
    for step in common:
        # Only what both tries logged.
        differ = tuple(name for name in known if _unlike(before.at[step, name], after.at[step, name]))
        if differ:
            break
        agree += 1
    same = set(known) if agree else set()
    return Restart(
        resume.step,
        resume.before,
        words,
        again=len(common),
        agree=agree,
        differ=differ,
        apart=int(common[agree]) if differ else None,
        moved=tuple(name for name in _moved(trace, resume.step) if name not in same),
    )


def _compared(name: str) -> bool:
    """Whether a signal is the same in equal steps; clocks never are."""
    known = SIGNALS.get(name.partition("/")[0])
    return known is not None and known.compared and name != SECONDS


def _unlike(left: float, right: float) -> bool:
    return bool(np.isfinite(left) and np.isfinite(right) and left != right)


def _attempt(run: LogTrace, chosen: Any) -> pd.DataFrame:
    """Return steps x signals as the rows of one attempt have them."""
    keys = {key: signal for signal, key in run.info.keys.items() if key in run.original}
    rows = run.original.loc[chosen & (run.places["step"] >= 0), list(keys)].rename(columns=keys)
    numbers = rows.apply(pd.to_numeric, errors="coerce")
    return numbers.groupby(run.places.loc[rows.index, "step"]).last()


def _moved(trace: Trace, step: int) -> tuple[str, ...]:
    """Return the signals whose largest jump of the run, by far, is at `step`."""
    found = []
    index = np.asarray(trace.steps.index)
    place = int(np.searchsorted(index, step))
    for name in trace.signals:
        if not _compared(name):
            continue
        known = SIGNALS[name.partition("/")[0]]
        values = trace.values(name)
        if known.scale == "log":
            values = np.log(np.maximum(values, known.resolution))
        if _jumps(values, place):
            found.append(name)
    return tuple(found)


def _jumps(values_S: np.ndarray, place: int) -> bool:
    """Return whether the step at `place` departs from the steps before it as no other step does."""
    apart = np.array([abs(values_S[i] - np.median(values_S[i - _BEFORE : i])) for i in range(_BEFORE, len(values_S))])
    here = place - _BEFORE
    if not 0 <= here < len(apart) or not np.isfinite(apart[here]):
        return False
    # The steps right after a jump are compared with those before it: they say nothing about the rest of the run.
    others = np.delete(apart, np.arange(here, min(here + _BEFORE + 1, len(apart))))
    others = others[np.isfinite(others)]
    if len(others) < _FEWEST:
        return False
    usual = float(np.median(others))
    return bool(apart[here] > _SIZE * usual and apart[here] > _MARGIN * others.max() and apart[here] > 0)
