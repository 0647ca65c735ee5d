"""Alarms: which signal departed, from which step on, how far, and how it went on; and notes on what is none.

Axes: R row, X signal, S step, T candidate onset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeproxy.triage import repeated
from moeproxy.triage.arrays import finite, known_mean
from moeproxy.triage.course import JUMP, TRANSIENT, course
from moeproxy.triage.departure import MEMORY
from moeproxy.triage.jsonable import number, plain
from moeproxy.triage.judged import Judged, groups, meaning_of, original_value, scale_of, signal_name, unit_of
from moeproxy.triage.reference import OWN_NOISE, REACH, STRONGEST, Departures

NOT_FINITE = "not finite"
SPIKES = "spikes"
OFTEN = "as often as single steps of healthy runs stand out"
BEFORE = 20
"""Steps before the onset, at most, of which the sentence gives the mean."""

LASTING = 3
"""Values that are not finite within `NEAR` steps: fewer are a note."""
NEAR = 20

FAR = 1e50
"""Size from which on a mean is not given: judged values are bounded (`moeproxy.triage.judged`)."""

SHOWN = 10
"""Steps, at most, over which the sentence gives what was and what was to be expected."""


@dataclass(frozen=True)
class Alarm:
    """One signal that departs.

    Args:
        signal: canonical or derived name, with `/<layer>` when one layer stands out.
        onset: first step of the departure.
        direction: "up", "down" or "not finite".
        size: largest shift, in healthy spreads (or, without healthy runs, in standard errors of the run's own noise);
            infinite where the values are not finite.
        excess: how many times it exceeds what `against` says: the threshold of this signal, or a fixed limit.
        before: mean in the signal's own unit before the onset; NaN when unknown. This and the next two are geometric
            means of signals that are judged on a logarithmic scale (`mean_of`).
        after, expected: means over the steps `shown` where the departure is largest: of the run, and what healthy runs
            made to be expected there (alone: of the steps just before, and of what is back of those after it too).
        shown: first and last step of these.
        kind: "jump", "drift", "transient" or "spikes".
        recovered: step from which a transient is back.
        steps: number of steps from the onset to the end, or to the recovery; of spikes, how many there are.
        size_in: what `size` is counted in.
        against: what `excess` is a multiple of, in words.
        again: step at which a transient that was back departs again.
    """

    signal: str
    onset: int
    direction: str
    size: float
    excess: float
    before: float
    after: float
    expected: float
    shown: tuple[int, int]
    kind: str
    recovered: int | None = None
    steps: int = 0
    size_in: str = "healthy spreads"
    against: str = REACH
    again: int | None = None

    @property
    def by_limit(self) -> bool:
        """Whether it is held against a fixed limit, which no healthy run passes."""
        return self.against != REACH

    @property
    def at_once(self) -> bool:
        """Whether it makes the run alarm whatever else was measured: by values that are not finite, or many spikes."""
        return self.direction == NOT_FINITE or self.kind == SPIKES

    @property
    def sentence(self) -> str:
        """The alarm in plain words; every number stands in a field."""
        meaning = f"{self.signal}, {meaning_of(self.signal)},"
        back = f", and is back from step {self.recovered} on" if self.recovered is not None else ""
        back += f" until it departs again at step {self.again}" if self.again is not None else ""
        if self.direction == NOT_FINITE:
            was = "" if np.isnan(self.before) else f"; it was {judged_number(self.before)}"
            return f"{meaning} is not finite from step {self.onset} on (at {self.steps} steps){back}{was}."
        unit = f" {unit_of(self.signal)}".rstrip()
        went = {JUMP: "jumps", TRANSIENT: "moves"}.get(self.kind, "drifts")
        after, expected = judged_number(self.after), judged_number(self.expected)
        if self.kind == SPIKES:
            return (
                f"{meaning} spikes {self.direction} again and again from step {self.onset} on, at {self.steps} steps "
                f"up to step {self.shown[1]}: {after}{unit} there ({mean_of(self.signal)}), {expected} between them; "
                f"{times(self.size)} {self.size_in}, {times(self.excess)} times {self.against}."
            )
        return (
            f"{meaning} {went} {self.direction} at step {self.onset}: {after}{unit} ({mean_of(self.signal)} "
            f"over steps {self.shown[0]} to {self.shown[1]}), where {expected} {self._usual}; "
            f"{times(self.size)} {self.size_in}, {times(self.excess)} times {self.against}{back}."
        )

    @property
    def _usual(self) -> str:
        """What `expected` is, in words: a run judged alone says only what was, not what should have been."""
        if self.size_in != OWN_NOISE:
            return "was to be expected"
        return "was usual just before" if self.recovered is None else "was usual before and after"

    def to_dict(self) -> dict[str, Any]:
        """Return the alarm as JSON values, its sentence too; null where a value is not finite."""
        return plain({**self.__dict__, "sentence": self.sentence})

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Alarm:
        """Return the alarm that `to_dict` wrote."""
        fields = {name: value for name, value in stored.items() if name != "sentence"}
        sizes = {name: number(fields[name], np.inf) for name in ("size", "excess")}
        means = {name: number(fields[name]) for name in ("before", "after", "expected")}
        return Alarm(**{**fields, **sizes, **means, "shown": tuple(fields["shown"])})


def mean_of(row: str) -> str:
    """Return in words which mean is given of a signal: that of the scale on which it is judged."""
    return {"log": "geometric mean", "logit": "mean of the logit"}.get(scale_of(row), "mean")


def judged_number(value: float) -> str:
    """Return a mean of values that were judged, in three digits, and of those beyond `FAR` only that they are."""
    return f"beyond {np.sign(value) * FAR:.0e}" if abs(value) >= FAR else f"{value:.3g}"


def times(value: float) -> str:
    """Return a multiple in words: one decimal, or three digits when it is large."""
    return f"{value:.1f}" if value < 1e4 else f"{value:.3g}"


def alarms_of(table: Judged, found: Departures, since: int | None = None) -> tuple[Alarm, ...]:
    """Return the alarms of a run that departs, the earliest first, of equal onsets the largest first.

    Args:
        table, found: the run.
        since: step from which the run departs, once that is known. Alarms by signals whose own onset lies before it are
            looked for from there on: what moves a little is dated worse than what moves much. One that is over by then
            is left out (see `moeproxy.triage.noticed.earlier`).
    """
    broken = _broken(table)
    quiet = {alarm.signal.partition("/")[0] for alarm in broken}
    chosen = [x for x in _chosen(found, bool(broken)) if found.names[x] not in quiet]
    members = dict(groups(found.rows))
    first = 0 if since is None else int(np.searchsorted(found.steps_S, since))
    kept = [x for x in chosen if since is None or not _over(found, x, first)]
    if not kept and not broken:
        kept = chosen  # all of it is over by then: the run departs by what comes back, and that is the evidence
    places = {x: _place(found, x, first) for x in kept}
    if since is not None and kept and not broken:
        places |= _pinned(found, places, first)
    moved = [_alarm(table, found, x, members[found.names[x]], places[x]) for x in kept]
    named = {signal_name(alarm.signal) for alarm in moved} | quiet
    spiking = [alarm for alarm in _spiking(table, found, since) if signal_name(alarm.signal) not in named]
    return tuple(sorted([*broken, *spiking, *moved], key=lambda alarm: (alarm.onset, -alarm.excess)))


def _chosen(found: Departures, broken: bool) -> list[int]:
    """Return the signals that are the evidence, the largest first."""
    excess_X = found.excess_XT.max(1)
    order = [int(x) for x in np.argsort(-excess_X)]
    loud = [x for x in order if excess_X[x] > found.single_threshold]
    # The run departs by several signals together though none of them does alone: these are the evidence.
    together = found.departs and not broken
    return loud or ([x for x in order[:STRONGEST] if excess_X[x] > 0] if together else [])


def _over(found: Departures, x: int, first: int) -> bool:
    """Whether a signal stays below half of its largest excess from a step on: what it did is over by then."""
    later_T = found.onset_T >= first
    return bool(found.excess_XT[x, later_T].max(initial=0.0) < found.excess_XT[x].max() / 2)


def _place(found: Departures, x: int, first: int) -> int:
    """Return the place of a signal's onset among the candidates from the step with index `first` on."""
    later_T = found.onset_T >= first
    contrast_T = np.where(later_T, found.contrast_XT[x], -1.0)
    place = int(contrast_T.argmax())
    return place if contrast_T[place] >= 1 else int(np.where(later_T, found.excess_XT[x], -1.0).argmax())


def _pinned(found: Departures, places: Mapping[int, int], first: int) -> dict[int, int]:
    """Return where the signal that changes most at the run's onset begins, when none of them begins there."""
    here = np.flatnonzero(found.onset_T == first)
    if not len(here) or min(places.values()) <= here[0] or found.from_start:
        return {}
    most = max(places, key=lambda x: found.contrast_XT[x, here[0]])
    return {most: int(here[0])} if found.contrast_XT[most, here[0]] > 1 else {}


def lasting_break(broken_S: np.ndarray) -> int | None:
    """Return the index of the first of several values close together that are not finite, None without such.

    At the end one is enough: nothing shows that the run recovered, and many a run dies of it.
    """
    places = np.flatnonzero(broken_S)
    for first, last in zip(places, places[LASTING - 1 :], strict=False):
        if last - first < NEAR:
            return int(first)
    if not len(places) or places[-1] < len(broken_S) - 1:
        return None
    finite_places = np.flatnonzero(~broken_S)
    return int(finite_places[-1]) + 1 if len(finite_places) else 0


def _broken(table: Judged) -> list[Alarm]:
    alarms = []
    for index, row in enumerate(table.rows):
        onset = lasting_break(table.broken_RS[index])
        if onset is not None:
            before = _mean(table, index, max(0, onset - BEFORE), onset)
            steps = int(table.broken_RS[index, onset:].sum())
            step, last = (int(table.steps_S[place]) for place in (onset, np.flatnonzero(table.broken_RS[index])[-1]))
            again = _finite_again(table, index)
            kind = JUMP if again is None else TRANSIENT
            nan = float("nan")
            alarms.append(
                Alarm(row, step, NOT_FINITE, np.inf, np.inf, before, nan, nan, (step, last), kind, again, steps)
            )
    return alarms


def _spiking(table: Judged, found: Departures, since: int | None) -> list[Alarm]:
    """Return an alarm for each signal whose single steps stand out again and again, from a step on if that is given."""
    values_RS, alarms = finite(table.at(found.rows, found.steps_S)), dict[str, Alarm]()
    for one in repeated.repeated(found.spikes_RS):
        name, places = found.rows[one.row], list(one.places)
        onset = int(found.steps_S[places[0]])
        if signal_name(name) in alarms or (since is not None and onset < since):
            continue
        values_S = values_RS[one.row]
        rest = np.setdiff1d(np.arange(places[0], len(values_S)), places)
        after, between = (float(known_mean(values_S[index], axis=0)) for index in (places, rest))
        alarms[signal_name(name)] = Alarm(
            signal=name,
            onset=onset,
            direction="up" if after > between else "down",
            size=abs(after - between) / float(found.noise_R[one.row]),
            excess=one.most / (repeated.LEAST - 1),
            before=original_value(name, float(known_mean(values_S[: places[0]], axis=0))),
            after=original_value(name, after),
            expected=original_value(name, between),
            shown=(onset, int(found.steps_S[places[-1]])),
            kind=SPIKES,
            steps=len(places),
            size_in="times the noise of its single steps",
            against=OFTEN,
        )
    return list(alarms.values())


def _finite_again(table: Judged, index: int) -> int | None:
    """Return the step from which a signal is finite again to the end, for at least `LASTING` steps."""
    last = int(np.flatnonzero(table.broken_RS[index])[-1])
    after = np.flatnonzero(np.isfinite(table.values_RS[index, last + 1 :]))
    return int(table.steps_S[last + 1 + after[0]]) if len(after) >= LASTING else None


def _alarm(table: Judged, found: Departures, x: int, index_R: np.ndarray, place: int) -> Alarm:
    """Describe the departure of one signal, at a candidate onset, by the row of it that moves most."""
    onset = 0 if found.from_start and found.early_X[x] > 1 else int(found.onset_T[place])
    row = int(index_R[found.size_RT[index_R].max(1).argmax()])
    went = course(found.residual_RS[row], onset)
    name, stop = found.rows[row], len(found.steps_S) if went.recovered is None else went.recovered
    # Of what is back the window shown ends before that.
    here = (found.onset_T >= onset) & (found.onset_T <= max(onset, stop - SHOWN if went.recovered else stop))
    peak = int(np.where(here, found.size_RT[row], -1.0).argmax())
    after, expected, shown = _seen(found, row, peak, onset, stop)
    index, start = table.rows.index(name), int(np.searchsorted(table.steps_S, found.steps_S[onset]))
    end = found.steps_S[went.recovered] if went.recovered is not None and went.recovered < len(found.steps_S) else None
    limit = found.limits.get(found.names[x])
    return Alarm(
        signal=name,
        onset=int(found.steps_S[onset]),
        direction="up" if after > expected else "down",
        size=float(found.size_RT[row, peak]),
        excess=float(found.excess_XT[x].max()) if limit is None else limit.ratio,
        before=_mean(table, index, max(0, start - BEFORE), start),
        after=original_value(name, after),
        expected=original_value(name, expected),
        shown=shown,
        kind=went.kind,
        recovered=None if end is None else int(end),
        again=None if went.again is None else int(found.steps_S[went.again]),
        steps=int((found.steps_S[-1] if end is None else end) - found.steps_S[onset]) + (end is None),
        size_in=found.size_in,
        against=REACH if limit is None else limit.words,
    )


def _seen(found: Departures, row: int, peak: int, onset: int, stop: int) -> tuple[float, float, tuple[int, int]]:
    """Return mean and expected mean, transformed, where a row departs most, and the first and last step of it."""
    start = int(found.onset_T[peak])
    window = slice(start, min(start + SHOWN, stop))
    left_S = found.residual_RS[row] * found.noise_R[row]
    own = left_S[max(0, onset - (BEFORE if found.size_in == OWN_NOISE else MEMORY)) : onset]
    if stop < len(left_S):  # of what is back, both sides tell where it would have been
        own = np.concatenate([own[-SHOWN:], left_S[stop : stop + SHOWN]])
    base = float(known_mean(own, axis=0)) if found.change_RT[row, peak] and len(own) else 0.0
    trend = float(known_mean(found.trend_RS[row, window], axis=0))
    after = trend + float(known_mean(left_S[window], axis=0))
    steps = found.steps_S[window]
    return after, trend + (0.0 if np.isnan(base) else base), (int(steps[0]), int(steps[-1]))


def _mean(table: Judged, index: int, start: int, stop: int) -> float:
    return original_value(table.rows[index], float(known_mean(table.finite_RS[index, start:stop], axis=0)))


def usual_heading(alarms: Sequence[Alarm]) -> str:
    """Return what `Alarm.expected` is called in a table of one run's alarms: alone, only what was is known."""
    return "usual before" if any(alarm.size_in == OWN_NOISE for alarm in alarms) else "expected"
