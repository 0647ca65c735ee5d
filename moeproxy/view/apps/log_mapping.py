"""Which column of a log is which signal: a list for every column, prefilled with the best match."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
import numpy as np

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import NUMERIC
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS
from moeproxy.traces.suggesting import suggest

MOST_SHOWN = 16
"""Columns shown at a time; the others are found by a part of their name."""

NO_SIGNAL, AS_RECOGNISED = "", ""
_NUMERIC = [int(status) for status in NUMERIC]
_SIGNALS = [item for item in (*SIGNALS.values(), *LOG_SIGNALS.values()) if not item.per_layer]
_STEPS = ("step", "iteration", "iter", "global_step", "update", "t")
_WIDE = {"description_width": "230px"}


def columns_of(log: LogTrace) -> tuple[str, ...]:
    """Return the original keys that hold a number anywhere."""
    status = log.original_status
    return tuple(str(name) for name in status if np.isin(status[name].cat.codes, _NUMERIC).any())


def proposed(log: LogTrace) -> dict[str, str]:
    """Return the signal of each column: as it was read, and for further columns the best match of a free signal."""
    taken = {key: signal for signal, key in log.info.keys.items()}
    free = [name for name in columns_of(log) if name not in taken]
    more = {name: match.signal for name, match in suggest(free).items() if match.signal not in taken.values()}
    return taken | more


class MappingEditor:
    """Lists to choose from, one a column, and one for the step.

    What is chosen for a column stays when the columns shown are narrowed down to others.
    """

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}
        self.columns: tuple[str, ...] = ()
        self.lists: dict[str, widgets.Dropdown] = {}
        self.step = widgets.Dropdown(options=[("as recognised", AS_RECOGNISED)], description="Step", style=_WIDE)
        self.step.layout.width = "620px"
        self.find = widgets.Text(
            description="Show columns named", placeholder="part of a name", continuous_update=False, style=_WIDE
        )
        self.find.layout.width = "460px"
        self.apply = widgets.Button(description="Apply the mapping", layout=widgets.Layout(width="auto"))
        self._said = widgets.HTML()
        self._rows = widgets.VBox()
        self.widget = widgets.VBox([self._said, self.step, self.find, self._rows, self.apply])
        self.find.observe(lambda _: self._show(), "value")

    def offer(self, log: LogTrace, mapping: Mapping[str, str] | None = None, step: str | None = None) -> None:
        """Show the columns of a log with their proposals, or with the mapping that it was read by."""
        self.columns = columns_of(log)
        self.chosen = proposed(log) if mapping is None else dict(mapping)
        now = f"as recognised: {log.info.clock!r}" if log.info.clock else "as recognised: none"
        self.step.options = [(now, AS_RECOGNISED), *((name, name) for name in self.columns)]
        likely = [name for name in self.columns if name.lower() in _STEPS]
        if step in self.columns:
            self.step.value = step
        else:
            self.step.value = AS_RECOGNISED if log.info.clock or not likely else likely[0]
        self._show()

    def mapping(self) -> dict[str, str]:
        """Return signal by column.

        Raises:
            TraceError: nothing is chosen, or two columns for one signal.
        """
        found = {column: signal for column, signal in self.chosen.items() if signal != NO_SIGNAL}
        by_signal: dict[str, list[str]] = {}
        for column, signal in found.items():
            by_signal.setdefault(signal, []).append(column)
        for signal, columns in by_signal.items():
            if len(columns) > 1:
                both = " and ".join(map(repr, columns))
                raise TraceError(f"{both} are both mapped to {signal}", expected="one column for each signal")
        if not found:
            raise TraceError("no column is mapped to a signal", expected="a signal for at least one column")
        return found

    def step_key(self) -> str | None:
        """Return the column of the step, None for the one that is recognised."""
        return str(self.step.value) or None

    def _show(self) -> None:
        part = str(self.find.value).strip().lower()
        order = sorted(self.columns, key=lambda name: name not in self.chosen)
        fitting = [name for name in order if part in name.lower()]
        self.lists = {name: self._list(name) for name in fitting[:MOST_SHOWN]}
        old, self._rows.children = self._rows.children, tuple(self.lists.values())
        for widget in old:
            widget.close()
        more = f" {len(fitting) - MOST_SHOWN} further columns are found by name." if len(fitting) > MOST_SHOWN else ""
        words = f"{len(self.columns)} columns hold numbers; {len(self.chosen)} have a proposal.{more}"
        self._said.value = f"<div style='line-height:1.4'>{html.escape(words)}</div>"

    def _list(self, column: str) -> widgets.Dropdown:
        options = [("no signal", NO_SIGNAL), *((item.name.replace("_", " "), item.name) for item in _SIGNALS)]
        value = self.chosen.get(column, NO_SIGNAL)
        if value not in dict(options).values():  # per-layer, as a framework's own map knows them
            options.append((value, value))
        made = widgets.Dropdown(options=options, value=value, description=column, tooltip=column, style=_WIDE)
        made.layout.width = "620px"

        def changed(change: Any) -> None:
            self.chosen[column] = str(change["new"])

        made.observe(changed, "value")
        return made
