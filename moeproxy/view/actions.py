"""What the authors of a postmortem did and saw, by step or time: given in code, or as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moeproxy.errors import MoeproxyError

KINDS = {
    "noted": "noted",
    "restored": "checkpoint restored",
    "changed": "setting changed",
    "rerun": "run again",
    "stopped": "stopped",
}
"""Kinds of actions, and what they are called."""

COLUMNS = ("step", "time", "kind", "text")
MAX_STEP = 2**53


@dataclass(frozen=True)
class Action:
    """Something that somebody did or saw.

    Args:
        text: what, in words.
        step: step of the run at which it took effect; None when it has no place among the steps.
        time: date and time, ISO 8601; "" when nobody wrote it down.
        kind: one of `KINDS`.

    Raises:
        MoeproxyError: there are no words, the kind is unknown, or step or time is none.

    Example:
        >>> Action("restored step 10, FP32 head", step=11, time="2026-11-30 03:40", kind="restored")
    """

    text: str
    step: int | None = None
    time: str = ""
    kind: str = "noted"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise MoeproxyError("an action without words", expected="what was done or seen", remedy="remove the row")
        if self.kind not in KINDS:
            raise MoeproxyError(f"an action of the kind {self.kind!r}", expected=f"one of {', '.join(KINDS)}")
        if self.step is not None and not 0 <= self.step < MAX_STEP:
            raise MoeproxyError(f"an action at step {self.step}", expected="a step from 0 on, or none")
        if self.time:
            _moment(self.time)


def in_order(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return actions in the order of time where each has one, else as they were given.

    Steps give no order: what is done at step 35 may be undone by a checkpoint of step 10.
    """
    if all(action.time for action in actions):
        return tuple(sorted(actions, key=lambda action: _moment(action.time).replace(tzinfo=None)))
    return tuple(actions)


def action_of(row: Mapping[str, str | None]) -> Action | None:
    """Return the action that a row of text says, None for an empty row.

    Args:
        row: texts under `COLUMNS`; a kind that is empty is "noted".

    Raises:
        MoeproxyError: what it says is no action.
    """
    cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
    if not any(cells[name] for name in ("step", "time", "text")):
        return None
    step = cells["step"]
    if step and not (step.isdecimal() and step.isascii()):
        raise MoeproxyError(f"an action at step {step!r}", expected="a whole number from 0 on, or nothing")
    return Action(cells["text"], int(step) if step else None, cells["time"], cells["kind"] or "noted")


def read_actions(path: str | Path) -> tuple[Action, ...]:
    """Read actions from a CSV file with the columns `COLUMNS`, in any order; all but `text` may be left out.

    Raises:
        MoeproxyError: the file cannot be read, has other columns, or a row is no action; the error names its line.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            rows = csv.DictReader(stream, skipinitialspace=True, restkey="")
            _check(rows.fieldnames or (), path)
            return tuple(found for row in rows if (found := _row(row, rows.line_num, path)) is not None)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MoeproxyError(f"actions cannot be read ({error})", where=path, expected="a CSV file in UTF-8") from error


def _check(names: Iterable[str], path: str | Path) -> None:
    found = [str(name).strip() for name in names]
    strange = [name for name in found if name not in COLUMNS]
    if "text" not in found or strange:
        said = ", ".join(found) or "nothing"
        raise MoeproxyError(f"the columns are {said}", where=path, expected=f"{', '.join(COLUMNS)} (text at least)")


def _row(row: Mapping[str, str | None], line: int, path: str | Path) -> Action | None:
    if row.get(""):
        what = "quotes around text that holds commas"
        raise MoeproxyError(f"line {line} has more cells than columns", where=path, expected=what)
    try:
        return action_of({str(name).strip(): value for name, value in row.items()})
    except MoeproxyError as error:
        raise MoeproxyError(error.found, where=f"{path}, line {line}", expected=error.expected) from error


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise MoeproxyError(
            f"an action at the time {text!r}", expected="date and time like 2026-11-30 03:40, or nothing"
        ) from error
