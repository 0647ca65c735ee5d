"""The runs of the fidelity study, sorted: what each model was run with, and what became of it.

Nothing is dropped silently: a run that crashed, a fault that changes nothing on a model, and a run that was never
recorded are told apart and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import RunInfo, Trace
from moeproxy.triage.study_protocol import Protocol

SCORED, NO_EFFECT, CRASHED, ABSENT = "scored", "no effect", "crashed", "not recorded"
"""What became of a broken run: judged; equal to its healthy twin bit for bit; no result; never run."""

Case = tuple[str, str, int]
"""Fault, level, seed."""

Conditions = tuple[object, ...]


@dataclass(frozen=True)
class Twins:
    """A broken run and the healthy run of the same model and seed."""

    faulty: Trace
    healthy: Trace

    @property
    def onset(self) -> int:
        """Step from which the fault acts."""
        onset = self.faulty.provenance.onset
        if onset is None:
            raise ComparisonError(
                f"no onset in {self.faulty.provenance}",
                expected="the step from which the fault acts",
                remedy="record it",
            )
        return onset

    @property
    def equal(self) -> bool:
        """Whether the fault changed nothing that was logged."""
        return self.faulty.equals(self.healthy)


@dataclass(frozen=True)
class ModelRuns:
    """All runs of one model.

    Args:
        label: its label in the traces.
        method: how its experts were chosen.
        n_experts: experts kept in each layer.
        calibration: healthy runs that set spreads and thresholds.
        scored_healthy: healthy runs of the scored seeds.
        other_healthy: healthy runs at other settings (learning rate, temperature), by seed.
        twins: broken runs with their healthy twins.
        without_twin: broken runs whose healthy twin is missing.
        crashed: broken runs that ended without a result, with the reason.
        powerless: faults that can change nothing on this model, since it has no experts.
    """

    label: str
    method: str
    n_experts: int
    calibration: tuple[Trace, ...]
    scored_healthy: tuple[Trace, ...]
    other_healthy: tuple[Trace, ...]
    twins: Mapping[Case, Twins]
    without_twin: tuple[Case, ...] = ()
    crashed: Mapping[Case, str] = field(default_factory=dict)
    powerless: frozenset[str] = frozenset()

    def status(self, case: Case) -> str:
        """Return what became of one broken run."""
        if case in self.twins:
            return NO_EFFECT if self.twins[case].equal else SCORED
        if case in self.crashed:
            return CRASHED
        seeds = {seed for _, _, seed in self.twins}  # a seed that was run for no fault is not recorded for this one
        return NO_EFFECT if case[0] in self.powerless and case[2] in seeds else ABSENT


def sort_runs(
    traces: Sequence[Trace],
    protocol: Protocol,
    *,
    levels: Mapping[tuple[str, float], str] | None = None,
    crashed: Mapping[tuple[str, str, str, int], str] | None = None,
) -> dict[str, ModelRuns]:
    """Return the runs of every model, the original first.

    Args:
        traces: runs with one fault or none; runs with several faults or with a remedy are left out.
        protocol: says which seeds calibrate.
        levels: level of each (fault, strength); by default the largest strength is the protocol's first level.
        crashed: reason by (model, fault, level, seed) for runs without a result.

    Raises:
        ComparisonError: no run of the original, or two runs claim the same place.
    """
    single = [trace for trace in traces if not trace.provenance.further and not trace.provenance.remedies]
    named = levels or _levels(single, protocol)
    labels = dict.fromkeys(trace.provenance.model for trace in single)
    if protocol.original not in labels:
        raise ComparisonError(
            f"no run of {protocol.original!r}", expected="the model that proxies are compared with", remedy="record it"
        )
    order = [protocol.original, *(label for label in labels if label != protocol.original)]
    return {label: _model(label, single, protocol, named, crashed or {}) for label in order}


def faults_of(models: Mapping[str, ModelRuns], level: str, original: str) -> tuple[str, ...]:
    """Return the faults that the original was run with at a level, sorted."""
    return tuple(sorted({fault for fault, its_level, _ in models[original].twins if its_level == level}))


def _model(
    label: str,
    traces: Sequence[Trace],
    protocol: Protocol,
    levels: Mapping[tuple[str, float], str],
    crashed: Mapping[tuple[str, str, str, int], str],
) -> ModelRuns:
    own = [trace for trace in traces if trace.provenance.model == label]
    broken = [trace for trace in own if trace.provenance.fault]
    healthy = _by_place([trace for trace in own if trace.provenance.healthy])
    standard = _standard(broken, [*healthy.values()])
    usual = {seed: trace for (seed, conditions), trace in healthy.items() if conditions == standard}
    twins, alone = _pair(broken, healthy, levels)
    info = own[0].provenance
    return ModelRuns(
        label,
        info.method,
        info.n_experts,
        calibration=tuple(trace for seed, trace in sorted(usual.items()) if seed >= protocol.calibration_from),
        scored_healthy=tuple(trace for seed, trace in sorted(usual.items()) if seed < protocol.calibration_from),
        other_healthy=tuple(trace for place, trace in healthy.items() if place[1] != standard),
        twins=twins,
        without_twin=alone,
        crashed={key[1:]: reason for key, reason in crashed.items() if key[0] == label},
        powerless=frozenset() if info.n_experts else frozenset(protocol.need_experts),
    )


def _pair(
    broken: Sequence[Trace], healthy: Mapping[tuple[int, Conditions], Trace], levels: Mapping[tuple[str, float], str]
) -> tuple[dict[Case, Twins], tuple[Case, ...]]:
    twins: dict[Case, Twins] = {}
    alone = []
    for trace in broken:
        run = trace.provenance
        case = (str(run.fault), levels.get((str(run.fault), run.strength), f"strength {run.strength:g}"), run.seed)
        twin = healthy.get((run.seed, _conditions(run)))
        if case in twins:
            raise _twice(run)
        if twin is None:
            alone.append(case)
        else:
            twins[case] = Twins(trace, twin)
    return twins, tuple(alone)


def _by_place(healthy: Sequence[Trace]) -> dict[tuple[int, Conditions], Trace]:
    places: dict[tuple[int, Conditions], Trace] = {}
    for trace in healthy:
        place = (trace.provenance.seed, _conditions(trace.provenance))
        if place in places:
            raise _twice(trace.provenance)
        places[place] = trace
    return places


def _twice(run: RunInfo) -> ComparisonError:
    return ComparisonError(
        f"two traces of the same run: {run}",
        expected="one trace for each model, fault, level, seed and setting",
        remedy="drop one of them",
    )


def _conditions(run: RunInfo) -> Conditions:
    return (run.config.get("learning_rate"), run.config.get("temperature"))


def _standard(broken: Sequence[Trace], healthy: Sequence[Trace]) -> Conditions:
    """Return the settings of the broken runs; without any, the commonest of the healthy ones."""
    seen = [_conditions(trace.provenance) for trace in (broken or healthy)]
    return max(dict.fromkeys(seen), key=seen.count) if seen else ()


def _levels(traces: Sequence[Trace], protocol: Protocol) -> dict[tuple[str, float], str]:
    runs = [trace.provenance for trace in traces if trace.provenance.fault]
    named: dict[tuple[str, float], str] = {}
    for fault in {str(run.fault) for run in runs}:
        strengths = sorted({run.strength for run in runs if run.fault == fault}, reverse=True)
        names = [*protocol.levels, *(f"strength {value:g}" for value in strengths[len(protocol.levels) :])]
        named |= {(fault, value): name for value, name in zip(strengths, names, strict=False)}
    return named


def shared_steps(models: Mapping[str, ModelRuns]) -> np.ndarray:
    """Return the steps that the healthy runs of all models share."""
    healthy = [trace for runs in models.values() for trace in (*runs.calibration, *runs.scored_healthy)]
    if not healthy:
        raise ComparisonError("no healthy run", expected="healthy runs of every model", remedy="record them")
    shared = set.intersection(*(set(trace.steps.index) for trace in healthy))
    return np.array(sorted(shared), dtype=np.int64)
