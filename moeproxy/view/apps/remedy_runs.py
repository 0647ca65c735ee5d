"""Recorded failures, what was tried against them, and how more is tried: the data behind the panel of notebook 05.

A failure is a run of the benchmark at full strength. What the study of remedies recorded is shown in seconds; trials
made here are kept in a folder and found again by a later kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.lab.bench import CALIBRATION, SETTINGS, Model, injection_of
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import result_path
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench, load_registry
from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy import Told, treated, try_remedies
from moeproxy.triage.remedy_recorded import RemedyStudy
from moeproxy.triage.remedy_result import Remedy, Trial
from moeproxy.triage.remedy_study import cases, take_packed
from moeproxy.view.apps.live_runs import LiveRuns

METHODS = ("original", "cluster")


@dataclass(frozen=True)
class Asked:
    """A failure, and what it is treated for.

    Args:
        model, fault, seed: which run.
        cause: fault whose remedies are tried; by default the one that was injected.
    """

    model: str
    fault: str
    seed: int
    cause: str = ""

    @property
    def treated_for(self) -> str:
        """The fault whose remedies are tried."""
        return self.cause or self.fault


@dataclass(frozen=True)
class Failure:
    """A broken run, its healthy twin, and the other healthy runs of the model at the same settings."""

    broken: Trace
    twin: Trace
    healthy: tuple[Trace, ...]

    @property
    def onset(self) -> int:
        """First broken step."""
        return int(self.broken.provenance.onset or 1)


class RemedyRuns:
    """What is recorded, and what was made here.

    Args:
        out: folder of new runs, their snapshots and results, and of a proxy built for them.
        bench: packs of recorded runs, by default those that come with moeproxy.
        study: recorded trials, by default those that come with moeproxy.

    Raises:
        TraceError: there are no packs.
        ComparisonError: there is no study.
    """

    def __init__(self, out: Path, *, bench: Path | None = None, study: RemedyStudy | None = None) -> None:
        self.out, self.bench = out, bench or data_dir() / "bench"
        self.study = study or RemedyStudy.load()
        self.live = LiveRuns(data_dir() / "models" / "qwen3-moe-tools", out, SETTINGS)
        self._lock = threading.Lock()
        self._traces: dict[tuple[str, str | None], tuple[Trace, ...]] = {}
        self._trials: dict[Asked, dict[str, Trial]] = {}
        self._followed: RunSpec | None = None
        rows = load_registry(self.bench)
        clear = rows["method"].isin(METHODS) & (rows["level"] == "clear")
        self._rows = rows.loc[clear, ["model", "fault", "seed"]]

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Labels, proxies before the original: there a remedy is tried first."""
        return tuple(sorted(map(str, self._rows["model"].unique()), key=lambda label: (label == "original", label)))

    def faults(self, model: str) -> tuple[str, ...]:
        """Faults of which a model has a recorded run, those with recorded trials first."""
        here = tuple(dict.fromkeys(map(str, self._rows.loc[self._rows["model"] == model, "fault"])))
        tried = [fault for fault in self.study.faults if fault in here]
        return (*tried, *(fault for fault in here if fault not in tried))

    def seeds(self, model: str, fault: str) -> tuple[int, ...]:
        """Seeds of the recorded runs, those with recorded trials first."""
        rows = self._rows
        seeds = sorted({int(seed) for seed in rows.loc[(rows["model"] == model) & (rows["fault"] == fault), "seed"]})
        return tuple(sorted(seeds, key=lambda seed: (self.study.found(model, fault, seed) is None, seed)))

    def failure(self, asked: Asked) -> Failure:
        """Return the recorded runs of a failure.

        Raises:
            MoeproxyError: it is not recorded.
        """
        broken = [run for run in self._read(asked.model, asked.fault) if _is(run, asked.seed, 1.0)]
        healthy = [run for run in self._read(asked.model, None) if run.provenance.config == SETTINGS.to_dict()]
        twins = [run for run in healthy if run.provenance.seed == asked.seed]
        if not broken or not twins:
            raise MoeproxyError(f"no recorded run of {asked.fault} on {asked.model}, seed {asked.seed}")
        return Failure(broken[0], twins[0], tuple(run for run in healthy if run.provenance.seed in CALIBRATION))

    def recorded(self, asked: Asked) -> Remedy | None:
        """Return what the study tried against this failure; it treats what was injected."""
        return self.study.found(asked.model, asked.fault, asked.seed) if asked.treated_for == asked.fault else None

    def made(self, asked: Asked) -> dict[str, Trial]:
        """Return the trials made here by remedy, those of an earlier kernel among them."""
        with self._lock:
            if asked not in self._trials:
                self._trials[asked] = self._load(asked)
            return dict(self._trials[asked])

    def treated(self, asked: Asked, onset: int, remedy: str, *, made: bool) -> Trace | None:
        """Return the run with a remedy, made here or recorded; None where it is not kept."""
        if not made:
            return self.study.treated(asked.model, asked.fault, asked.seed, remedy)
        model = self._model(asked.model)
        path = None if model is None else result_path(treated(_spec(model, asked), [remedy], onset), self.out)
        return Trace.load(path) if path is not None and path.is_file() else None

    def growing(self, progress: SweepProgress | None) -> Trace | None:
        """Return the treated run that is being made, as far as it is; of several one is followed to its end."""
        if progress is None or progress.spec is None or not progress.spec.remedies:
            return None
        if self._followed is not None and (found := self.live.found([self._followed]).growing):
            return found[0]
        self._followed = replace(progress.spec, snapshots=None)
        found = self.live.found([self._followed]).all
        return found[0] if found else None

    def treat(self, asked: Asked, remedies: Iterable[str], minutes: float, watch: Watch, told: Told) -> Remedy:
        """Run the closed loop on the failure: snapshot, change, rerun, severity before and after, keep or roll back.

        Recorded runs are taken where they are of the very same model; otherwise the failure, its twin and healthy runs
        are made first.

        Raises:
            LabError: a run could not be made.
        """
        self.live.build([asked.model])
        model = self._model(asked.model)
        if model is None:
            raise MoeproxyError(f"{asked.model} cannot be trained here")
        known = [model.spec(asked.seed), _spec(model, asked), *(model.spec(seed) for seed in CALIBRATION)]
        self.out.mkdir(parents=True, exist_ok=True)
        take_packed(known, self.bench, self.out)
        (case,) = cases(model, [asked.fault], [asked.seed], self.out, watch=watch)
        case = replace(case, cause=asked.treated_for, remedies=tuple(remedies))

        def tell(one: object, trial: Trial) -> None:
            with self._lock:
                self._trials.setdefault(asked, {})[trial.remedy] = trial
            told(case, trial)

        self.made(asked)  # what an earlier kernel made stays
        snapshots = self.out / "snapshots"
        found = try_remedies(case, self.out, minutes=minutes, watch=watch, told=tell, snapshots=snapshots)
        replace(found, trials=tuple(self.made(asked).values())).save(self._place(asked))
        return found

    def _model(self, label: str) -> Model | None:
        path = self.live.checkpoint(label)
        return None if path is None else Model(path, label, label.partition("-")[0])

    def _load(self, asked: Asked) -> dict[str, Trial]:
        try:
            return {trial.remedy: trial for trial in Remedy.load(self._place(asked)).trials}
        except ComparisonError:
            return {}

    def _place(self, asked: Asked) -> Path:
        return self.out / "results" / f"{asked.model}--{asked.fault}--s{asked.seed}--for-{asked.treated_for}.json"

    def _read(self, model: str, fault: str | None) -> tuple[Trace, ...]:
        with self._lock:
            if (model, fault) not in self._traces:
                self._traces[model, fault] = load_bench(self.bench, models=[model], faults=[fault])
            return self._traces[model, fault]


def _is(run: Trace, seed: int, strength: float) -> bool:
    return (run.provenance.seed, run.provenance.strength) == (seed, strength)


def _spec(model: Model, asked: Asked) -> RunSpec:
    return model.spec(asked.seed, injection_of(asked.fault, "clear", asked.seed))
