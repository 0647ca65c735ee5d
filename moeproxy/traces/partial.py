"""The growing trace: the steps of a run on disk while it goes, so that a killed run loses none that it finished.

One JSON value a line: where the run comes from, then one line a step. A line is written at once and whole; a last line
that a crash cut short is left out when reading. Python's JSON keeps every bit of a number, NaN and infinity included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from moeproxy.errors import TraceError
from moeproxy.traces.trace import RunInfo, Trace

FORMAT = "moeproxy.partial"
VERSION = 1
SUFFIX = ".partial"

Columns = Mapping[str, Any]
"""Signals of a step, or lists of its trajectory columns: numbers of Python, NumPy or torch."""


def partial_path(result: Path) -> Path:
    """Return the file that grows while the run of a result file goes."""
    return result.with_suffix(SUFFIX)


class PartialTrace:
    """Writer of a growing trace. The file appears with the first step, in place of an older one of that name.

    Args:
        path: of the file.
        info: where the run comes from, as far as it is known while it goes.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self._path, self._info = path, info
        self._stream: Any = None

    def add(self, step: int, signals: Columns, trajectories: Columns) -> None:
        """Append one step: its signals and the trajectory columns of its responses."""
        lines = [{"step": step, "signals": signals, "trajectories": trajectories}]
        if self._stream is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self._path, "wb", buffering=0)  # noqa: SIM115 - open as long as the run goes
            lines.insert(0, {"format": FORMAT, "version": VERSION, "run": self._info.to_dict()})
        self._stream.write("".join(json.dumps(line, default=_plain) + "\n" for line in lines).encode())

    def close(self) -> None:
        """Close the file; it stays."""
        if self._stream is not None:
            self._stream.close()


@contextmanager
def growing(path: Path | None, info: RunInfo) -> Iterator[PartialTrace | None]:
    """Yield the writer of a growing trace, or None when there is no path."""
    if path is None:
        yield None
        return
    writer = PartialTrace(path, info)
    try:
        yield writer
    finally:
        writer.close()


def load_partial(path: str | Path) -> Trace:
    """Read the steps that a run has finished so far; it may still be going.

    Raises:
        TraceError: there is no such file, no step in it yet, or it is something else.

    Example:
        >>> trace = load_partial(partial_path(result_path(spec, out)))
    """
    head, *steps = list(_lines(Path(path))) or [{}]
    if head.get("format") != FORMAT or head.get("version") != VERSION or not steps:
        raise TraceError("no growing trace with a finished step", where=path, expected=f"{FORMAT}, version {VERSION}")
    try:
        numbers, rows, trajectories = zip(*((s["step"], s["signals"], s["trajectories"]) for s in steps), strict=True)
        return assembled(numbers, rows, trajectories, RunInfo.from_dict(head["run"]))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"a growing trace with unusable contents ({error})", where=path) from error


def assembled(steps: Sequence[int], rows: Sequence[Columns], trajectories: Sequence[Columns], info: RunInfo) -> Trace:
    """Return the trace of a run from what it recorded step by step."""
    table = pd.DataFrame(list(rows), index=pd.Index(list(steps), name="step"))
    parts = [pd.DataFrame({"step": step, **part}) for step, part in zip(steps, trajectories, strict=True)]
    return Trace(table, pd.concat(parts, ignore_index=True), info)


class Follower:
    """Reads what has been added to a growing trace since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, signals) of every step that is new; none while there is no file."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        found = [json.loads(line) for line in whole.splitlines()]
        return [(line["step"], line["signals"]) for line in found if "step" in line]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TraceError(f"no growing trace ({error.strerror})", where=path) from error
    try:
        for line in text.split(b"\n")[:-1]:  # what follows the last newline is not finished
            yield dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise TraceError("no growing trace: a line in it is no JSON", where=path) from error


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as Python's own."""
    return value.tolist()
