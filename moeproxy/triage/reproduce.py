"""Reproduce a failure on a proxy: inject the likely faults there, and rank them by how well the response matches.

    runs = ProxyRuns(load_bench("data/bench", models=["cluster-16"]))
    reproduce(read("failing.jsonl")[0], runs, healthy)

Cheap first: runs of the proxy that are recorded already. With `live`, faults of which none is recorded are run, the
likeliest first, within a budget of minutes. Whether this tells more than the trace alone is measured by
`triage.evaluate` and stated in data/triage/TRIAGE.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeproxy.errors import ComparisonError, LabError
from moeproxy.lab.budget import Budget, OutOfTime, check_minutes
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.settings import Injection, RunSpec
from moeproxy.lab.sweep import result_path, sweep, try_sweep
from moeproxy.lab.sweep_progress import Watch
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.aligned import Aligned, aligned
from moeproxy.triage.catalogue import load_catalogue
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, Detection, Runs, judge, measure
from moeproxy.triage.diagnose import conclude, likeliest
from moeproxy.triage.fingerprint import fingerprint
from moeproxy.triage.judged import Judged
from moeproxy.triage.learn import Fits
from moeproxy.triage.learned import load_library
from moeproxy.triage.library import Library
from moeproxy.triage.logged import trace_of, traces_of
from moeproxy.triage.reference import FEWEST_RUNS, Departures
from moeproxy.triage.reproduction import Candidate, Reproduction

__all__ = ["Candidate", "Live", "ProxyRuns", "Reproduction", "reproduce"]

WEIGHT = 8.0
"""What a match of 1 adds to the logarithm of a candidate's confidence (chosen on original and cluster-16)."""

ALIKE = 0.5
"""Mean response from which on a signal is said to move alike, or not."""

SHOWN, LEAST_OTHERS = 4, 20
QUANTILE = 0.95
EARLIEST, LATEST = 10, 30
"""Steps between which new runs get their fault: a past to change from, and half of a run to see what follows."""


@dataclass(frozen=True)
class ProxyRun:
    """One broken run of the proxy: its fault, and how it went on from its onset."""

    fault: str
    strength: float
    live: bool
    course: Aligned


@dataclass(frozen=True)
class Live:
    """How new runs of the proxy are made.

    Args:
        spec: a healthy run of it: model, label, method, settings.
        out: folder of the runs; what lies there already is not run again.
        minutes: budget, of the healthy runs that the proxy lacks too. No round of runs begins that would be longer than
            what is left, going by the longest so far; one that is over time is ended at its next step. What a process
            needs to start, some seconds, is not cut short.
        strengths: of each fault that is tried.
        workers: runs at a time.
        watch: see `moeproxy.lab.sweep.sweep`.

    Raises:
        LabError: the minutes are not positive, or not finite.
    """

    spec: RunSpec
    out: Path
    minutes: float
    strengths: tuple[float, ...] = (1.0,)
    workers: int | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        check_minutes(self.minutes)


class ProxyRuns:
    """What is known of one proxy: healthy runs, and runs with one fault each.

    Args:
        traces: of one model and setting; runs with several faults or with a remedy are left out.

    Raises:
        ComparisonError: runs of several models.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        labels = sorted({trace.provenance.model for trace in traces})
        if len(labels) > 1:
            raise ComparisonError(f"runs of {', '.join(labels)}", expected="runs of one proxy")
        self.model = labels[0] if labels else ""
        self._healthy = _usual([trace for trace in traces if trace.provenance.healthy])
        self._fits: Fits | None = None
        self._waiting: list[tuple[Trace, bool]] = []  # broken runs that nothing can be judged by yet
        self.runs: list[ProxyRun] = []
        self.add([trace for trace in traces if not trace.provenance.healthy], live=False)

    @property
    def n_healthy(self) -> int:
        """Number of its healthy runs."""
        return len(self._healthy)

    def add_healthy(self, traces: Sequence[Trace]) -> None:
        """Take further healthy runs; broken ones that waited for them are judged now."""
        self._healthy, self._fits = [*self._healthy, *traces], None
        self._judge_waiting()

    def add(self, traces: Sequence[Trace], *, live: bool) -> None:
        """Take broken runs, judged beside the healthy ones; until there are six of these they wait."""
        single = [trace for trace in traces if not trace.provenance.further and not trace.provenance.remedies]
        self._waiting += [(trace, live) for trace in single]
        self._judge_waiting()

    def _judge_waiting(self) -> None:
        if self.n_healthy >= FEWEST_RUNS:
            self.runs += [self._run(trace, live) for trace, live in self._waiting]
            self._waiting = []

    def _run(self, trace: Trace, live: bool) -> ProxyRun:
        if self._fits is None:
            self._fits = Fits([Judged.of(one) for one in self._healthy])
        info, table = trace.provenance, Judged.of(trace)
        found = self._fits.departures(table)
        seen = judge(table, found, BESIDE, self.n_healthy)
        onset = seen.onset if seen.verdict == ALARM else info.onset
        return ProxyRun(str(info.fault), info.strength, live, aligned(table, found, int(onset or 0)))

    def without(self, faults: Iterable[str]) -> ProxyRuns:
        """Return the same proxy as if no run with these faults were known, so that they are run anew."""
        left = set(faults)
        other = copy(self)
        other.runs = [run for run in self.runs if run.fault not in left]
        other._waiting = [(trace, live) for trace, live in self._waiting if trace.provenance.fault not in left]
        return other

    def of(self, fault: str) -> list[ProxyRun]:
        """Return the runs with a fault."""
        return [run for run in self.runs if run.fault == fault]


def _usual(healthy: Sequence[Trace]) -> list[Trace]:
    """Return the healthy runs at the settings that most of them have."""
    settings = [str(sorted(trace.provenance.config.items(), key=str)) for trace in healthy]
    most = max(settings, key=settings.count) if settings else ""
    return [trace for trace, mine in zip(healthy, settings, strict=True) if mine == most]


def reproduce(
    run: Trace | LogTrace,
    proxy: ProxyRuns,
    healthy: Runs = (),
    *,
    library: Library | None = None,
    live: Live | None = None,
) -> Reproduction:
    """Lay a failing run over the proxy's responses to the faults that may have caused it.

    Args:
        run: a trace of the original, or a run read from a log.
        proxy: its runs; those that are made now are added.
        healthy: good runs of the original, as for `diagnose`.
        library: as for `diagnose`.
        live: how to run what is not recorded; None runs nothing.

    Raises:
        ComparisonError: the run is healthy or cannot be judged, the proxy has too few healthy runs, or something is
            neither a run nor what is known of a proxy.
        LabError: no new run could be made, or the budget did not last for the healthy runs that the proxy lacks.

    Example:
        >>> reproduce(failing, proxy_runs, healthy).candidates[0].fault
        'stale_rollout'
    """
    _check_proxy(proxy)
    good = traces_of(healthy)
    known = library or load_library(BESIDE if good else ALONE)
    table, seen, found = _judged(run, good)
    onset, mark = int(seen.onset or 0), fingerprint(table, found, int(seen.onset or 0), known.units)
    features_F = mark.features(known.signals)
    if not np.isfinite(features_F).any():
        raise ComparisonError("of what departs nothing is among the signals by which faults are known")
    causes = likeliest(known, features_F)
    concluded = conclude(known, mark, seen, load_catalogue())
    left, minutes, notes = _run_live(causes, proxy, live, onset) if live else ((), 0.0, ())
    if proxy.n_healthy < FEWEST_RUNS:
        raise ComparisonError(
            f"{proxy.n_healthy} healthy runs of the proxy",
            expected=f"at least {FEWEST_RUNS} at one setting",
            remedy="record more, or give live= to run them",
        )
    course = aligned(table, found, onset)
    ranked = sorted((_candidate(*cause, proxy, course) for cause in causes), key=lambda one: -one.score)
    matched = sum(not np.isnan(one.match) for one in ranked)
    background = _background(proxy, course, {fault for fault, _ in causes}, matched)
    unknown = concluded.sentences[-1] if concluded.unknown else ""
    return Reproduction(
        proxy.model, onset, tuple(ranked), background, round(minutes, 2), left, notes, max(matched, 1), unknown
    )


def _check_proxy(proxy: object) -> None:
    if not isinstance(proxy, ProxyRuns):
        raise ComparisonError(
            f"a {type(proxy).__name__} in place of the proxy's runs",
            expected="a ProxyRuns",
            remedy="give ProxyRuns(traces), with the traces of one proxy",
        )


def _judged(run: Trace | LogTrace, healthy: Sequence[Trace]) -> tuple[Judged, Detection, Departures]:
    """Return the run's table, what was seen and how far it strays.

    Raises:
        ComparisonError: there is no alarm.
    """
    trace = trace_of(run)
    table = Judged.of(trace)
    detection, found = measure(trace, table, healthy)
    if detection.verdict != ALARM or found is None or detection.onset is None:
        raise ComparisonError(
            f"nothing to reproduce: {detection.sentences[0]}", expected="a run that departs from healthy ones"
        )
    return table, detection, found


def _candidate(fault: str, confidence: float, proxy: ProxyRuns, course: Aligned) -> Candidate:
    strength, match, mine = max(
        ((level, *_matched(runs, course)) for level, runs in _by_strength(proxy.of(fault)).items()),
        key=lambda found: -np.inf if np.isnan(found[1]) else found[1],  # a NaN that comes first is larger than all
        default=(float("nan"), float("nan"), []),
    )
    agree, differ = _compared(course, mine)
    return Candidate(
        fault=fault,
        title=FAULTS[fault].title if fault in FAULTS else fault,
        confidence=confidence,
        match=match,
        strength=strength,
        n_recorded=sum(not run.live for run in mine),
        n_live=sum(run.live for run in mine),
        agree=agree,
        differ=differ,
        score=score(confidence, match),
    )


def score(confidence: float, match: float) -> float:
    """Return what candidates are ranked by; a candidate that was not reproduced is neither raised nor lowered."""
    return float(np.log(max(confidence, 1e-9)) + WEIGHT * (0.0 if np.isnan(match) else match))


def _by_strength(runs: Sequence[ProxyRun]) -> Mapping[float, list[ProxyRun]]:
    found: dict[float, list[ProxyRun]] = {}
    for run in runs:
        found.setdefault(run.strength, []).append(run)
    return found


def _matched(runs: list[ProxyRun], course: Aligned) -> tuple[float, list[ProxyRun]]:
    matches = [course.match(run.course) for run in runs]
    known = [match for match in matches if not np.isnan(match)]
    return (float(np.mean(known)) if known else float("nan")), runs


def _compared(course: Aligned, runs: Sequence[ProxyRun]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the signals that move alike on both, and those that do not, the strongest first."""
    mine = dict(zip(course.names, course.strength_X(), strict=True))
    theirs: dict[str, list[float]] = {}
    for run in runs:
        for name, value in zip(run.course.names, run.course.strength_X(), strict=True):
            theirs.setdefault(name, []).append(float(value))
    pairs = [(name, mine[name], float(np.mean(theirs[name]))) for name in mine if name in theirs]
    loud = sorted(
        (p for p in pairs if max(abs(p[1]), abs(p[2])) >= 2 * ALIKE), key=lambda p: -max(abs(p[1]), abs(p[2]))
    )
    agree = [name for name, ours, other in loud if ours * other > 0 and min(abs(ours), abs(other)) >= ALIKE]
    return tuple(agree[:SHOWN]), tuple([name for name, *_ in loud if name not in agree][:SHOWN])


def _background(proxy: ProxyRuns, course: Aligned, candidates: set[str], choices: int) -> float:
    """Return the match that the best of `choices` runs of the proxy with other faults stays below, mostly.

    The best of several candidates matches better than one by chance; so the level is that of the best of as many.
    """
    others = [course.match(run.course) for run in proxy.runs if run.fault not in candidates]
    known = [match for match in others if not np.isnan(match)]
    return float(np.quantile(known, QUANTILE ** (1 / max(choices, 1)))) if len(known) >= LEAST_OTHERS else float("nan")


def _run_live(
    causes: Sequence[tuple[str, float]], proxy: ProxyRuns, live: Live, onset: int
) -> tuple[tuple[str, ...], float, tuple[str, ...]]:
    """Run healthy runs where they are missing, then the likeliest faults; return what was left, minutes and notes."""
    budget, notes = Budget(live.minutes), list[str]()
    waiting = [fault for fault, _ in causes if fault in FAULTS and not proxy.of(fault)]
    if proxy.n_healthy < FEWEST_RUNS:
        notes.append(_run_healthy(proxy, live, budget, waiting))
        waiting = [fault for fault in waiting if not proxy.of(fault)]  # broken runs may have waited for healthy ones
    start = int(np.clip(onset, EARLIEST, min(LATEST, live.spec.settings.steps // 2)))
    while waiting and budget.fits():
        name = waiting[0]
        specs = [replace(live.spec, injection=Injection(name, level, start)) for level in live.strengths]
        try:
            with budget.round():
                ended = try_sweep(specs, live.out, workers=live.workers, watch=budget.watch(live.watch))
        except OutOfTime:
            proxy.add(_finished(specs, live.out), live=True)
            notes.append(
                f"What ran of {name} was ended when the {live.minutes:g} minutes were spent; its finished steps are in "
                f"{live.out}."
            )
            break
        waiting.pop(0)
        proxy.add(ended.traces, live=True)
        notes += [f"A run of {name} on the proxy did not end: {failure}." for failure in ended.failures]
    return tuple(waiting), budget.spent, tuple(notes)


def _run_healthy(proxy: ProxyRuns, live: Live, budget: Budget, waiting: Sequence[str]) -> str:
    """Make the healthy runs that the proxy needs, and return what they cost.

    Raises:
        LabError: they do not end within the budget.
    """
    wanted = [replace(live.spec, seed=100 + n) for n in range(FEWEST_RUNS)]
    try:
        with budget.round():
            proxy.add_healthy(sweep(wanted, live.out, workers=live.workers, watch=budget.watch(live.watch)))
    except OutOfTime as error:
        done = len(_finished(wanted, live.out))
        raise LabError(
            f"the {live.minutes:g} minutes were spent when {done} of the {FEWEST_RUNS} healthy runs of the proxy had "
            "ended, without which nothing can be reproduced",
            where=live.out,
            remedy="give more minutes: finished runs are kept and not repeated",
        ) from error
    proxy.model = proxy.model or live.spec.label
    told = f"The proxy had too few healthy runs: {FEWEST_RUNS} took {budget.spent:.1f} of the {live.minutes:g} minutes"
    return f"{told}{'' if budget.fits() or not waiting else ', and nothing was left for the faults'}."


def _finished(specs: Sequence[RunSpec], out: Path) -> list[Trace]:
    """Return the traces of the runs that have ended."""
    return [Trace.load(path) for spec in specs if (path := result_path(spec, out)).is_file()]
