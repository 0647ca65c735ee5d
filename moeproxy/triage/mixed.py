"""Two runs in one log: where that shows, neither can be judged, and the log says nothing of which row is whose.

Runs that write to one file leave two numbers for a step where one is to be (both in step with each other), or a log
that goes back again and again by a few steps (one behind the other). Equal copies of a row, and sources that log
different signals of one step, are no sign of it; a run that was resumed repeats every step from there on, and jumps
over none.

Axes: N row of the log.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.attempts import logged
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.signals import SIGNALS
from moeproxy.traces.trace import Trace

SHARE, FEWEST = 0.1, 3
"""Share of the steps, and steps, with two values from which on a log holds two runs; a few may be written twice."""

ROUNDED = 0.01
"""Values that differ by no more than this share are one number, printed with fewer digits."""

JUMPS, RESUMES = 2, 4
"""Times that a log goes back, from which on it was not resumed: where it then jumps over steps, and where it does them
again with other numbers. A resumed run does neither, unless it lost its state."""

_DO = "split the file into one for each run (by job, process or time), and judge each"


def mixed(run: Trace | LogTrace) -> str:
    """Return why a log seems to hold two runs, and what to do, in one sentence; "" for a log of one.

    Args:
        run: a trace, of which nothing is known, or a log.

    Example:
        >>> mixed(read("two_jobs.jsonl")[0])
        '80 of 80 steps have two different values of total_loss, ...: two runs in one file? ...'
    """
    if not isinstance(run, LogTrace) or not run.has_metrics:
        return ""
    places = run.places
    keep_N = places["step"].to_numpy() >= 0
    steps_N, attempt_N = (places[name].to_numpy()[keep_N] for name in ("step", "attempt"))
    columns = {name: tuple(part[keep_N] for part in logged(run, name)) for name in _compared(run)}
    return _twice(columns, steps_N, attempt_N) or _lagging(run, columns, steps_N, attempt_N)


def _compared(run: LogTrace) -> list[str]:
    """Return the signals that are the same in equal steps; clocks never are."""
    known = [(name, SIGNALS.get(name.partition("/")[0])) for name in run.trace.signals]
    return [name for name, signal in known if signal is not None and signal.compared and name != "seconds_per_step"]


def _twice(columns: dict[str, tuple[np.ndarray, ...]], steps_N: np.ndarray, attempt_N: np.ndarray) -> str:
    """Return in words how many steps have two values within one attempt, "" where few do."""
    counts: dict[str, int] = {}
    places: set[tuple[int, int]] = set()
    for name, (values_N, known_N) in columns.items():
        table: Any = pd.DataFrame({"attempt": attempt_N, "step": steps_N, "value": values_N})[known_N]
        double = table[table.duplicated(["attempt", "step"], keep=False)]
        finite = double["value"].where(np.isfinite(double["value"]))
        each = finite.groupby([double["attempt"], double["step"]]).agg(["min", "max", "count", "size"])
        far = _far(each["min"].to_numpy(), each["max"].to_numpy())
        broke = (each["count"] > 0) & (each["count"] < each["size"])
        differ = set(each.index[far | broke.to_numpy()])
        if differ:
            counts[name] = len(differ)
            places |= differ
    n_steps, n_double = len(np.unique(steps_N)), len({step for _, step in places})
    if n_double < max(FEWEST, SHARE * n_steps):
        return ""
    named = ", ".join(sorted(counts, key=lambda name: -counts[name])[:4])
    return (
        f"{n_double} of {n_steps} steps have two values that differ ({named}): the log seems to hold two runs at once, "
        f"and which row belongs to which it does not say. What to do: {_DO}."
    )


def _far(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return where two numbers are not one, printed with fewer digits; NaN is none."""
    return high - low > ROUNDED * np.maximum(np.abs(low), np.abs(high))


def _lagging(
    run: LogTrace, columns: dict[str, tuple[np.ndarray, ...]], steps_N: np.ndarray, attempt_N: np.ndarray
) -> str:
    """Return in words how often the log goes back as no resumed run does, "" where it does not.

    Either an attempt jumps over steps that the one before it had, or they all go back by the same few steps and do
    them again with other numbers.
    """
    resumes = run.info.resumes
    if len(resumes) < JUMPS:
        return ""
    steps = [set(steps_N[attempt_N == number].tolist()) for number in range(len(resumes) + 1)]
    jumps = sum(
        _jumps(resume.step, before, after) for resume, (before, after) in zip(resumes, pairwise(steps), strict=True)
    )
    back = np.array([resume.before - resume.step for resume in resumes])
    alike = float(np.mean(np.abs(back - np.median(back)) <= 1)) > 0.75
    onward = float(np.mean(np.diff([resume.step for resume in resumes]) > 0)) > 0.75
    anew = sum(_differs(number, columns, steps_N, attempt_N) for number in range(1, len(resumes) + 1))
    again = len(resumes) >= RESUMES and alike and onward and anew > 0.75 * len(resumes)
    if jumps < max(JUMPS, len(resumes) / 2) and not again:
        return ""
    return (
        f"The log goes back {len(resumes)} times, by {int(np.median(back)) + 1} steps mostly, and does not go on from "
        f"there as a resumed run does: it seems to hold two runs, one behind the other. What to do: {_DO}."
    )


def _jumps(start: int, before: set[int], after: set[int]) -> bool:
    """Whether an attempt goes on beyond the one before it, and leaves out steps that this one had done."""
    between = {step for step in before if start < step}
    return bool(between) and max(after) > max(between) and len(between & after) < len(between) / 2


def _differs(
    number: int, columns: dict[str, tuple[np.ndarray, ...]], steps_N: np.ndarray, attempt_N: np.ndarray
) -> bool:
    """Whether the first step that an attempt does again has other numbers than before."""
    mine_N, theirs_N = attempt_N == number, attempt_N < number
    common = np.intersect1d(steps_N[mine_N], steps_N[theirs_N])
    if not common.size:
        return False
    here_N = steps_N == common[0]
    for values_N, known_N in columns.values():
        new, old = values_N[here_N & mine_N & known_N][:1], values_N[here_N & theirs_N & known_N][-1:]
        if new.size and old.size:
            broke = np.isfinite(new) != np.isfinite(old)
            if (broke | _far(np.minimum(new, old), np.maximum(new, old))).any():
                return True
    return False
