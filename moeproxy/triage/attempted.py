"""A run judged attempt by attempt: a failure that a resume took out of the log's trace is still a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeproxy.traces.attempts import attempts
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.detect import ALARM, HEALTHY, UNCLEAR
from moeproxy.triage.diagnose import Diagnosis, diagnose
from moeproxy.triage.logged import trace_of, traces_of
from moeproxy.triage.mixed import mixed


@dataclass(frozen=True, eq=False)
class JudgedAttempt:
    """One attempt of a run, and what was found about it.

    Args:
        label: what it is called beside the others; "" for a run of one attempt.
        trace: what was judged.
        diagnosis: of it.
        began: first step that it did not take over from the attempt before.
        ended_by: where the log went back to after it; "" for the last.
    """

    label: str
    trace: Trace
    diagnosis: Diagnosis
    began: int
    ended_by: str = ""

    @property
    def alarmed(self) -> bool:
        """Whether it departs."""
        return self.diagnosis.detection.verdict == ALARM

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step of its own."""
        return self.began, int(self.trace.steps.index[-1])


def judge_attempts(run: Trace | LogTrace, healthy: Sequence[Trace | LogTrace] = ()) -> tuple[JudgedAttempt, ...]:
    """Judge what a log held before each resume, and then the run as its log ends; a log of two runs is one attempt.

    Args:
        run: a trace, or a run of a log with metrics.
        healthy: at least six good runs of the same model and settings; without any it is judged alone.

    Raises:
        ComparisonError: fewer than six healthy runs that serve, or they share no step or signal with the run.
        TraceError: a log holds no metric.

    Example:
        >>> [one.diagnosis.detection.verdict for one in judge_attempts(read("resumed.log")[0])]
        ['alarm', 'healthy']
    """
    last, good = trace_of(run), traces_of(healthy)
    if mixed(run):  # what stood before each "resume" is no attempt of one run either
        return (JudgedAttempt("", last, diagnose(run, good), int(last.steps.index[0])),)
    earlier = attempts(run) if isinstance(run, LogTrace) else ()
    count = len(earlier) + 1
    starts = [int(last.steps.index[0]), *(one.resume.step for one in earlier)]
    found = [
        JudgedAttempt(f"attempt {number} of {count}", one.trace, diagnose(one.trace, good), start, str(one.resume))
        for number, (one, start) in enumerate(zip(earlier, starts, strict=False), 1)
    ]
    label = f"attempt {count} of {count}" if earlier else ""
    return (*found, JudgedAttempt(label, last, diagnose(last, good), starts[-1]))


def leading(judged: Sequence[JudgedAttempt]) -> JudgedAttempt:
    """Return the attempt that a run is known by: the first that departs, else the last."""
    return next((one for one in judged if one.alarmed), judged[-1])


def verdict_on(judged: Sequence[JudgedAttempt]) -> str:
    """Return the verdict on a run: of the attempt that leads, but "could not judge" where only a metric looks wrong.

    A number that cannot be right hides what it was to show; so its run is not called healthy.
    """
    if not judged:
        return UNCLEAR
    verdict = leading(judged).diagnosis.detection.verdict
    wrong = any(one.diagnosis.wrong_metrics for one in judged)
    return UNCLEAR if verdict == HEALTHY and wrong else verdict
