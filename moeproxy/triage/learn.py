"""Learn from the benchmark what healthy runs do and what every fault looks like; write it to `data/triage`.

    python -m moeproxy.triage.learn --bench data/bench --out data/triage

Only here the catalogue's words are taken from `moeproxy.lab.faults`; judging needs the written files alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.traces.pack import REGISTRY, load_bench
from moeproxy.traces.trace import RunInfo, Trace, load_dir
from moeproxy.triage.alone import PRIORS, Priors
from moeproxy.triage.catalogue import CATALOGUE, Entry, save_catalogue
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, judge
from moeproxy.triage.fingerprint import Units, fingerprint
from moeproxy.triage.judged import Judged
from moeproxy.triage.learned import save_library
from moeproxy.triage.library import Library
from moeproxy.triage.reference import Departures, Reference

CALIBRATION_FROM = 100
"""Healthy runs with this seed or a later one are references; those below are twins of broken runs, never used."""

METHODS = ("original", "cluster")
"""Models that are learned from: the original and proxies as they are meant; controls are not."""


@dataclass(frozen=True)
class Run:
    """A recorded run with its table of judged signals."""

    info: RunInfo
    table: Judged

    @staticmethod
    def of(trace: Trace) -> Run:
        """Return the run of a trace."""
        return Run(trace.provenance, Judged.of(trace))

    @property
    def level(self) -> str:
        """How strong the fault is: "clear" or "subtle"; "" when healthy."""
        return "" if self.info.fault is None else "clear" if self.info.strength == 1 else "subtle"


def runs_of(traces: Sequence[Trace]) -> list[Run]:
    """Return the runs with one fault or none and no remedy, of the original and of proxies."""
    single = [trace for trace in traces if not trace.provenance.further and not trace.provenance.remedies]
    return [Run.of(trace) for trace in single if trace.provenance.method in METHODS]


def references(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the healthy runs of each model that others are judged by: calibration seeds at the usual settings."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.info.healthy and run.info.seed >= CALIBRATION_FROM:
            found.setdefault(run.info.model, []).append(run)
    return {model: _usual(members) for model, members in found.items()}


def _usual(runs: list[Run]) -> list[Run]:
    settings = [str(sorted(run.info.config.items(), key=str)) for run in runs]
    most = max(settings, key=settings.count)
    return [run for run, mine in zip(runs, settings, strict=True) if mine == most]


def learn_priors(runs: Sequence[Run]) -> Priors:
    """Learn from every healthy run, of all settings, how far one moves by itself."""
    healthy = [run for run in runs if run.info.healthy]
    return Priors.of([run.table for run in healthy], [run.info.model for run in healthy])


def learn_beside(runs: Sequence[Run]) -> Library:
    """Learn fingerprints of runs judged beside healthy runs of their own model.

    Raises:
        ComparisonError: a model has fewer than six healthy runs.
    """
    fitted = {model: Fits([run.table for run in members]) for model, members in references(runs).items()}
    healthy = [one for fits in fitted.values() for one in fits.held_out()]
    return _library(BESIDE, runs, lambda run: fitted[run.info.model].departures(run.table), healthy)


def learn_alone(runs: Sequence[Run], priors: Priors) -> Library:
    """Learn fingerprints of runs judged alone."""
    healthy = [priors.departures(run.table) for run in runs if run.info.healthy]
    return _library(ALONE, runs, lambda run: priors.departures(run.table), healthy)


class Fits:
    """References of one model, fitted anew for every set of rows that a run logs, and without the run itself.

    Args:
        tables: of its healthy runs.
    """

    def __init__(self, tables: Sequence[Judged]) -> None:
        self.tables = list(tables)
        self.steps_S = self.tables[0].steps_S
        self._known: dict[tuple[tuple[str, ...], int], Reference] = {}

    def departures(self, table: Judged) -> Departures:
        """Measure how far a run strays from the healthy ones, itself not among them."""
        mine = next((index for index, one in enumerate(self.tables) if one is table), -1)
        key = (table.rows, mine)
        if key not in self._known:
            others = [one for index, one in enumerate(self.tables) if index != mine]
            self._known[key] = Reference.of(others, self.steps_S, table.rows)
        return self._known[key].departures(table)

    def held_out(self) -> list[Departures]:
        """Measure every healthy run against the others."""
        return [self.departures(table) for table in self.tables]


def _library(
    mode: str, runs: Sequence[Run], depart: Callable[[Run], Departures], healthy: Sequence[Departures]
) -> Library:
    broken = [run for run in runs if not run.info.healthy]
    if not broken:
        raise ComparisonError("no broken run to learn from", expected="recorded runs with faults")
    units = Units.of(healthy)
    names = tuple(units.by_signal)
    rows = []
    for run in broken:
        found = depart(run)
        seen = judge(run.table, found, mode, 0)
        onset = seen.onset if seen.verdict == ALARM else run.info.onset
        rows.append(fingerprint(run.table, found, int(onset or 0), units).features(names))
    return Library(
        mode=mode,
        signals=names,
        units=units,
        fault_N=np.array([run.info.fault for run in broken]),
        model_N=np.array([run.info.model for run in broken]),
        level_N=np.array([run.level for run in broken]),
        seed_N=np.array([run.info.seed for run in broken]),
        features_NF=np.stack(rows),
    ).calibrated()


def catalogue_entries() -> dict[str, Entry]:
    """Return the words of the lab's catalogue."""
    from moeproxy.lab.faults import FAULTS  # brings torch with it

    return {
        item.id: Entry(item.id, item.family, item.title, item.what, item.twin, item.check, item.remedy)
        for item in FAULTS.values()
    }


def learn(traces: Sequence[Trace], out: Path) -> tuple[Priors, Library, Library]:
    """Learn from recorded runs and write everything to `out`.

    Raises:
        ComparisonError: too few runs.
    """
    runs = runs_of(traces)
    priors = learn_priors(runs)
    beside, alone = learn_beside(runs), learn_alone(runs, priors)
    priors.save(out / PRIORS)
    save_library(beside, out)
    save_library(alone, out)
    save_catalogue(catalogue_entries(), out / CATALOGUE)
    return priors, beside, alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: learn from a folder of recorded runs."""
    parser = argparse.ArgumentParser(description="Learn healthy behaviour and fingerprints of faults.")
    parser.add_argument("--bench", type=Path, default=Path("data/bench"), help="folder of packs, or of single traces")
    parser.add_argument("--out", type=Path, default=Path("data/triage"))
    options = parser.parse_args(arguments)
    try:
        packed = (options.bench / REGISTRY).is_file()
        traces = load_bench(options.bench) if packed else load_dir(options.bench)
        priors, beside, _ = learn(traces, options.out)
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    sys.stdout.write(f"{priors.n_runs} healthy and {len(beside.fault_N)} broken runs: {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
