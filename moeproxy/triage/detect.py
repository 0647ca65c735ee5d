"""Find out whether a run went wrong, from which step on, and by which signals.

Two ways: beside healthy runs of the same model and settings, or alone, by the run's own beginning and by what healthy
runs of the benchmark do. NumPy, SciPy and ruptures only.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.alarms import NOT_FINITE, SPIKES, Alarm, alarms_of, times
from moeproxy.triage.alone import Priors
from moeproxy.triage.healthy import Healthy
from moeproxy.triage.jsonable import number, plain
from moeproxy.triage.judged import Judged
from moeproxy.triage.logged import trace_of, traces_of
from moeproxy.triage.metric_checks import at_rest
from moeproxy.triage.mixed import mixed
from moeproxy.triage.noticed import earlier, not_finite, notes_of
from moeproxy.triage.own_past import FEWEST_STEPS as FEWEST_ALONE
from moeproxy.triage.reference import FEWEST_STEPS as FEWEST_BESIDE
from moeproxy.triage.reference import Departures

FORMAT, VERSION = "moeproxy.detection", 1
HEALTHY, ALARM, UNCLEAR = "healthy", "alarm", "could not judge"
BESIDE, ALONE = "beside healthy runs", "alone"

_LOUD, _SHARE = 100.0, 0.3
"""Of the alarms with this share of the largest excess the earliest may be the onset; beyond `_LOUD` all are alike."""

_CERTAIN = 5.0
"""Excess, beside healthy runs, from which an alarm may be the onset however large the others are.

On the recorded runs of the original, onsets within two steps stay what they were (0.99 clear, 0.88 subtle) with it;
alone, where signals drift by themselves, they would fall from 0.89 to 0.86 (clear)."""

_BLIND = "Alone, a fault that acted from the beginning cannot be seen: it is what the run is compared with."

Runs = Sequence[Trace | LogTrace]
"""Runs, each a trace or read from a log."""


@dataclass(frozen=True)
class Detection:
    """Whether a run went wrong.

    Args:
        verdict: "healthy", "alarm" or "could not judge": the run is too short, or part of it lies beyond the healthy
            runs and the rest does not alarm.
        onset: step from which it departs, None without an alarm.
        strength: mean excess of the strongest signals, at its largest.
        threshold: strength beyond which the run alarms.
        alarms: the signals that depart, the earliest first.
        notes: what was seen and is no alarm; what limits the verdict.
        mode: "beside healthy runs" or "alone".
        n_healthy: healthy runs it was judged by.
        n_steps: steps judged.
        signals: names of the signals judged.
    """

    verdict: str
    onset: int | None
    strength: float
    threshold: float
    alarms: tuple[Alarm, ...]
    notes: tuple[str, ...]
    mode: str
    n_healthy: int
    n_steps: int
    signals: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict in plain words, then its alarms and notes."""
        return (self._headline(), *(alarm.sentence for alarm in self.alarms), *self.notes)

    def _headline(self) -> str:
        if self.verdict == UNCLEAR:
            return "Could not judge." if np.isnan(self.strength) else "Could not judge the whole run."
        by = f"{self.n_healthy} healthy runs" + (" of the benchmark" if self.mode == ALONE else "")
        what = "1 signal" if len(self.signals) == 1 else f"{len(self.signals)} signals"
        judged = f"{what} over {self.n_steps} steps, judged {self.mode}, by {by}"
        level = f"strength {times(self.strength)}, healthy runs stay below {times(self.threshold)}"
        if self.verdict == ALARM and not self.strength > self.threshold:
            level = f"{self._by_itself()}, which is an alarm by itself (all together have {level})"
        if self.verdict == HEALTHY:
            return f"No alarm: {judged}; {level}."
        return f"The run departs from step {self.onset} on: {judged}; {level}."

    def _by_itself(self) -> str:
        if any(alarm.direction == NOT_FINITE for alarm in self.alarms):
            return "values are not finite"
        if any(alarm.at_once for alarm in self.alarms):
            return "single steps stand out again and again"
        most = max(self.alarms, key=lambda alarm: alarm.excess)
        return f"{most.signal} has {times(most.excess)} times {most.against}"

    def to_dict(self) -> dict[str, Any]:
        """Return the detection as JSON values."""
        fields = {name: value for name, value in self.__dict__.items() if name != "alarms"}
        return plain({"format": FORMAT, "version": VERSION, **fields, "alarms": [a.to_dict() for a in self.alarms]})

    def save(self, path: str | Path) -> Path:
        """Write the detection as JSON, atomically, and return the path."""
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Detection:
        """Read what `save` wrote.

        Raises:
            ComparisonError: the file is absent or no detection.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            return Detection.from_dict(stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError("no detection", where=path, expected="a file written by Detection.save") from error

    @staticmethod
    def from_dict(stored: dict[str, Any]) -> Detection:
        """Return the detection that `to_dict` wrote."""
        if (stored["format"], stored["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {stored['format']!r}, version {stored['version']!r}")
        fields = {name: value for name, value in stored.items() if name not in ("format", "version", "alarms")}
        lists = {name: tuple(fields[name]) for name in ("notes", "signals")}
        numbers = {name: number(fields[name]) for name in ("strength", "threshold")}
        alarms = tuple(Alarm.from_dict(alarm) for alarm in stored["alarms"])
        return Detection(**{**fields, **lists, **numbers, "alarms": alarms})

    def __repr__(self) -> str:
        where = f" from step {self.onset}, {len(self.alarms)} signals" if self.verdict == ALARM else ""
        return f"Detection({self.verdict}{where}; strength {self.strength:.2f}, threshold {self.threshold:.2f})"

    def _repr_html_(self) -> str:
        first, *rest = (html.escape(sentence) for sentence in self.sentences)
        return f"<p><b>{first}</b></p><ul>{''.join(f'<li>{sentence}</li>' for sentence in rest)}</ul>"


def detect(run: Trace | LogTrace, healthy: Runs = (), *, priors: Priors | None = None) -> Detection:
    """Judge one run.

    Args:
        run: a trace, or a run read from a log.
        healthy: at least six good runs of the same model and settings; without any the run is judged alone.
        priors: what healthy runs do by themselves, for a run judged alone; by default what is shipped.

    Raises:
        ComparisonError: fewer than six healthy runs that serve, or they share no step or signal with the run.
        TraceError: a log holds no metric.

    Example:
        >>> detect(trace, healthy).onset
        20
    """
    trace, good = trace_of(run), traces_of(healthy)
    table = Judged.of(trace)
    if reason := mixed(run):
        return unclear(table, (reason,), BESIDE if good else ALONE, len(good))
    return measure(trace, table, good, priors)[0]


def measure(
    trace: Trace, table: Judged, healthy: Sequence[Trace] = (), priors: Priors | None = None
) -> tuple[Detection, Departures | None]:
    """Judge one run, and return what was measured too, None where it could not be judged (see `detect`)."""
    mode, good = BESIDE if len(healthy) else ALONE, None
    if reasons := _limits(trace, table, mode):
        return unclear(table, reasons, mode, len(healthy)), None
    if mode == ALONE:
        known = priors or Priors.load()
        found, warned, n_healthy = known.departures(table), (_BLIND,), known.n_runs
    else:
        good = Healthy.of(trace, table, healthy)
        if len(good.steps_S) < FEWEST_BESIDE:
            reason = f"The run shares {len(good.steps_S)} steps with the healthy runs; {FEWEST_BESIDE} are needed."
            return unclear(table, (reason,), mode, len(good.traces)), None
        found, n_healthy, odd = good.measure(table)
        warned = (*odd, *good.notes, *good.missing(table, found))
    if table.sparse:
        warned = (*warned, f"Not judged, since logged at less than half of the steps: {', '.join(table.sparse)}.")
    warned = (*warned, *at_rest(trace))
    seen = judge(table, found, mode, n_healthy, warned)
    if seen.verdict == HEALTHY and (open_end := good.uncovered(table) if good else ""):
        seen = replace(seen, verdict=UNCLEAR, notes=(open_end, *seen.notes))
    return seen, found


def judge(table: Judged, found: Departures, mode: str, n_healthy: int, warned: tuple[str, ...] = ()) -> Detection:
    """Return the verdict on measured departures."""
    strength_T = found.strength_T
    alarms = alarms_of(table, found)
    alarmed = found.departs or found.by_one or any(alarm.at_once for alarm in alarms)
    # Spikes date a run only where nothing else departs: what departs later often spikes before.
    dating = [alarm for alarm in alarms if alarm.kind != SPIKES] if found.departs or found.by_one else alarms
    onset = _onset(dating, found, mode) if alarmed else None
    told = notes_of(table, found, onset)
    if onset is not None:
        before, alarms = alarms, alarms_of(table, found, onset)
        # The headline never names a step at which no alarm begins.
        onset = min(alarm.onset for alarm in alarms)
        told = (*told, *earlier(before, alarms, onset))
    return Detection(
        verdict=ALARM if alarmed else HEALTHY,
        onset=onset,
        strength=float(strength_T.max()),
        threshold=found.run_threshold,
        alarms=alarms if alarmed else (),
        notes=(*told, *warned),
        mode=mode,
        n_healthy=n_healthy,
        n_steps=len(found.steps_S),
        signals=tuple(name for name in found.names if name in table.signals),
    )


def _onset(alarms: Sequence[Alarm], found: Departures, mode: str) -> int:
    """Return the step from which the run departs: where its signals change most, or an earlier loud alarm.

    A cause often moves one signal at once and the others later, more and more.
    """
    loudness = [_LOUD if alarm.at_once else min(alarm.excess, _LOUD) for alarm in alarms if not alarm.by_limit]
    most = int(found.steps_S[found.onset]) if found.departs else int(found.steps_S[-1])
    least = min(_SHARE * max(loudness, default=0.0), _CERTAIN if mode == BESIDE else np.inf)
    loud = [alarm.onset for alarm in alarms if alarm.by_limit or alarm.at_once or alarm.excess >= least]
    return min([most, *loud])


def _limits(trace: Trace, table: Judged, mode: str) -> tuple[str, ...]:
    """Return why a run cannot be judged; nothing when it can."""
    if not table.rows:
        named = ", ".join(table.sparse or trace.signals[:5]) or "nothing"
        return (f"No signal that says how training goes is logged at half of the steps ({named}).",)
    needed, n_steps = FEWEST_BESIDE if mode == BESIDE else FEWEST_ALONE, len(table.steps_S)
    if n_steps < needed:
        has = "1 step" if n_steps == 1 else f"{n_steps} steps"
        return (f"The run has {has} with values; {mode} at least {needed} are needed.",)
    if not table.moves and mode == ALONE:
        what = "The only signal does not change" if len(table.signals) == 1 else "No signal changes"
        return (f"{what} in the whole run: log or run stands still.",)
    return ()


def unclear(table: Judged, reasons: tuple[str, ...], mode: str, n_healthy: int) -> Detection:
    """Return that a run could not be judged, and why."""
    nothing = float("nan")
    reasons = (*reasons, *not_finite(table))
    return Detection(UNCLEAR, None, nothing, nothing, (), reasons, mode, n_healthy, len(table.steps_S), table.signals)
