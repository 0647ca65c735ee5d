"""The healthy runs that a run is judged beside: which of them serve, and what to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import Trace
from moeproxy.triage.departure import LEAST_AFTER
from moeproxy.triage.judged import Judged
from moeproxy.triage.reference import FEWEST_RUNS, Departures, Reference

FEW = 8
"""Healthy runs below which a reader is told how sure thresholds are."""

_SETTINGS = ("learning_rate", "temperature", "prompts", "samples", "max_new_tokens", "environment")


@dataclass(frozen=True)
class Healthy:
    """Healthy runs that serve as a reference for one run.

    Args:
        traces, tables: those that serve.
        steps_S: the steps that they share with the run.
        notes: why others were left out, and what makes the comparison weaker than it looks.
    """

    traces: tuple[Trace, ...]
    tables: tuple[Judged, ...]
    steps_S: np.ndarray
    notes: tuple[str, ...]

    @staticmethod
    def of(trace: Trace, table: Judged, healthy: Sequence[Trace]) -> Healthy:
        """Choose among healthy runs: none twice, not the run itself, none much shorter than the run.

        Raises:
            ComparisonError: too few are left.
        """
        kept: list[tuple[Trace, Judged]] = []
        seen, twice, short = {_content(table)}, 0, 0
        tables = [Judged.of(one) for one in healthy]
        # Where the healthy runs are the shorter ones altogether, the run is judged on their steps.
        length = min(len(table.steps_S), int(np.median([len(one.steps_S) for one in tables])))
        for one, theirs in zip(healthy, tables, strict=True):
            if _content(theirs) in seen:
                twice += 1
            elif len(theirs.steps_S) < length / 2:
                short += 1
            else:
                kept.append((one, theirs))
            seen.add(_content(theirs))
        notes = [f"{twice} left out: equal to another one, or to the run"] * (twice > 0)
        notes += [f"{short} left out: not half as long as the others"] * (short > 0)
        _check(kept, notes)
        traces, tables_kept = zip(*kept, strict=True)
        steps_S = _shared(table, tables_kept)
        notes = [f"Of the healthy runs {note}." for note in notes] + _differences(trace, traces)
        if len(kept) < FEW:
            notes.append(
                f"{len(kept)} healthy runs say little about how far healthy runs stray: of 240 made-up healthy runs 16 "
                "alarmed beside six others, none beside twelve. Give more."
            )
        return Healthy(traces, tables_kept, steps_S, tuple(notes))

    def measure(self, table: Judged) -> tuple[Departures, int, tuple[str, ...]]:
        """Return how far the run strays from these, how many of them judged it, and what stands out among them.

        A run that is not healthy after all makes the others' spread large, and hides what it is to show. One that
        stands out is left out where enough are left without it.
        """
        reference, count = Reference.of(self.tables, self.steps_S, table.rows), len(self.tables)
        if not reference.doubtful:
            return reference.departures(table), count, ()
        rest = [one for index, one in enumerate(self.tables) if index not in reference.odd]
        left_out = reference.odd if len(rest) >= FEWEST_RUNS else ()
        usual = float(np.delete(reference.strength_N, reference.doubtful).max(initial=0.0))
        notes = [
            _stands_out(self.traces[index], float(reference.strength_N[index]), usual, index in left_out)
            for index in reference.doubtful
        ]
        if left_out:
            reference, count = Reference.of(rest, self.steps_S, table.rows), len(rest)
        return reference.departures(table), count, tuple(notes)

    def uncovered(self, table: Judged) -> str:
        """Return in a sentence which steps at either end of the run no healthy run reaches; "" where none matters.

        As few as no departure shows in do not matter, counted in the steps that are shared.
        """
        places = np.flatnonzero(np.isin(table.steps_S, self.steps_S))
        least = LEAST_AFTER * int(np.median(np.diff(places))) if len(places) > 1 else LEAST_AFTER
        early, late = int(places[0]), len(table.steps_S) - 1 - int(places[-1])
        if max(early, late) <= least:
            return ""
        first, last = int(self.steps_S[0]), int(self.steps_S[-1])
        return (
            f"No alarm from step {first} to {last}, but the healthy runs do not reach the other {early + late} of the "
            f"run's {len(table.steps_S)} steps: give healthy runs of steps {table.steps_S[0]} to {table.steps_S[-1]}, "
            "or none (the run is then judged alone)."
        )

    def missing(self, table: Judged, found: Departures) -> tuple[str, ...]:
        """Return what of the run could not be judged for want of it in the healthy runs."""
        told = []
        if strangers := [name for name in table.signals if name not in found.names]:
            told.append(f"Not judged, since not all healthy runs log it: {', '.join(strangers)}.")
        if len(found.steps_S) < len(table.steps_S):
            told.append(
                f"Judged on {len(found.steps_S)} of {len(table.steps_S)} steps: the healthy runs have no others."
            )
        return tuple(told)


def _stands_out(trace: Trace, strength: float, usual: float, left_out: bool) -> str:
    info = trace.provenance
    name = info.model if info.source == "file" else f"{info.model}, seed {info.seed}"
    told = f"Healthy run {name} departs from the others: strength {strength:.1f}, they stay below {usual:.1f}"
    return f"{told}; it was left out." if left_out else f"{told}. Is it healthy? Else leave it out, and give another."


def _content(table: Judged) -> bytes:
    return repr(table.rows).encode() + table.steps_S.tobytes() + table.values_RS.tobytes()


def _check(kept: Sequence[object], notes: Sequence[str]) -> None:
    if len(kept) < FEWEST_RUNS:
        raise ComparisonError(
            "; ".join(
                ["1 healthy run that serves" if len(kept) == 1 else f"{len(kept)} healthy runs that serve", *notes]
            ),
            expected=f"at least {FEWEST_RUNS} different ones, to know how far healthy runs stray",
            remedy="give more, or none: the run is then judged by its own beginning",
        )


def _shared(table: Judged, tables: Sequence[Judged]) -> np.ndarray:
    """Return the run's steps that at least half of the healthy runs have too.

    Raises:
        ComparisonError: there is none.
    """
    count_S = np.sum([np.isin(table.steps_S, one.steps_S) for one in tables], axis=0)
    steps_S = table.steps_S[count_S >= len(tables) / 2]
    if not len(steps_S):
        raise ComparisonError(
            f"no step in common: the run has {table.steps_S[0]} to {table.steps_S[-1]}, "
            f"the healthy ones {tables[0].steps_S[0]} to {tables[0].steps_S[-1]}",
            expected="runs that count their steps alike",
        )
    return steps_S


def _differences(trace: Trace, healthy: Sequence[Trace]) -> list[str]:
    """Return what differs by more than seed and fault, where both say it."""
    mine, told = trace.provenance, []
    pairs = [("model", mine.model, [one.provenance.model for one in healthy])] if mine.source != "file" else []
    pairs += [(name, mine.config.get(name), [one.provenance.config.get(name) for one in healthy]) for name in _SETTINGS]
    pairs.append(("program", _program(trace), [_program(one) for one in healthy]))
    for name, own, theirs in pairs:
        others = sorted({str(value) for value in theirs if value not in (None, "")} - {str(own)})
        if own not in (None, "") and others:
            told.append(
                f"The healthy runs have another {name} ({', '.join(others)}, here {own}): what follows from that shows "
                "as a departure."
            )
    return told


def _program(trace: Trace) -> str:
    log = trace.provenance.config.get("log") or {}
    return str(log.get("framework", ""))
