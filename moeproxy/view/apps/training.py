"""Train runs from a notebook cell, with a bar that moves while they train."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import result_path, sweep
from moeproxy.traces.trace import Trace
from moeproxy.view.apps.ui import Status


class StepBar:
    """A progress bar that counts calls, whatever thread they come from.

    Args:
        total: number of calls that mean all is done.
        text: what is being counted.
    """

    def __init__(self, total: int, text: str) -> None:
        self.done, self.total = 0, total
        self.bar = widgets.FloatProgress(value=0.0, max=1.0, description="0 %")
        self.status = Status(text)
        self.widget = widgets.HBox([self.bar, self.status.widget])
        self._lock = threading.Lock()
        self._drawn_s = 0.0

    def __call__(self, *_: object) -> None:
        with self._lock:
            self.done += 1
            late = time.monotonic() - self._drawn_s > 0.2
            if late:
                self._drawn_s = time.monotonic()
        if late:
            self._draw(self.done / max(self.total, 1))

    def finish(self, text: str) -> None:
        """Show the end."""
        self._draw(1.0)
        self.status.say(text)

    def _draw(self, share: float) -> None:
        self.bar.value = share
        self.bar.description = f"{100 * share:.0f} %"


def train(specs: Sequence[RunSpec], out: str | Path, *, workers: int | None = None) -> tuple[Trace, ...]:
    """Train every run that `out` does not hold yet, each in a fresh process, and return all traces.

    Args:
        specs: the runs; equal specs on equal weights are the same run.
        out: folder of the traces; remove it to train anew.
        workers: processes at a time, by default one a core.

    Raises:
        LabError: a run failed; the others are kept.
    """
    missing = [spec for spec in specs if not result_path(spec, Path(out)).exists()]
    found = len(specs) - len(missing)
    steps = sum(spec.settings.steps for spec in missing)
    bar = StepBar(steps, f"training {len(missing)} runs, {steps} steps; {found} were trained before")
    display(bar.widget)
    try:
        traces = sweep(specs, Path(out), workers=workers, progress=bar)
    except Exception as error:
        bar.status.show(error)
        raise
    bar.finish(f"{len(missing)} runs trained; {found} were trained before")
    return tuple(traces)
