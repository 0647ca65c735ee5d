"""An incident: a run that is written up, judged attempt by attempt, with what its authors did about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeproxy.files import printable, sha256_file
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.attempted import JudgedAttempt, judge_attempts, leading, verdict_on
from moeproxy.triage.logged import traces_of
from moeproxy.triage.logs import example_notes, healthy_in, left_out, runs_in
from moeproxy.triage.mixed import mixed
from moeproxy.view.log_events import Event, failures

HASHED_BYTES = 256 * 1024**2
"""Logs up to this size are hashed; a larger one is told by its size."""

Run = Trace | LogTrace


@dataclass(frozen=True, eq=False)
class Incident:
    """A run that is written up.

    Args:
        name: of the run.
        run: as it was read.
        judgements: of its attempts, in order; empty for a log without metrics.
        healthy: runs that it was judged by; empty when it was judged alone.
        resumes, failures: what befell it, by step.
        notes: what the reader of the log found odd.
        contents: what the log holds when it has no metric.
        facts: where it comes from.
    """

    name: str
    run: Run
    judgements: tuple[JudgedAttempt, ...]
    healthy: tuple[Trace, ...] = ()
    resumes: tuple[Event, ...] = ()
    failures: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    contents: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """That of the attempt that it is about; "could not judge" without metrics or where only a metric is wrong."""
        return verdict_on(self.judgements)

    @property
    def main(self) -> JudgedAttempt | None:
        """The attempt that it is about: the first that departs, else the last."""
        return leading(self.judgements) if self.judgements else None


def incident(
    run: Run, healthy: Sequence[Run] = (), *, name: str = "", facts: Mapping[str, Any] | None = None
) -> Incident:
    """Judge a run, and what its log held before each resume, for a report.

    Args:
        run: a trace, or a run read from a log.
        healthy: at least six good runs of the same model and settings; without any it is judged alone.
        name: what it is called; by default as in its log.
        facts: where it comes from.

    Raises:
        ComparisonError: fewer than six healthy runs that serve, or they share no step or signal with the run.

    Example:
        >>> incident(read("train.log")[0]).verdict
        'alarm'
    """
    told = {**_facts(run), **(facts or {})}
    called = name or (str(run.provenance) if isinstance(run, Trace) else run.info.name)
    if isinstance(run, LogTrace) and not run.has_metrics:
        return Incident(called, run, (), notes=run.info.notes, contents=run.contents, facts=told)
    notes = () if isinstance(run, Trace) else (*run.info.notes, *left_out(run))
    good = tuple(traces_of(healthy))
    # Where two runs are mixed up, going back is no resume.
    again = () if isinstance(run, Trace) or mixed(run) else run.info.resumes
    resumes = [Event(resume.step, str(resume)) for resume in again]
    judged = judge_attempts(run, good)
    return Incident(called, run, judged, good, tuple(resumes), failures(run), tuple(notes), facts=told)


def open_incidents(path: str | Path, healthy: Sequence[str | Path] = (), **reading: Any) -> tuple[Incident, ...]:
    """Judge every run of a log, or of a trace written here, for a report.

    Args:
        path: the log.
        healthy: logs of good runs of the same model and settings, six runs or more in all.
        reading: mapping, step, framework as for `moeproxy.traces.read`.

    Raises:
        MoeproxyError: a log cannot be read, a healthy one holds no metric, or there are too few healthy runs.
    """
    source = Path(path)
    good = healthy_in([Path(one) for one in healthy])
    told = {"log": printable(path), **_file_facts(source)}
    if healthy:
        told["healthy runs"] = ", ".join(map(printable, dict.fromkeys(healthy)))
    found = (incident(run, good, name=name, facts=told) for name, run in runs_in(source, **reading))
    return tuple(replace(one, notes=(*one.notes, *example_notes(source, one.run))) for one in found)


def _facts(run: Run) -> dict[str, Any]:
    if isinstance(run, Trace):
        said = run.provenance
        told = {"run": str(said), "checkpoint": said.checkpoint_fingerprint}
        return {name: value for name, value in told.items() if value}
    info = run.info
    told: dict[str, Any] = {
        "framework": f"{info.framework} {info.version}".strip(),
        "container": info.container,
        "files": ", ".join(info.files),
        "read": f"{info.lines:,} lines, {info.rows:,} of them rows of this run",
        "lines left out": "; ".join(map(str, info.skipped)),
        "steps by": info.clock,
        "signals and their keys": ", ".join(f"{name} = {key}" for name, key in info.keys.items()),
    }
    return {name: value for name, value in told.items() if value}


def _file_facts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    size = path.stat().st_size
    hashed = {"SHA-256 of the log": sha256_file(path)} if size <= HASHED_BYTES else {}
    return {"size of the log": f"{size:,} bytes", **hashed}
