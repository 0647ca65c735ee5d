"""Score what a user is told of a run, by the signals that the log of a framework has.

Stricter than the scores of the parts: a run that does not alarm gets no cause, and neither does one that is called
unknown, so both count as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.trace import Trace
from moeproxy.triage.alone import Priors
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, Detection, judge
from moeproxy.triage.detection_scores import detection_scores
from moeproxy.triage.diagnose import likeliest, rank, stands_out
from moeproxy.triage.fingerprint import fingerprint
from moeproxy.triage.learn import Fits, Run, references, runs_of
from moeproxy.triage.library import Library
from moeproxy.triage.reference import Departures
from moeproxy.triage.signal_sets import signal_sets

FIRST = 3


def as_logged(traces: Sequence[Trace], libraries: Mapping[str, Library]) -> list[dict[str, Any]]:
    """Return the scores of detection, and of the causes that are given, by what is logged.

    Args:
        traces: recorded runs.
        libraries: fingerprints of all of them, by the way of judging. For a run only those of other seeds count, and in
            the columns `other_models` only those of other models, too.
    """
    rows = []
    for name, signals in signal_sets().items():
        runs = runs_of([_cut(trace, signals) for trace in traces])
        for mode, judged in ((BESIDE, _beside), (ALONE, _alone)):
            told = _Told(libraries[mode])
            table = pd.DataFrame([told.row(run, *found) for run, found in judged(runs)])
            rows += [{"signals": name, "mode": mode, **row} for row in _scored(table)]
    return rows


def _cut(trace: Trace, signals: frozenset[str] | None) -> Trace:
    if signals is None:
        return trace
    kept = [column for column in trace.steps if str(column).partition("/")[0] in signals]
    return Trace(trace.steps.loc[:, kept], None, trace.provenance)


Found = tuple[Detection, Departures]


def _beside(runs: Sequence[Run]) -> Iterator[tuple[Run, Found]]:
    for model, members in references(runs).items():
        fits, usual = Fits([run.table for run in members]), members[0].info.config
        mine = [run for run in runs if run.info.model == model and (not run.info.healthy or run.info.config == usual)]
        yield from _judged(mine, fits.departures, BESIDE, len(members))


def _alone(runs: Sequence[Run]) -> Iterator[tuple[Run, Found]]:
    for model in dict.fromkeys(run.info.model for run in runs):
        others = [run for run in runs if run.info.healthy and run.info.model != model]
        priors = Priors.of([run.table for run in others], [run.info.model for run in others])
        mine = [run for run in runs if run.info.model == model]
        yield from _judged(mine, priors.departures, ALONE, priors.n_runs)


def _judged(
    runs: Sequence[Run], depart: Callable[[Any], Departures], mode: str, n_healthy: int
) -> Iterator[tuple[Run, Found]]:
    for run in runs:
        found = depart(run.table)
        yield run, (judge(run.table, found, mode, n_healthy), found)


@dataclass
class _Told:
    """The causes that runs are told, each by a library without runs of its seed."""

    library: Library
    _rest: dict[tuple[int, str], Library] = field(default_factory=dict)

    def row(self, run: Run, seen: Detection, found: Departures) -> dict[str, Any]:
        info, alarm = run.info, seen.verdict == ALARM
        row = {
            "model": info.model,
            "fault": info.fault or "",
            "level": run.level,
            "usual": True,
            "onset": info.onset if info.onset is not None else np.nan,
            "n_steps": len(run.table.steps_S),
            "alarm": alarm,
            "found_onset": seen.onset if seen.onset is not None else np.nan,
        }
        if info.fault is None:
            return row
        told = self._causes(run, seen, found, "") if alarm else []
        other = self._causes(run, seen, found, info.model) if alarm else []
        hits = {"first": told[:1], "among_3": told[:FIRST], "other_models": other[:1]}
        return {**row, **{name: info.fault in causes for name, causes in hits.items()}}

    def _causes(self, run: Run, seen: Detection, found: Departures, without: str) -> list[str]:
        """Return the faults named, the likeliest first; none where the run is called unknown."""
        rest = self._without(run.info.seed, without)
        mark = fingerprint(run.table, found, int(seen.onset or 0), rest.units)
        features_F = mark.features(rest.signals)
        if not np.isfinite(features_F).any() or rest.per_feature(features_F) > rest.farthest:
            return []
        first = rank(rest, mark, seen, {})[0]
        return [fault for fault, _ in likeliest(rest, features_F)] if stands_out(first) else []

    def _without(self, seed: int, model: str) -> Library:
        if (seed, model) not in self._rest:
            keep_N = (self.library.seed_N != seed) & (self.library.model_N != model)
            self._rest[seed, model] = self.library.only(keep_N).calibrated()
        return self._rest[seed, model]


def _scored(table: Any) -> Iterator[dict[str, Any]]:
    levels = [level for level in ("clear", "subtle") if (table["level"] == level).any()]
    for level in levels:
        for model, part in [("all", table), *table.groupby("model", sort=False)]:
            broken = part[part["level"] == level]
            shares = {name: float(broken[name].mean()) for name in ("first", "among_3", "other_models")}
            yield {"model": model, "level": level, **detection_scores(part, level), **shares}
