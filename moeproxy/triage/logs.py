"""Judge logs: what `python -m moeproxy triage` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.places import data_dir
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.reading import read
from moeproxy.traces.trace import Trace
from moeproxy.triage.attempted import JudgedAttempt, judge_attempts, leading, verdict_on
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR
from moeproxy.triage.diagnose import Diagnosis
from moeproxy.triage.mixed import mixed
from moeproxy.triage.restarts import restart_notes, slowdown

EXIT = {HEALTHY: 0, ALARM: 1, UNCLEAR: 2}
"""Exit codes for scripts, by verdict."""
LEARNED = (
    "an example that comes with moeproxy, with the numbers of a recorded run that the diagnosis has learned from: of "
    "a new run it would be less sure"
)


@dataclass(frozen=True)
class LogVerdict:
    """One run of a log with the diagnoses of its attempts, or why there is none.

    Args:
        name: of the run.
        attempts: what stood in the log before each resume, and the run as its log ends; empty without a metric.
        contents: what the log holds then.
        remedy: what to do then.
        notes: what the reader of the log found odd.
    """

    name: str
    attempts: tuple[JudgedAttempt, ...]
    contents: str = ""
    notes: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Of the first attempt that departs, else of the last; None for a log without a metric."""
        return leading(self.attempts).diagnosis if self.attempts else None

    @property
    def verdict(self) -> str:
        """One of the keys of `EXIT`."""
        return verdict_on(self.attempts)

    def text(self) -> str:
        """Return the verdict for people."""
        if not self.attempts:
            do = f". What to do: {self.remedy}." if self.remedy else ""
            return f"{self.name}: could not judge: no metric; it contains {self.contents}{do}"
        said = [line for judged in self.attempts for line in self._said(judged)]
        return "\n".join([*said, *(f"  log: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        found = None if self.diagnosis is None else self.diagnosis.to_dict()
        told = {"run": self.name, "verdict": self.verdict, "contents": self.contents, "remedy": self.remedy}
        return {
            **told,
            "diagnosis": found,
            "attempts": [_told(judged) for judged in self.attempts],
            "notes": list(self.notes),
        }

    def _said(self, judged: JudgedAttempt) -> list[str]:
        detection = judged.diagnosis.detection
        steps = f", {judged.label} (steps {judged.steps[0]} to {judged.steps[1]})" if judged.label else ""
        said, seen = judged.diagnosis.sentences, [f"seen: {line}" for line in detection.sentences[1:]]
        if detection.verdict == HEALTHY and said:  # a metric that looks wrong is the news
            first, rest = said[0], [*said[1:], f"In the rest: {detection.sentences[0]}", *seen]
        else:
            first, rest = detection.sentences[0], [*said, *seen]
        return [f"{self.name}{steps}: {first}", *(f"  {line}" for line in rest)]


def runs_in(path: Path, **reading: Any) -> list[tuple[str, Trace | LogTrace]]:
    """Return (name, run) of every run in a trace written here or in a log of any framework."""
    if path.suffix == ".parquet":
        try:
            return [(path.stem, Trace.load(path))]
        except TraceError:
            pass  # somebody else's Parquet: the reader says what it makes of it
    return [(log.info.name, log) for log in read(path, **reading)]


def healthy_in(paths: Sequence[Path]) -> list[Trace | LogTrace]:
    """Return the runs of logs that runs are to be judged beside; of one that is given twice both, which is then said.

    Raises:
        MoeproxyError: a log cannot be read, or holds two runs mixed up.
    """
    found = []
    for path in paths:
        for name, run in runs_in(path):
            if reason := mixed(run):
                raise TraceError(f"the healthy run {name} cannot serve: {reason}", where=path)
            found.append(run)
    return found


def judge_log(path: Path, healthy: Sequence[Path] = (), **reading: Any) -> list[LogVerdict]:
    """Judge every run of a log.

    Args:
        path: the log.
        healthy: logs of good runs of the same model and settings, six runs or more in all; none: judged alone.
        reading: mapping, step, framework as for `moeproxy.traces.read`, for logs whose keys are not known.

    Raises:
        MoeproxyError: a log cannot be read, a healthy one holds no metric, or there are too few healthy runs.
    """
    good = healthy_in(healthy)
    return [_judge(path, name, run, good) for name, run in runs_in(path, **reading)]


def example_notes(path: Path, run: Trace | LogTrace) -> tuple[str, ...]:
    """Return what a reader of the verdict on an example log must know; nothing for other logs, or without a metric."""
    if not _has_metrics(run):
        return ()
    return (LEARNED,) if path.resolve().parent == (data_dir() / "logs").resolve() else ()


def left_out(run: LogTrace) -> tuple[str, ...]:
    """Return in words which lines of a log were not read, and why."""
    return tuple(f"left out: {skipped}" for skipped in run.info.skipped)


def exit_code(judged: Sequence[LogVerdict]) -> int:
    """Return 1 when a run alarms, else 2 when one could not be judged, else 0."""
    codes = {EXIT[one.verdict] for one in judged}
    return 1 if 1 in codes else max(codes, default=2)


def verdict_of(path: Path, name: str, run: Trace | LogTrace, judged: tuple[JudgedAttempt, ...]) -> LogVerdict:
    """Return the verdict on a run of a log, with what it says beside the metrics; no attempts where it has none."""
    if isinstance(run, Trace):
        return LogVerdict(name, judged, notes=(*_machines(run), *example_notes(path, run)))
    if not judged:
        return LogVerdict(name, (), run.contents, remedy=run.remedy)
    # Where two runs are mixed up, going back is no resume.
    went = () if mixed(run) else (*map(str, run.info.resumes), *_machines(run))
    read = (*run.info.notes, *left_out(run), *went, *map(str, run.info.findings))
    return LogVerdict(name, judged, notes=(*read, *example_notes(path, run)))


def _machines(run: Trace | LogTrace) -> tuple[str, ...]:
    """Return what the log shows of machines that failed or are slow."""
    slow = slowdown(run)
    return (*restart_notes(run), *([str(slow)] if slow else []))


def _judge(path: Path, name: str, run: Trace | LogTrace, healthy: Sequence[Trace | LogTrace]) -> LogVerdict:
    return verdict_of(path, name, run, judge_attempts(run, healthy) if _has_metrics(run) else ())


def _has_metrics(run: Trace | LogTrace) -> bool:
    return isinstance(run, Trace) or run.has_metrics


def _told(judged: JudgedAttempt) -> dict[str, Any]:
    told = {"label": judged.label, "steps": list(judged.steps), "ended_by": judged.ended_by}
    return {**told, "diagnosis": judged.diagnosis.to_dict()}
