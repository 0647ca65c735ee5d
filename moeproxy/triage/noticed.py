"""What was seen in a run and is no alarm: lone spikes, short bursts, lone values that are not finite, a metric at rest.

Axes: R row, S step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.triage.alarms import Alarm, judged_number, lasting_break, times
from moeproxy.triage.arrays import finite
from moeproxy.triage.departure import SPIKE, lone_extremes, robust_noise
from moeproxy.triage.judged import Judged, original_value, signal_name
from moeproxy.triage.reference import Departures

BURST = 6
"""Steps, at most, after which values that stand out are no burst but a level."""

AROUND = 10
"""Steps before and after a step whose median says what was usual there."""

SETTLED = 3
"""Steps after a burst that must be back for it to be one."""

SHOWN = 5


def notes_of(table: Judged, found: Departures, onset: int | None = None) -> tuple[str, ...]:
    """Return sentences on lone spikes, bursts and lone values that are not finite.

    Args:
        table, found: the run.
        onset: step from which it departs; what spikes after it belongs to the departure.
    """
    values_RS = finite(table.at(found.rows, found.steps_S))
    before_S = np.ones(len(found.steps_S), bool) if onset is None else found.steps_S < onset
    spikes_RS = found.spikes_RS | lone_extremes(values_RS)
    bursts_RS = _bursts(values_RS, found.noise_R, spikes_RS)
    notes = []
    for index, row in enumerate(found.rows):
        spikes = [int(place) for place in np.flatnonzero(spikes_RS[index] & before_S)]
        spikes = [at for at in spikes if at or original_value(row, float(values_RS[index, 0]))]  # many begin with a 0
        if spikes:
            notes.append(f"{row}: lone spike at {_spikes(row, values_RS[index], spikes, found.steps_S)}.")
        notes += _burst_notes(row, values_RS[index], bursts_RS[index] & before_S, found.steps_S)
    return (*notes, *_lone_breaks(table))


def not_finite(table: Judged) -> tuple[str, ...]:
    """Return a sentence for each signal with values that are not finite: all that can be said of a short run."""
    notes = []
    for row, broken_S in zip(table.rows, table.broken_RS, strict=True):
        if broken_S.any():
            first = int(table.steps_S[np.flatnonzero(broken_S)[0]])
            notes.append(f"{row}: not finite from step {first} on, at {int(broken_S.sum())} of {len(broken_S)} steps.")
    return tuple(notes)


def earlier(before: Sequence[Alarm], alarms: Sequence[Alarm], onset: int) -> tuple[str, ...]:
    """Return sentences on signals that departed for a while before the run did.

    Args:
        before: alarms of all signals, each by its own onset.
        alarms: those that are left once the run's onset is known.
        onset: that step.
    """
    kept = {signal_name(alarm.signal) for alarm in alarms}
    return tuple(
        f"{alarm.signal}: moves {alarm.direction} at step {alarm.onset}, {times(alarm.excess)} times {alarm.against}, "
        f"and less than half as much when the run departs (step {onset}); no alarm."
        for alarm in before
        if signal_name(alarm.signal) not in kept
    )


def _spikes(row: str, values_S: np.ndarray, places: Sequence[int], steps_S: np.ndarray) -> str:
    told = [f"step {steps_S[at]} ({_value(row, values_S[at])}, {_beside(row, values_S, at)})" for at in places[:SHOWN]]
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    last = "; it is the last step, and whether it lasts is not known" if places[-1] == len(values_S) - 1 else ""
    return f"{', '.join(told)}{more}{last}; a single step is no alarm"


def _beside(row: str, values_S: np.ndarray, at: int) -> str:
    before = f"{_value(row, values_S[at - 1])} before" if at else ""
    after = f"{_value(row, values_S[at + 1])} after" if at + 1 < len(values_S) else ""
    return " and ".join(part for part in (before, after) if part)


def _value(row: str, transformed: Any) -> str:
    return judged_number(original_value(row, float(transformed)))


def _bursts(values_RS: np.ndarray, noise_R: np.ndarray, spikes_RS: np.ndarray) -> np.ndarray:
    """Return where (R, S) a few values in a row stand out of what is usual around them, and then are back."""
    noise_R = np.fmin(noise_R, np.fmax(robust_noise(values_RS), noise_R / 2))
    found_RS = np.zeros(values_RS.shape, bool)
    for index, values_S in enumerate(values_RS):
        out_S = (np.abs(values_S - _usual(values_S)) > SPIKE * noise_R[index]) & ~spikes_RS[index]
        for start, stop in _stretches(out_S):
            settled_S = values_S[stop : stop + SETTLED]
            if 2 <= stop - start <= BURST and start >= SETTLED and np.isfinite(settled_S).sum() == SETTLED:
                found_RS[index, start:stop] = not out_S[stop : stop + SETTLED].any()
    return found_RS


def _usual(values_S: np.ndarray) -> np.ndarray:
    """Return medians (S,) over the steps around each step, of the finite values there."""
    return pd.Series(values_S).rolling(2 * AROUND + 1, center=True, min_periods=1).median().to_numpy()


def _stretches(here_S: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, stop) of every stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], here_S.astype(int), [0]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _burst_notes(row: str, values_S: np.ndarray, burst_S: np.ndarray, steps_S: np.ndarray) -> list[str]:
    notes = []
    for start, stop in _stretches(burst_S)[:SHOWN]:
        usual = _usual(np.where(burst_S, np.nan, values_S))[start]
        extreme = start + int(np.argmax(np.abs(values_S[start:stop] - usual)))
        notes.append(
            f"{row}: burst at steps {steps_S[start]} to {steps_S[stop - 1]} "
            f"(as far as {_value(row, values_S[extreme])}, {_value(row, usual)} around it), and back."
        )
    return notes


def _lone_breaks(table: Judged) -> list[str]:
    notes = []
    for row, broken_S in zip(table.rows, table.broken_RS, strict=True):
        if broken_S.any() and lasting_break(broken_S) is None:
            steps = [int(step) for step in table.steps_S[broken_S]]
            notes.append(f"{row}: not finite at step {_listed(steps)}, finite between and after.")
    return notes


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:SHOWN]))
    return f"{shown} and {len(steps) - SHOWN} more" if len(steps) > SHOWN else shown
