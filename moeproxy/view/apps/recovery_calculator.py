"""Sliders over `moeproxy.recovery.expected`: what to expect of a cluster under each strategy."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from moeproxy.recovery.calculator import STRATEGIES, Cluster, Expected, expected
from moeproxy.view.apps.slider import NamedSlider
from moeproxy.view.apps.tables import html_rows
from moeproxy.view.apps.ui import Status

_NEVER_S = 1e6
_E24 = "10 11 12 13 15 16 18 20 22 24 27 30 33 36 39 43 47 51 56 62 68 75 82 91"
_STEPS = tuple(int(step) / 10 for step in _E24.split())
"""Of a decade, each a tenth more than the one before: the series E24 of IEC 60063."""

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Calculator:
    """What to expect of a cluster.

    Args:
        cluster: where the sliders begin; `measured` puts what a run showed into them.
    """

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.status = Status("Move a slider.")
        self.faults = _Scale("trainer faults a step", 0.1, _decades(1e-4, 1))
        self._sliders = {
            "step": _Scale("one step (s)", 1, _decades(0.1, 3600)),
            "detect": _Scale("detection (s)", 1, _decades(0.1, 3600)),
            "restart_task": _Scale("restart of everything (s)", 1, _decades(1, 7200)),
            "restart_trainer": _Scale("restart of the trainer (s)", 1, _decades(0.1, 7200)),
            "restart_rollout": _Scale("restart of a rollout (s)", 1, _decades(0.1, 7200)),
            "reconnect": _Scale("reconnection (s)", 1, _decades(0.1, 3600)),
        }
        self._counts = {
            "trainers": _Scale("trainer machines", 1, _COUNTS),
            "rollouts": _Scale("rollout machines", 1, (0, *_COUNTS)),
            "checkpoint_every": _Scale("steps between checkpoints", 1, (1, 2, 3, 5, 10, 20, 50, 100, 200)),
        }
        self.table = widgets.HTML()
        self.results: dict[str, Expected] = {}
        self._base = cluster or Cluster(step=300.0, trainers=16, rollouts=16)
        self._set(self._base)
        controls = [self.faults, *self._sliders.values(), *self._counts.values()]
        for control in controls:
            control.observe(self.status.guard(lambda _: self.draw()), ["index", "options"])
        self.widget = widgets.VBox([*controls, self.table, self.status.widget])
        self.draw()

    @property
    def cluster(self) -> Cluster:
        """What the sliders say."""
        values = {name: control.value for name, control in (self._sliders | self._counts).items()}
        return replace(self._base, **values).at_faults_per_step(self.faults.value)

    def measured(self, cluster: Cluster) -> None:
        """Put a run's costs into the sliders; counts of machines stay as they are."""
        counts = {name: control.value for name, control in self._counts.items()}
        self._set(replace(cluster, **counts))

    def draw(self) -> None:
        """Compute and show all strategies."""
        self.results = {name: expected(self.cluster, name) for name in STRATEGIES}
        rows = [_row(name, found) for name, found in self.results.items()]
        head = ["after a fault", "ETTR", "without credit", "seconds a step"]
        self.table.value = html_rows("Expected effective training time", head, rows)

    def _set(self, cluster: Cluster) -> None:
        for name, control in (self._sliders | self._counts).items():
            control.put(getattr(cluster, name))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


class _Scale(NamedSlider):
    """A slider over fixed values, and the one that was put there."""

    def __init__(self, label: str, value: float, values: Sequence[float]) -> None:
        super().__init__(values, value, label)
        self._values = tuple(values)

    def put(self, value: float) -> None:
        """Show a value, to three figures, or the nearest end."""
        inside = min(max(value, self._values[0]), self._values[-1])
        shown = inside if isinstance(inside, int) else float(f"{inside:.3g}")
        with self.hold_trait_notifications():
            self.options = sorted({*self._values, shown})
            self.index = self.options.index(shown)


def _decades(low: float, high: float) -> list[float]:
    """Return the steps of `_STEPS` from low to high, both included."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = {float(f"{step * 10.0**exponent:.3g}") for exponent in exponents for step in _STEPS}
    return sorted({low, high, *(value for value in values if low < value < high)})


def _row(name: str, found: Expected) -> list[str]:
    wall = f"{found.wall:,.2f}" if found.wall < _NEVER_S else "never done"
    return [html.escape(STRATEGIES[name]), f"{found.ratio:.1%}", f"{found.strict:.1%}", wall]
