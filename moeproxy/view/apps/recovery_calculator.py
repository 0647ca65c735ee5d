"""Sliders over `moeproxy.recovery.expected`: what to expect of a cluster under each strategy."""

from __future__ import annotations

import html
import math
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from moeproxy.recovery.calculator import STRATEGIES, Cluster, Expected, expected
from moeproxy.view.apps.tables import html_rows
from moeproxy.view.apps.ui import Status

_WIDE = {"description_width": "230px"}
_LAYOUT = {"width": "460px"}


class Calculator:
    """What to expect of a cluster.

    Args:
        cluster: where the sliders begin; `measured` puts what a run showed into them.
    """

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.status = Status("Move a slider.")
        self.faults = widgets.FloatLogSlider(
            value=0.1, base=10, min=-4, max=0, description="trainer faults a step", style=_WIDE, layout=_LAYOUT
        )
        self._sliders = {
            "step": _seconds("one step (s)", 1, 3600),
            "detect": _seconds("detection (s)", 0.1, 3600),
            "restart_task": _seconds("restart of everything (s)", 1, 7200),
            "restart_trainer": _seconds("restart of the trainer (s)", 0.1, 7200),
            "restart_rollout": _seconds("restart of a rollout (s)", 0.1, 7200),
            "reconnect": _seconds("reconnection (s)", 0.1, 3600),
        }
        self._counts = {
            "trainers": _count("trainer machines", 1, 512),
            "rollouts": _count("rollout machines", 0, 512),
            "checkpoint_every": _count("steps between checkpoints", 1, 200),
        }
        self.table = widgets.HTML()
        self.results: dict[str, Expected] = {}
        self._base = cluster or Cluster(step=300.0, trainers=16, rollouts=16)
        self._set(self._base)
        controls = [self.faults, *self._sliders.values(), *self._counts.values()]
        for control in controls:
            control.observe(self.status.guard(lambda _: self.draw()), "value")
        self.widget = widgets.VBox([*controls, self.table, self.status.widget])
        self.draw()

    @property
    def cluster(self) -> Cluster:
        """What the sliders say."""
        values: dict[str, Any] = {name: control.value for name, control in (self._sliders | self._counts).items()}
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
        for name, control in self._sliders.items():
            low, high = control.base**control.min, control.base**control.max
            control.value = min(max(getattr(cluster, name), low), high)
        for name, control in self._counts.items():
            control.value = getattr(cluster, name)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def _seconds(label: str, low: float, high: float) -> widgets.FloatLogSlider:
    return widgets.FloatLogSlider(
        value=low, base=10, min=math.log10(low), max=math.log10(high), step=0.01, description=label, style=_WIDE,
        layout=_LAYOUT, readout_format=".3g",
    )  # fmt: skip


def _count(label: str, low: int, high: int) -> widgets.IntSlider:
    return widgets.IntSlider(value=low, min=low, max=high, description=label, style=_WIDE, layout=_LAYOUT)


def _row(name: str, found: Expected) -> list[str]:
    wall = f"{found.wall:,.2f}" if math.isfinite(found.wall) else "never done"
    return [html.escape(STRATEGIES[name]), f"{found.ratio:.1%}", f"{found.strict:.1%}", wall]
