"""Try remedies on a proxy: snapshot before the onset, change, rerun, severity before and after, keep or roll back.

    healthy = Healthy(twin, Calibrated.of(healthy_runs))
    found = try_remedies(Case(faulty_spec, healthy), Path("out/remedies"), minutes=5)

Nothing is kept that made things worse; the rule is in `remedy_result.judge`. What is kept on a proxy may or may not
help the original: `try_on` runs just that there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moeproxy.errors import LabError
from moeproxy.files import provenance
from moeproxy.lab.budget import Budget, OutOfTime
from moeproxy.lab.identity import model_hash
from moeproxy.lab.jobs import Failure
from moeproxy.lab.remedies import REMEDIES, candidates, check_application, remedy
from moeproxy.lab.settings import Application, RunSpec, Snapshots
from moeproxy.lab.snapshot import snapshot_path, undisturbed
from moeproxy.lab.sweep import result_path, sweep, try_sweep
from moeproxy.lab.sweep_progress import Watch
from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy_result import KINDS, Remedy, Transfer, Trial, judge, not_ended, transfers
from moeproxy.triage.severity import Healthy, severity

__all__ = [
    "Case",
    "Remedy",
    "Told",
    "Transfer",
    "Trial",
    "prepare_snapshots",
    "transfers",
    "treated",
    "try_many",
    "try_on",
    "try_remedies",
]

EVERY = 5
"""A snapshot serves all onsets of the next steps: what is run again of them costs less than a file each."""


@dataclass(frozen=True)
class Case:
    """A failure to be treated.

    Args:
        spec: the broken run.
        healthy: its healthy twin and the healthy spread of its model.
        cause: the fault that it is treated for; by default the one that was injected.
        onset: step from which remedies act; by default that of the fault. The run starts from before it.
        remedies: ids to try, in this order; by default those that belong to the cause.
    """

    spec: RunSpec
    healthy: Healthy
    cause: str = ""
    onset: int = 0
    remedies: tuple[str, ...] = ()

    @property
    def treated_for(self) -> str:
        """The fault that it is treated for."""
        return self.cause or (self.spec.injection.fault if self.spec.injection else "")

    @property
    def start(self) -> int:
        """Step from which remedies act."""
        return self.onset or (self.spec.injection.onset if self.spec.injection else 1)

    @property
    def queue(self) -> tuple[str, ...]:
        """Remedies to try, those that a model without experts cannot have left out."""
        dense = self.healthy.twin.provenance.n_experts == 0
        named = self.remedies or candidates(self.treated_for)
        return tuple(name for name in named if not (remedy(name).needs_experts and dense))


Told = Callable[[Case, Trial], None]
"""Called with a case and each of its trials as soon as it is judged."""


def treated(spec: RunSpec, remedies: Iterable[str], start: int) -> RunSpec:
    """Return the run with remedies that act from a step on."""
    return replace(spec, remedies=(*spec.remedies, *(Application(name, start) for name in remedies)))


def try_remedies(
    case: Case,
    out: Path,
    *,
    minutes: float | None = None,
    workers: int | None = None,
    watch: Watch | None = None,
    told: Told | None = None,
    snapshots: Path | None = None,
) -> Remedy:
    """Try the remedies of one case in turn, mitigations and repairs, or until the time is up.

    Of each kind the next is tried until one brings the run back to what healthy runs are.

    Args:
        case: what is treated.
        out: folder of the runs; what lies there already is not run again.
        minutes: budget, of the broken run too; None has no end. No round of runs begins that would be longer than what
            is left, going by the longest so far; one that is over time is ended at its next step, and its remedies
            count as not tried. What a process needs to start, some seconds, is not cut short.
        workers: runs at a time.
        watch: see `moeproxy.lab.sweep.sweep`. An exception in it ends everything; finished runs are kept.
        told: told of every trial when it is judged.
        snapshots: folder of the snapshots that runs start from; None starts from the checkpoint.

    Raises:
        LabError: the broken run itself cannot be made, also within the budget, or a remedy is unknown; the minutes are
            not positive, or not finite.
    """
    options = {"workers": workers, "watch": watch, "told": told, "snapshots": snapshots}
    return try_many([case], out, minutes=minutes, **options)[0]


def try_many(
    cases: Sequence[Case],
    out: Path,
    *,
    minutes: float | None = None,
    workers: int | None = None,
    watch: Watch | None = None,
    told: Told | None = None,
    snapshots: Path | None = None,
) -> list[Remedy]:
    """Like `try_remedies`, for many cases at once: a round makes the next trial of each, so all workers have work."""
    budget = Budget(minutes)
    _check_remedies(cases)
    ending = budget.watch(watch)
    specs = [case.spec for case in cases]
    try:
        if snapshots is not None:
            prepare_snapshots(specs, snapshots, workers=workers, watch=ending)
            specs = [replace(spec, snapshots=Snapshots(snapshots)) for spec in specs]
        broken = sweep(specs, out, workers=workers, watch=ending)
    except OutOfTime as error:
        raise LabError(
            f"the {minutes:g} minutes were spent before the broken run had ended",
            where=out,
            remedy="give more minutes: finished runs are kept and not repeated",
        ) from error
    logs = [_Log(case, spec, trace) for case, spec, trace in zip(cases, specs, broken, strict=True)]
    while (runs := [run for log in logs for run in log.due()]) and budget.fits():
        try:
            with budget.round():
                ended = try_sweep([spec for _, _, spec in runs], out, workers=workers, watch=ending)
        except OutOfTime:
            _take([run for run in runs if result_path(run[2], out).is_file()], (), out, told)
            break
        _take(runs, ended.failures, out, told)
    return [log.result(budget.spent) for log in logs]


def _check_remedies(cases: Sequence[Case]) -> None:
    """Check what is to be tried before anything is run.

    Raises:
        LabError: a remedy is unknown, or a run cannot have it.
    """
    for case in cases:
        experts = case.healthy.twin.provenance.n_experts > 0
        for name in case.queue:
            check_application(Application(name, case.start), case.spec.settings, experts=experts)


def _take(runs: Sequence[tuple[_Log, str, RunSpec]], failed: Iterable[Failure], out: Path, told: Told | None) -> None:
    """Judge the runs of a round, those that failed included."""
    failures = {result_path(failure.spec, out): str(failure) for failure in failed}
    for log, name, spec in runs:
        path = result_path(spec, out)
        trial = log.add(name, path, failures.get(path, ""))
        if told:
            told(log.case, trial)


@dataclass
class _Log:
    """The trials of one case so far."""

    case: Case
    spec: RunSpec
    broken: Trace
    trials: list[Trial] = field(default_factory=list)

    def due(self) -> Iterator[tuple[_Log, str, RunSpec]]:
        """Yield the next run of each kind by which the run has not recovered; none for a run that is not ill."""
        if severity(self.broken, self.case.healthy, self.case.start).value <= self.margin:
            return
        tried = {trial.remedy for trial in self.trials}
        for kind in KINDS:
            well = any(trial.recovered and trial.kind == kind for trial in self.trials)
            left = [name for name in self.case.queue if name not in tried and REMEDIES[name].kind == kind]
            if left and not well:
                yield self, left[0], treated(self.spec, left[:1], self.case.start)

    @property
    def margin(self) -> float:
        return self.case.healthy.margin(self.case.start).value

    def add(self, name: str, path: Path, failed: str) -> Trial:
        about = (name, REMEDIES[name].kind, self.broken)
        healthy, start = self.case.healthy, self.case.start
        ended = not_ended(*about, healthy, start, failed) if failed else judge(*about, Trace.load(path), healthy, start)
        self.trials.append(ended)
        return ended

    def result(self, minutes: float) -> Remedy:
        tried = {trial.remedy for trial in self.trials}
        run = self.broken.provenance
        return Remedy(
            run.model,
            self.case.treated_for,
            run.seed,
            self.case.start,
            severity(self.broken, self.case.healthy, self.case.start),
            self.margin,
            tuple(self.trials),
            tuple(name for name in self.case.queue if name not in tried),
            round(minutes, 2),
            provenance(checkpoint_fingerprint=run.checkpoint_fingerprint),
        )


def try_on(
    found: Sequence[Remedy],
    cases: Sequence[Case],
    out: Path,
    *,
    workers: int | None = None,
    watch: Watch | None = None,
    told: Told | None = None,
    snapshots: Path | None = None,
) -> list[Remedy]:
    """Run on another model, the original above all, exactly what was kept on a proxy (see `transfers`).

    Args:
        found: results on the proxy.
        cases: the same failures of the other model, in the same order.
        out, workers, watch, told, snapshots: as for `try_remedies`.

    Returns:
        one result for each of `found` of which something was kept, with a trial for each remedy that was.

    Raises:
        LabError: the cases do not belong to the results, or a broken run cannot be made.
    """
    for remedy_found, case in zip(found, cases, strict=True):
        if (remedy_found.cause, remedy_found.onset) != (case.treated_for, case.start):
            raise LabError(f"a case of {case.treated_for} for a remedy of {remedy_found.cause}", expected="the same")
    kept = [tuple(best.remedy for kind in KINDS if (best := one.best(kind))) for one in found]
    chosen = [replace(case, remedies=names) for case, names in zip(cases, kept, strict=True) if names]
    if not chosen:
        return []
    return try_many(chosen, out, workers=workers, watch=watch, told=told, snapshots=snapshots)


def prepare_snapshots(
    specs: Iterable[RunSpec],
    folder: Path,
    *,
    workers: int | None = None,
    watch: Watch | None = None,
) -> list[Path]:
    """Leave the snapshots that runs of these specs can start from, and return their files.

    One healthy run of each model and seed leaves them all; files that exist are not made again.
    """
    wanted: dict[RunSpec, set[int]] = {}
    for spec in specs:
        healthy = replace(spec, injection=None, further=(), remedies=(), snapshots=Snapshots(folder))
        step = undisturbed(spec) // EVERY * EVERY
        if step:
            wanted.setdefault(healthy, set()).add(step)
    runs, files = [], []
    for healthy, steps in wanted.items():
        paths = [snapshot_path(healthy, model_hash(healthy.model), step) for step in sorted(steps)]
        files += paths
        if not all(path.is_file() for path in paths):
            settings = replace(healthy.settings, steps=max(steps))
            runs.append(replace(healthy, settings=settings, snapshots=Snapshots(folder, tuple(sorted(steps)))))
    if runs:
        with tempfile.TemporaryDirectory() as scratch:  # their traces are parts of runs that are recorded whole
            sweep(runs, Path(scratch), workers=workers, watch=watch)
    return files
