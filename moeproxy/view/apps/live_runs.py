"""Runs that a reader trains from a panel: which they are, what is there of them, and how they are trained.

A run is its content key: model, fault, seed, settings. So what an earlier kernel finished is found again, and so are
the steps of a run that was cut short.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from moeproxy.errors import LabError, TraceError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.lab.bench import dialogues
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.record import Choice, build_proxies
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path, sweep
from moeproxy.lab.sweep_progress import Watch
from moeproxy.proxy.cluster import METHODS, Method
from moeproxy.traces.partial import load_partial, partial_path
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.live_work import Stopped

__all__ = ["Found", "LiveRuns", "Stopped"]


@dataclass(frozen=True)
class Found:
    """What the folder holds of some runs: whole traces, and the beginnings of others."""

    finished: tuple[Trace, ...] = ()
    growing: tuple[Trace, ...] = ()

    @property
    def all(self) -> tuple[Trace, ...]:
        """Both."""
        return (*self.finished, *self.growing)


class LiveRuns:
    """The runs of one folder.

    Args:
        original: directory of the original's checkpoint.
        out: folder of the traces; proxies are built in `proxies` below it when they are first needed.
        settings: of the loop.
        proxies: directories of proxies that exist already, by label.
    """

    def __init__(
        self,
        original: Path,
        out: Path,
        settings: GRPOSettings,
        *,
        proxies: Mapping[str, Path] | None = None,
    ) -> None:
        self.original, self.out, self.settings = original, out, settings
        self._given = dict(proxies or {})
        self._paths: dict[RunSpec, Path] = {}
        self._lock = threading.Lock()

    def trainable(self, label: str) -> bool:
        """Whether a model can be trained here: the original, a proxy given, or one that can be built."""
        return label == "original" or label in self._given or _choice(label) is not None

    def checkpoint(self, label: str) -> Path | None:
        """Return a model's directory, None while the proxy is not built."""
        if label == "original":
            return self.original
        path = self._given.get(label, self._built / label)
        return path if path.is_dir() else None

    def specs(self, label: str, injection: Injection | None, seeds: Sequence[int], steps: int) -> list[RunSpec]:
        """Return the runs of one model, healthy without an injection; none while its checkpoint does not exist."""
        path = self.checkpoint(label)
        if path is None:
            return []
        choice = _choice(label)
        settings = replace(self.settings, steps=steps)
        method = choice.method if choice else label
        return [RunSpec(path, label, method, seed=seed, injection=injection, settings=settings) for seed in seeds]

    def found(self, specs: Sequence[RunSpec]) -> Found:
        """Return what the folder holds of these runs.

        Raises:
            TraceError: a finished run's file cannot be read.
        """
        finished, growing = [], []
        for path in map(self._path, specs):
            if path.exists():
                finished.append(Trace.load(path))
            elif partial_path(path).exists():
                with suppress(TraceError):  # no whole step yet, or the run has just ended
                    growing.append(load_partial(partial_path(path)))
        return Found(tuple(finished), tuple(growing))

    def build(self, labels: Sequence[str]) -> None:
        """Build the proxies that do not exist yet.

        Raises:
            LabError: a label is no proxy that could be built.
        """
        missing = [label for label in labels if self.checkpoint(label) is None]
        choices = [choice for label in missing if (choice := _choice(label)) is not None]
        if lost := [label for label in missing if _choice(label) is None]:
            raise LabError(f"{lost[0]!r} cannot be trained here", expected="the original, or METHOD-COUNT")
        if choices:
            statistics = profile(self.original, self._texts, batch_size=200)
            build_proxies(self.original, statistics, choices, self._built)

    def train(
        self,
        specs: Sequence[RunSpec],
        watch: Watch,
        stop: threading.Event | None = None,
        *,
        workers: int | None = None,
    ) -> list[Trace]:
        """Train every run that the folder does not hold, until the end or until `stop` is set.

        Args:
            specs: the runs.
            watch: told from any thread how far it is.
            stop: looked at whenever a run begins, ends or has made a step.
            workers: processes at a time, by default one a core.

        Raises:
            FaultError: an injection is impossible; nothing was trained then.
            LabError: runs failed; the others are kept.
            Stopped: `stop` was set; finished runs, and the steps of others, are kept.
        """

        def told(progress: SweepProgress) -> None:
            if stop is not None and stop.is_set():
                raise Stopped  # the sweep ends all its processes on any exception
            watch(progress)

        return sweep(specs, self.out, workers=workers, watch=told)

    def _path(self, spec: RunSpec) -> Path:
        # The key is a hash of all weights: a figure that is redrawn every second must not compute it again.
        with self._lock:
            if spec not in self._paths:
                self._paths[spec] = result_path(spec, self.out)
            return self._paths[spec]

    @property
    def _texts(self) -> list[str]:
        return dialogues() if self.settings.environment == "calculator" else calibration_texts(0)

    @cached_property
    def _built(self) -> Path:
        return self.out / "proxies" / f"{self.original.name}-{Checkpoint.open(self.original).fingerprint[:8]}"


def _choice(label: str) -> Choice | None:
    method, _, count = label.rpartition("-")
    return Choice(cast(Method, method), int(count)) if method in tuple(METHODS) and count.isdigit() else None
