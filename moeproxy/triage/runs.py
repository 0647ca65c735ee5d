"""Traces sorted by model, fault and seed, and the pairs of runs that may be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import RunInfo, Trace

_PREFERRED = ("live", "recorded", "file")

Key = tuple[str, str | None, float, int, str]
"""Model, fault, strength, seed, source."""


@dataclass(frozen=True)
class Pair:
    """A healthy and a faulty run of one model and seed."""

    healthy: Trace
    faulty: Trace

    @property
    def sources(self) -> frozenset[str]:
        """Where the two runs come from: "live", "recorded", "file"."""
        return frozenset({self.healthy.provenance.source, self.faulty.provenance.source})


@dataclass(frozen=True)
class Runs:
    """Traces by model, fault, strength, seed and source.

    Raises:
        ComparisonError: two traces of one source claim the same place, or a run had several faults at once.
    """

    table: dict[Key, Trace]

    @staticmethod
    def of(traces: Sequence[Trace]) -> Runs:
        """Sort traces; two for the same place and source are refused, since either could be meant."""
        table: dict[Key, Trace] = {}
        for trace in traces:
            run = trace.provenance
            _one_fault(run)
            key = (run.model, run.fault, run.strength if run.fault else 0.0, run.seed, run.source)
            if key in table:
                raise ComparisonError(
                    f"two traces of the same run: {run}",
                    expected="one trace for each model, fault, strength, seed and source",
                    remedy="drop one of them",
                )
            table[key] = trace
        _one_model_a_label(traces)
        return Runs(table)

    @property
    def models(self) -> tuple[str, ...]:
        """Labels of all models, in order of appearance."""
        return tuple(dict.fromkeys(key[0] for key in self.table))

    @property
    def faults(self) -> tuple[str, ...]:
        """Ids of all faults, sorted."""
        return tuple(sorted({key[1] for key in self.table if key[1] is not None}))

    def strengths(self, fault: str) -> tuple[float, ...]:
        """Return the strengths at which a fault was run, ascending."""
        return tuple(sorted({key[2] for key in self.table if key[1] == fault}))

    def seeds(self, model: str, fault: str | None) -> tuple[int, ...]:
        """Return the seeds with which a model was run, healthy (None) or with a fault of any strength."""
        return tuple(sorted({key[3] for key in self.table if key[:2] == (model, fault)}))

    def healthy(self, model: str, seed: int) -> Trace | None:
        """Return the healthy run of a seed, a live one before a recorded one."""
        found = (self.table.get((model, None, 0.0, seed, source)) for source in _PREFERRED)
        return next((trace for trace in found if trace is not None), None)

    def pair(self, model: str, fault: str, strength: float, seed: int) -> Pair | None:
        """Return healthy and faulty run of one seed, from one source where possible."""
        healthy = [self.table.get((model, None, 0.0, seed, source)) for source in _PREFERRED]
        faulty = [self.table.get((model, fault, strength, seed, source)) for source in _PREFERRED]
        same = [Pair(h, f) for h, f in zip(healthy, faulty, strict=True) if h is not None and f is not None]
        mixed = [Pair(h, f) for f in faulty for h in healthy if h is not None and f is not None]
        return next(iter(same + mixed), None)

    def onset(self, fault: str, strength: float) -> int:
        """Return the step at which a fault begins to act.

        Raises:
            ComparisonError: a run does not say it, or runs disagree.
        """
        found = {trace.provenance.onset for key, trace in self.table.items() if key[1:3] == (fault, strength)}
        if len(found) == 1 and (onset := next(iter(found))) is not None:
            return onset
        raise ComparisonError(
            f"runs with {fault!r} name the onsets {sorted(map(str, found))}",
            expected="one onset for all runs of a fault",
            remedy="compare runs of one experiment only",
        )


def _one_fault(run: RunInfo) -> None:
    """Refuse a run of several faults, which would pass for one of the first of them, and a run with a remedy."""
    if run.further:
        raise ComparisonError(
            f"a run with {len(run.faults)} faults at once: {run}",
            expected="runs that are healthy or have one fault: a response is that of one fault",
            remedy="leave it out: [trace for trace in traces if not trace.provenance.further]",
        )
    if run.remedies:
        raise ComparisonError(
            f"a run with a remedy: {run}",
            expected="runs without one: a response is that of the fault alone",
            remedy="leave it out: [trace for trace in traces if not trace.provenance.remedies]",
        )


def _one_model_a_label(traces: Sequence[Trace]) -> None:
    """Refuse runs of different checkpoints under one label: their spreads and seeds would be mixed."""
    seen: dict[str, str] = {}
    for trace in traces:
        run = trace.provenance
        first = seen.setdefault(run.model, run.checkpoint_fingerprint)
        if run.checkpoint_fingerprint != first and run.checkpoint_fingerprint and first:
            raise ComparisonError(
                f"runs labelled {run.model!r} started from different checkpoints ({first[:8]} and "
                f"{run.checkpoint_fingerprint[:8]})",
                expected="one checkpoint a label",
                remedy="compare runs of the same model, or give the models different labels",
            )
