"""Name the likely cause of a departure: ranked faults of the catalogue with confidence and evidence, or "unknown".

The fingerprint of the run is compared with those of recorded runs of every fault (`Library`). NumPy and SciPy only.

Axes: C fault, X signal, W window, F feature.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.trace import Trace
from moeproxy.triage.alarms import NOT_FINITE
from moeproxy.triage.catalogue import Entry, load_catalogue
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, Detection, Runs, measure, unclear
from moeproxy.triage.fingerprint import BROKEN, SPANS, WINDOW_NAMES, Fingerprint, fingerprint
from moeproxy.triage.jsonable import number, plain, sure
from moeproxy.triage.judged import Judged
from moeproxy.triage.learned import load_library
from moeproxy.triage.library import Library
from moeproxy.triage.logged import trace_of, traces_of
from moeproxy.triage.metric_checks import wrong_metrics
from moeproxy.triage.mixed import mixed

FORMAT, VERSION = "moeproxy.diagnosis", 1
SHOWN = 5
"""Causes that a diagnosis lists."""

EXPECTED, SEEN = 1.0, 1.0
"""A change counts, expected or seen, from this many times what healthy runs reach."""

LEAST = 0.2
"""Confidence that the first cause must have, beside a change that speaks for it; else the run is called unknown."""

_BROKEN_SHOWN = 2
"""Signals that are not finite, at most, among the evidence for a cause: they often are so together."""

_OFTEN = 1 / BROKEN
"""Share of recorded runs from which on a signal is said not to be finite in them."""

RIVAL = 0.5
"""A cause with this share of the first one's confidence is a rival, never a mere consequence."""


@dataclass(frozen=True)
class Evidence:
    """One change that speaks for or against a cause, or a signal that is not finite any more.

    Args:
        signal, window: what changed, and when after the onset; `NOT_FINITE` in place of when.
        seen: change in the run, in units of what healthy runs reach; 1 where it is not finite, 0 where it is.
        expected: change in recorded runs of the cause (the mean of its asinh, turned back); the share of them in which
            it is not finite.
    """

    signal: str
    window: str
    seen: float
    expected: float

    @property
    def broken(self) -> bool:
        """Whether it is about values that are not finite, not about a change."""
        return self.window == NOT_FINITE

    @property
    def cells(self) -> tuple[str, str]:
        """What was seen, and what recorded runs show, as a table has it."""
        if self.broken:
            return _finite(self.seen > 0.5), _finite(self.expected > _OFTEN)
        return f"{self.seen:+.1f}", f"{self.expected:+.1f}"

    @property
    def sentence(self) -> str:
        """The evidence in words."""
        if self.broken:
            here, there = (cell == NOT_FINITE for cell in self.cells)
            runs = "in recorded runs too" if here == there else f"in recorded runs it is{'' if here else ' not'}"
            return f"{self.signal} is {_finite(here)} ({runs})"
        return f"{self.signal} {self.window} {_times(self.seen)} (in recorded runs {_times(self.expected)})"


@dataclass(frozen=True)
class Cause:
    """A fault that may have caused the departure.

    Args:
        fault, family, title: of the catalogue.
        confidence: probability, calibrated on runs whose seed was held out.
        supports, contradicts: evidence for and against, the strongest first.
        missing: signals that would tell and are not logged.
        explains: alarmed signals that follow from this cause.
        consequences: faults that the fingerprint resembles too and that explain nothing further.
        check: what to look at next, to tell this cause from its neighbours.
        remedy: what usually helps.
        twin: public report of such a case.
    """

    fault: str
    family: str
    title: str
    confidence: float
    supports: tuple[Evidence, ...]
    contradicts: tuple[Evidence, ...]
    missing: tuple[str, ...]
    explains: tuple[str, ...]
    consequences: tuple[str, ...]
    check: str
    remedy: str
    twin: str


@dataclass(frozen=True)
class Diagnosis:
    """What probably went wrong in a run.

    Args:
        detection: what was seen.
        causes: ranked; empty without an alarm.
        unknown: whether the run is like no known fault.
        distance, farthest: distance per feature to the nearest fault, and what known faults stay below.
        wrong_metrics: metrics that cannot be right, to be looked at first.
        n_recorded: recorded runs that it was compared with.
    """

    detection: Detection
    causes: tuple[Cause, ...]
    unknown: bool
    distance: float
    farthest: float
    wrong_metrics: tuple[str, ...]
    n_recorded: int

    @property
    def sentences(self) -> tuple[str, ...]:
        """The diagnosis in plain words."""
        first = [f"The metric itself looks wrong: {sentence}" for sentence in self.wrong_metrics]
        if self.detection.verdict != ALARM:
            return tuple(first)
        if self.unknown:
            return (*first, self._unknown())
        told = (_told(place, cause) for place, cause in enumerate(self.causes, start=1))
        return (*first, "Likely causes; changes are in units of what healthy runs reach:", *told)

    def _unknown(self) -> str:
        if not self.causes:
            return "Unknown: of what departs nothing is among the signals by which faults are known."
        nearest = f"the nearest is {self.causes[0].fault}"
        if self.distance > self.farthest:
            limit = f"distance {self.distance:.2f} a feature; known faults stay below {self.farthest:.2f}"
            return f"Unknown: it is like no recorded fault ({limit}); {nearest}."
        return f"Unknown: no fault stands out; {nearest}, with a confidence of {sure(self.causes[0].confidence)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        causes = [asdict(cause) for cause in self.causes]
        fields = {name: value for name, value in self.__dict__.items() if name not in ("detection", "causes")}
        stored = {"format": FORMAT, "version": VERSION, **fields, "causes": causes, "sentences": self.sentences}
        return plain({**stored, "detection": self.detection.to_dict()})

    def save(self, path: str | Path) -> Path:
        """Write the diagnosis as JSON, atomically, and return the path."""
        with atomic_file(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Diagnosis:
        """Read what `save` wrote.

        Raises:
            ComparisonError: the file is absent or no diagnosis.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if (stored.pop("format"), stored.pop("version")) != (FORMAT, VERSION):
                raise ValueError("another format")
            stored.pop("sentences")
            causes = tuple(_cause_of(cause) for cause in stored.pop("causes"))
            detection = Detection.from_dict(stored.pop("detection"))
            wrong = tuple(stored.pop("wrong_metrics"))
            numbers = {name: number(stored.pop(name)) for name in ("distance", "farthest")}
            return Diagnosis(detection=detection, causes=causes, wrong_metrics=wrong, **numbers, **stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError("no diagnosis", where=path, expected="a file written by Diagnosis.save") from error

    def __repr__(self) -> str:
        if self.detection.verdict != ALARM:
            return f"Diagnosis({self.detection.verdict})"
        named = ", ".join(f"{cause.fault} {sure(cause.confidence)}" for cause in self.causes[:3])
        return f"Diagnosis({'unknown, nearest ' if self.unknown else ''}{named}; onset {self.detection.onset})"

    def _repr_html_(self) -> str:
        lines = [html.escape(sentence) for sentence in (self.detection.sentences[0], *self.sentences)]
        return f"<p><b>{lines[0]}</b></p><ol>{''.join(f'<li>{line}</li>' for line in lines[1:])}</ol>"


def diagnose(
    run: Trace | LogTrace,
    healthy: Runs = (),
    *,
    library: Library | None = None,
    catalogue: Mapping[str, Entry] | None = None,
) -> Diagnosis:
    """Judge a run, and rank the causes of what is seen.

    Args:
        run: a trace, or a run read from a log; a log that holds two runs cannot be judged.
        healthy: at least six good runs of the same model and settings, or none.
        library: fingerprints of known faults, of the same way of judging; by default what is shipped.
        catalogue: words for the faults; by default what is shipped.

    Raises:
        ComparisonError, TraceError: as for `detect`.

    Example:
        >>> diagnose(trace, healthy).causes[0].fault
        'stale_rollout'
    """
    good = traces_of(healthy)
    mode = BESIDE if good else ALONE
    known = library or load_library(mode)
    trace = trace_of(run)
    table = Judged.of(trace)
    if reason := mixed(run):
        seen = unclear(table, (reason,), mode, len(good))
        return Diagnosis(seen, (), False, float("nan"), known.farthest, (), len(known.fault_N))
    detection, found = measure(trace, table, good)
    wrong = wrong_metrics(trace)
    if detection.verdict != ALARM or found is None or detection.onset is None:
        return Diagnosis(detection, (), False, float("nan"), known.farthest, wrong, len(known.fault_N))
    mark = fingerprint(table, found, detection.onset, known.units)
    return conclude(known, mark, detection, catalogue or load_catalogue(), wrong)


def conclude(
    library: Library,
    mark: Fingerprint,
    detection: Detection,
    catalogue: Mapping[str, Entry],
    wrong: tuple[str, ...] = (),
) -> Diagnosis:
    """Return the diagnosis of a fingerprint of a run that departs: ranked causes, or that it is like no known fault."""
    features_F, n_recorded = mark.features(library.signals), len(library.fault_N)
    if not np.isfinite(features_F).any():
        return Diagnosis(detection, (), True, float("nan"), library.farthest, wrong, n_recorded)
    distance = library.per_feature(features_F)
    causes = rank(library, mark, detection, catalogue)
    unknown = distance > library.farthest or not stands_out(causes[0])
    return Diagnosis(detection, causes, unknown, distance, library.farthest, wrong, n_recorded)


def stands_out(cause: Cause) -> bool:
    """Return whether a first cause is likely enough, and explains something, so that it is named."""
    return cause.confidence >= LEAST and bool(cause.supports or cause.explains)


def likeliest(library: Library, features_F: np.ndarray) -> list[tuple[str, float]]:
    """Return the likeliest faults of a fingerprint with their confidences, whatever follows from whatever."""
    confidence_C = library.confidences(features_F)
    return [(library.faults[c], float(confidence_C[c])) for c in np.argsort(-confidence_C)[:SHOWN]]


def rank(
    library: Library, mark: Fingerprint, detection: Detection, catalogue: Mapping[str, Entry]
) -> tuple[Cause, ...]:
    """Return the likeliest causes of a fingerprint, consequences under their causes."""
    features_F = mark.features(library.signals)
    causes = [
        _cause(library, fault, features_F, confidence, detection, catalogue)
        for fault, confidence in likeliest(library, features_F)
    ]
    first = causes[0]
    under = [one for one in causes[1:] if one.confidence < RIVAL * first.confidence and _covered(one, first)]
    beside = [one for one in causes[1:] if one not in under]
    return (replace(first, consequences=tuple(one.fault for one in under)), *beside)


def _covered(one: Cause, first: Cause) -> bool:
    return set(one.explains) <= set(first.explains)


def _cause(
    library: Library,
    fault: str,
    features_F: np.ndarray,
    confidence: float,
    detection: Detection,
    catalogue: Mapping[str, Entry],
) -> Cause:
    kind = library.kind_of(fault, features_F)
    entry = catalogue.get(fault) or Entry(fault, "?", fault, "", "", "", "")
    n_changes = len(library.signals) * len(SPANS)
    seen_F = np.sinh(features_F[:n_changes])
    expected_F = np.sinh(library.mean_KF[kind, :n_changes])
    evidence = [
        Evidence(library.signals[f // len(SPANS)], WINDOW_NAMES[f % len(SPANS)], float(seen_F[f]), float(expected_F[f]))
        for f in range(n_changes)
        if np.isfinite(expected_F[f])
    ]
    here = [one for one in evidence if np.isfinite(one.seen)]
    supports = [e for e in here if abs(e.expected) >= EXPECTED and e.seen * e.expected > 0 and abs(e.seen) >= SEEN]
    contradicts = [e for e in here if _contradicts(e)]
    breaks = _breaks(library.signals, features_F[n_changes:], library.mean_KF[kind, n_changes:])
    supports += [e for e in breaks if e.seen and e.expected > _OFTEN]
    contradicts += [e for e in breaks if (e.seen > 0.5) != (e.expected > _OFTEN)]
    missing = [e for e in evidence if not np.isfinite(e.seen) and abs(e.expected) >= 2 * EXPECTED]
    alarmed = {alarm.signal.partition("/")[0] for alarm in detection.alarms}
    broken = {e.signal for e in breaks if e.expected > _OFTEN}
    return Cause(
        fault=fault,
        family=entry.family,
        title=entry.title,
        confidence=confidence,
        supports=_strongest(supports),
        contradicts=_strongest(contradicts),
        missing=tuple(dict.fromkeys(e.signal for e in missing))[:SHOWN],
        explains=tuple(sorted(({e.signal for e in supports} | broken) & alarmed)),
        consequences=(),
        check=entry.check,
        remedy=entry.remedy,
        twin=entry.twin,
    )


def _breaks(signals: Sequence[str], seen_X: np.ndarray, mean_X: np.ndarray) -> list[Evidence]:
    """Return which signals are not finite any more, here or in recorded runs: of those that are logged here."""
    known = np.isfinite(seen_X) & np.isfinite(mean_X) & ((seen_X > 0) | (mean_X > 1))
    return [
        Evidence(signals[x], NOT_FINITE, float(seen_X[x] > 0), float(mean_X[x] / BROKEN))
        for x in map(int, np.flatnonzero(known))
    ]


def _finite(broken: bool) -> str:
    return NOT_FINITE if broken else "finite"


def _contradicts(evidence: Evidence) -> bool:
    """Whether a change that recorded runs show is absent or opposite, or one is there that none shows."""
    if abs(evidence.expected) >= 2 * EXPECTED:
        return evidence.seen * evidence.expected <= 0 or abs(evidence.seen) < SEEN / 2
    return abs(evidence.expected) < EXPECTED / 2 and abs(evidence.seen) >= 2 * SEEN


def _strongest(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    broken = [one for one in evidence if one.broken]
    changes = sorted((e for e in evidence if not e.broken), key=lambda e: -max(abs(e.expected), abs(e.seen)))
    return tuple([*broken[:_BROKEN_SHOWN], *changes][:SHOWN])


def _told(place: int, cause: Cause) -> str:
    words = [f"{place}. {cause.fault} ({cause.title}), confidence {sure(cause.confidence)}"]
    if cause.supports:
        words.append(f"for: {'; '.join(one.sentence for one in cause.supports[:3])}")
    if cause.contradicts:
        words.append(f"against: {'; '.join(one.sentence for one in cause.contradicts[:2])}")
    if cause.missing:
        words.append(f"not logged, would tell: {', '.join(cause.missing)}")
    if cause.consequences:
        words.append(f"resembles as a consequence: {', '.join(cause.consequences)}")
    if cause.check:
        words.append(f"check next: {cause.check.rstrip('.')}")
    return ". ".join(words) + "."


def _times(change: float) -> str:
    if abs(change) < 0.5:
        return "unchanged"
    return f"{'up' if change > 0 else 'down'} {abs(change):.1f}"


def _cause_of(stored: dict[str, Any]) -> Cause:
    evidence = {name: tuple(Evidence(**one) for one in stored[name]) for name in ("supports", "contradicts")}
    lists = {name: tuple(stored[name]) for name in ("missing", "explains", "consequences")}
    return Cause(**{**stored, **evidence, **lists})
