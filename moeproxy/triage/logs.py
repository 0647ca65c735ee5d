"""Judge logs: what `python -m moeproxy triage` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.reading import read
from moeproxy.traces.trace import Trace
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR
from moeproxy.triage.diagnose import Diagnosis, diagnose
from moeproxy.triage.restarts import restarts, slowdown

EXIT = {HEALTHY: 0, ALARM: 1, UNCLEAR: 2}
"""Exit codes for scripts, by verdict."""


@dataclass(frozen=True)
class LogVerdict:
    """One run of a log with its diagnosis, or why there is none.

    Args:
        name: of the run.
        diagnosis: None when the log holds no metric.
        contents: what the log holds then.
        notes: what the reader of the log found odd.
    """

    name: str
    diagnosis: Diagnosis | None
    contents: str = ""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One of the keys of `EXIT`."""
        return UNCLEAR if self.diagnosis is None else self.diagnosis.detection.verdict

    def text(self) -> str:
        """Return the verdict for people."""
        if self.diagnosis is None:
            return f"{self.name}: could not judge: no metric; it contains {self.contents}"
        detection = self.diagnosis.detection
        notes = [f"log: {note}" for note in self.notes]
        said = [*self.diagnosis.sentences, *(f"seen: {line}" for line in detection.sentences[1:]), *notes]
        return "\n".join([f"{self.name}: {detection.sentences[0]}", *(f"  {line}" for line in said)])

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        found = None if self.diagnosis is None else self.diagnosis.to_dict()
        return {"run": self.name, "verdict": self.verdict, "contents": self.contents, "diagnosis": found}


def runs_in(path: Path, **reading: Any) -> list[tuple[str, Trace | LogTrace]]:
    """Return (name, run) of every run in a trace written here or in a log of any framework."""
    if path.suffix == ".parquet":
        try:
            return [(path.stem, Trace.load(path))]
        except TraceError:
            pass  # somebody else's Parquet: the reader says what it makes of it
    return [(log.info.name, log) for log in read(path, **reading)]


def judge_log(path: Path, healthy: Sequence[Path] = (), **reading: Any) -> list[LogVerdict]:
    """Judge every run of a log.

    Args:
        path: the log.
        healthy: logs of good runs of the same model and settings, six runs or more in all; none: judged alone.
        reading: mapping, step, framework as for `moeproxy.traces.read`, for logs whose keys are not known.

    Raises:
        MoeproxyError: a log cannot be read, a healthy one holds no metric, or there are too few healthy runs.
    """
    good = [run for one in dict.fromkeys(healthy) for _, run in runs_in(one)]
    return [_judge(name, run, good) for name, run in runs_in(path, **reading)]


def exit_code(judged: Sequence[LogVerdict]) -> int:
    """Return 1 when a run alarms, else 2 when one could not be judged, else 0."""
    codes = {EXIT[one.verdict] for one in judged}
    return 1 if 1 in codes else max(codes, default=2)


def verdict_of(name: str, run: Trace | LogTrace, diagnosis: Diagnosis | None) -> LogVerdict:
    """Return the verdict on a run, with what its log says beside the metrics; no diagnosis where it has none."""
    if isinstance(run, Trace):
        return LogVerdict(name, diagnosis, notes=_machines(run))
    if diagnosis is None:
        return LogVerdict(name, None, run.contents)
    resumed = [f"{resume}; what it replaced is not judged" for resume in run.info.resumes]
    notes = (*run.info.notes, *resumed, *_machines(run), *map(str, run.info.findings))
    return LogVerdict(name, diagnosis, notes=notes)


def _machines(run: Trace | LogTrace) -> tuple[str, ...]:
    """Return what the log shows of machines that failed or are slow."""
    slow = slowdown(run)
    return (*map(str, restarts(run)), *([str(slow)] if slow else []))


def _judge(name: str, run: Trace | LogTrace, healthy: Sequence[Trace | LogTrace]) -> LogVerdict:
    empty = isinstance(run, LogTrace) and not run.has_metrics
    return verdict_of(name, run, None if empty else diagnose(run, healthy))
