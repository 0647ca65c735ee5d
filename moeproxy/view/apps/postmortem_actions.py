"""A table of actions that is edited by hand: a row each, with step, time, kind and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from moeproxy.errors import MoeproxyError
from moeproxy.view.actions import KINDS, Action, action_of
from moeproxy.view.apps.ui import Status

_STYLE = {"description_width": "initial"}


class ActionTable:
    """Rows of fields for actions; `actions` returns what they say.

    Args:
        actions: rows that are there at first.
        status: told when a row cannot be removed or added.
    """

    def __init__(self, actions: Sequence[Action], status: Status) -> None:
        self._status = status
        self.rows: list[_Row] = []
        self._box = widgets.VBox([])
        self.add = widgets.Button(description="Add an action", layout=widgets.Layout(width="max-content"))
        self.add.on_click(status.guard(lambda _: self.append()))
        self.widget = widgets.VBox([self._box, self.add])
        for action in actions:
            self.append(action)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the rows say; empty rows say nothing.

        Raises:
            MoeproxyError: a row is no action; the error names it.
        """
        found = []
        for number, row in enumerate(self.rows, 1):
            try:
                action = action_of(row.cells())
            except MoeproxyError as error:
                raise MoeproxyError(error.found, where=f"action {number}", expected=error.expected) from error
            found += [action] if action is not None else []
        return tuple(found)

    def append(self, action: Action | None = None) -> None:
        """Add a row, empty without an action."""
        row = _Row(action)
        row.remove.on_click(self._status.guard(lambda _: self._drop(row)))
        self.rows.append(row)
        self._show()

    def _drop(self, row: _Row) -> None:
        self.rows.remove(row)
        self._show()

    def _show(self) -> None:
        for number, row in enumerate(self.rows, 1):
            row.call(number)
        self._box.children = [row.widget for row in self.rows]


class _Row:
    """The fields of one action."""

    def __init__(self, action: Action | None) -> None:
        step = "" if action is None or action.step is None else str(action.step)
        self.step = _text(step, "12", "110px")
        self.time = _text(action.time if action else "", "2026-11-30 03:40", "230px")
        self.kind = widgets.Dropdown(options=[(said, kind) for kind, said in KINDS.items()], style=_STYLE)
        self.kind.value, self.kind.layout.width = action.kind if action else "noted", "210px"
        self.text = _text(action.text if action else "", "what was done or seen", "420px")
        self.remove = widgets.Button(layout=widgets.Layout(width="auto"))
        rows = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 10px")
        self.widget = widgets.Box([self.step, self.time, self.kind, self.text, self.remove], layout=rows)

    def call(self, number: int) -> None:
        """Give the fields the names that go with the number of the row."""
        for field, name in ((self.step, "step"), (self.time, "time"), (self.kind, "kind"), (self.text, "what")):
            field.description = f"{number}. {name}"
        self.remove.description = f"Remove {number}"

    def cells(self) -> dict[str, str | None]:
        """Return what the fields say."""
        fields: dict[str, Any] = {"step": self.step, "time": self.time, "kind": self.kind, "text": self.text}
        return {name: str(field.value) for name, field in fields.items()}


def _text(value: str, placeholder: str, width: str) -> widgets.Text:
    made = widgets.Text(value=value, placeholder=placeholder, style=_STYLE)
    made.layout.width = width
    return made
