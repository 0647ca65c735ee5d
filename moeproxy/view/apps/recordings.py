"""The recorded runs that come with moeproxy, found without reading them: which fault, strength, onset, seed, model.

Two folders are known: `data/bench`, packs with a registry, and `data/runs`, one file a run whose name says what it is.
Traces are read when they are first asked for, and kept.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from moeproxy.errors import CheckpointError, ComparisonError, MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.lab.bench import PROXIES
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.identity import DENSE
from moeproxy.lab.settings import GRPOSettings
from moeproxy.places import data_dir
from moeproxy.traces.pack import REGISTRY, load_bench, load_infos, load_registry
from moeproxy.traces.trace import RunInfo, Trace
from moeproxy.triage.study_result import RESULT, Study

HEALTHY = ""
"""What the column `fault` of the index holds for a healthy run."""

_NAME = re.compile(
    r"(?P<model>.+?)--(?:healthy|(?P<fault>\w+)-(?P<strength>[\d.e-]+)-at(?P<onset>\d+))--s(?P<seed>\d+)--\w+"
)


@dataclass(frozen=True)
class RunModel:
    """A model of which there are recorded runs: its label, how its experts were chosen, how many there are."""

    label: str
    method: str
    n_experts: int

    @property
    def words(self) -> str:
        """The label with what it means."""
        return self.label if self.method in self.label else f"{self.label} ({self.method})"


class Recordings:
    """Recorded runs of one original and of proxies of it, all at the same settings.

    Args:
        index: one row a run, columns model, fault, strength, onset, seed, and whatever `read` needs.
        healthy: what the original's healthy runs are; the usual settings are those that most of them have.
        read: returns the traces of (model, fault), `HEALTHY` for none; run at most once for each.
        where: the folder, for messages.

    Raises:
        MoeproxyError: the index is empty or lacks the original.
    """

    def __init__(
        self, index: pd.DataFrame, healthy: Sequence[RunInfo], read: Callable[[str, str], list[Trace]], where: Path
    ) -> None:
        if not healthy:
            raise MoeproxyError(
                "no recorded healthy run of the original", where=where, expected="runs labelled 'original'"
            )
        self.index, self.where, self._read = index, where, read
        self._traces: dict[tuple[str, str], tuple[Trace, ...]] = {}
        self._lock = threading.Lock()
        self.fingerprint = healthy[0].checkpoint_fingerprint
        self.settings = GRPOSettings(**usual(healthy))
        self.models = tuple(self._model(label) for label in dict.fromkeys(index["model"]))

    @staticmethod
    def open(folder: str | Path | None = None) -> Recordings:
        """Open a folder of recorded runs, by default `data/bench` where it is complete, else `data/runs`.

        Raises:
            MoeproxyError: there are none.
        """
        if folder is None:
            bench = data_dir() / "bench"
            folder = bench if is_complete(bench) else data_dir() / "runs"
        path = Path(folder)
        return _of_packs(path) if (path / REGISTRY).is_file() else _of_files(path)

    @property
    def original(self) -> Path:
        """Directory of the checkpoint that the original's runs started from.

        Raises:
            MoeproxyError: it is not among the shipped models.
        """
        for config in sorted((data_dir() / "models").glob("*/config.json")):
            with suppress(CheckpointError):  # the dense control is no Mixture of Experts
                if Checkpoint.open(config.parent).fingerprint == self.fingerprint:
                    return config.parent
        raise MoeproxyError(
            "no shipped model has the fingerprint of the recorded runs",
            where=self.where,
            expected=self.fingerprint[:12],
            remedy="record the runs again, or get the model that they were recorded with",
        )

    @cached_property
    def study(self) -> Study | None:
        """The fidelity study of these runs, where it lies beside them and can be read."""
        path = self.where / RESULT
        with suppress(ComparisonError):
            return Study.load(path) if path.is_file() else None
        return None

    def level(self, fault: str, strength: float) -> str:
        """Return the registry's name of a strength of a fault, "" where it has none."""
        rows = self._rows("original")
        if "level" not in rows:
            return ""
        found = rows.loc[(rows["fault"] == fault) & (rows["strength"] == strength), "level"]
        return "" if found.empty else str(found.iloc[0])

    def faults(self) -> tuple[str, ...]:
        """Ids of the faults of which the original has recorded runs."""
        return tuple(dict.fromkeys(name for name in self._rows("original")["fault"] if name != HEALTHY))

    def strengths(self, fault: str) -> tuple[float, ...]:
        """Strengths at which the original was recorded with a fault, ascending."""
        rows = self._rows("original")
        return tuple(sorted({float(value) for value in rows.loc[rows["fault"] == fault, "strength"]}))

    def onsets(self, fault: str, strength: float) -> dict[int, int]:
        """Onset by seed of the original's runs with a fault at a strength."""
        rows = self._rows("original")
        chosen = rows.loc[(rows["fault"] == fault) & (rows["strength"] == strength)].sort_values("seed")
        return {int(seed): int(onset) for seed, onset in zip(chosen["seed"], chosen["onset"], strict=True)}

    def recorded(self, fault: str | None, strength: float, model: str) -> tuple[Trace, ...]:
        """Return a model's runs with a fault at a strength, or its healthy ones, at the usual settings."""
        if fault is None:
            return tuple(trace for trace in self.traces(model, HEALTHY) if self._is_usual(trace))
        found = self.traces(model, fault) if fault in set(self._rows(model)["fault"]) else ()
        return tuple(trace for trace in found if trace.provenance.strength == strength)

    def traces(self, model: str, fault: str) -> tuple[Trace, ...]:
        """Return all that `read` gives of a model with a fault at any strength, `HEALTHY` for none."""
        with self._lock:
            if (model, fault) not in self._traces:
                found = self._read(model, fault)
                self._traces[model, fault] = tuple(_as_recorded(trace) for trace in found)
            return self._traces[model, fault]

    def _rows(self, model: str) -> pd.DataFrame:
        return self.index.loc[self.index["model"] == model]

    def _model(self, label: str) -> RunModel:
        rows = self._rows(label)
        if {"method", "n_experts"} <= set(rows):
            return RunModel(label, str(rows["method"].iloc[0]), int(rows["n_experts"].iloc[0]))
        method, _, count = label.rpartition("-")
        return RunModel(label, method or label, int(count) if count.isdigit() else 0)

    def _is_usual(self, trace: Trace) -> bool:
        return GRPOSettings(**trace.provenance.config) == self.settings


def usual(healthy: Sequence[RunInfo]) -> dict[str, Any]:
    """Return the settings that most healthy runs have; a few vary learning rate and temperature."""
    seen = [dict(info.config) for info in healthy]
    return max(seen, key=seen.count)


def _as_recorded(trace: Trace) -> Trace:
    """Files say "live", as the runs were when they were written."""
    if trace.provenance.source == "recorded":
        return trace
    return Trace(trace.steps, trace.trajectories, replace(trace.provenance, source="recorded"))


def _of_files(folder: Path) -> Recordings:
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        if found := _NAME.fullmatch(path.stem):
            row = found.groupdict()
            fault = row["fault"] or HEALTHY
            numbers = {"strength": float(row["strength"] or 0), "onset": int(row["onset"] or 0)}
            rows.append({"model": row["model"], "fault": fault, **numbers, "seed": int(row["seed"]), "path": path})
    if not rows:
        raise MoeproxyError("no recorded runs", where=folder, expected="a folder that `moeproxy.lab.record` wrote")
    index = pd.DataFrame(rows)

    def read(model: str, fault: str) -> list[Trace]:
        chosen = index.loc[(index["model"] == model) & (index["fault"] == fault), "path"]
        return [Trace.load(path) for path in chosen]

    return Recordings(index, [trace.provenance for trace in read("original", HEALTHY)], read, folder)


def is_complete(folder: Path) -> bool:
    """Whether a folder of packs has every fault on the original, on its proxies of both sizes, and on controls.

    A benchmark that is still being recorded lacks some; comparing with what is there would hide that.
    """
    if not (folder / REGISTRY).is_file():
        return False
    registry = load_registry(folder)
    methods = set(registry["method"])
    proxies = {choice.label for choice in PROXIES}
    if not {"original", "random"} <= methods or not proxies <= set(registry["model"]):
        return False
    # A model of which only healthy runs are recorded so far has no fault at all.
    per_model = registry[registry["method"] != DENSE].groupby("model")["fault"]
    return bool((per_model.agg(lambda faults: faults[faults != HEALTHY].nunique()) == len(FAULTS)).all())


def _of_packs(folder: Path) -> Recordings:
    index = load_registry(folder)
    for name in ("strength", "onset"):
        index[name] = [float(value) if str(value) else 0.0 for value in index[name]]  # empty when healthy

    packs = index.loc[(index["model"] == "original") & (index["fault"] == HEALTHY), "pack"].unique()
    healthy = [info for pack in packs for info in load_infos(folder / pack) if info.healthy]
    settings = usual(healthy) if healthy else {}

    def read(model: str, fault: str) -> list[Trace]:
        """Runs at other settings are left out before they are built: a third of the healthy ones."""
        keep = partial(_has, settings)
        return list(load_bench(folder, models=[model], faults=[fault or None], trajectories=False, keep=keep))

    return Recordings(index, healthy, read, folder)


def _has(settings: Mapping[str, Any], info: RunInfo) -> bool:
    return dict(info.config) == settings
