"""Text logs of any kind: JSON lines, console output, or both mixed, in one pass."""

from __future__ import annotations

import json
from typing import Any

from moeproxy.traces.logs.cells import Status
from moeproxy.traces.logs.console import Console
from moeproxy.traces.logs.lines import lines, text
from moeproxy.traces.logs.looking import BAR, LOOK, Looker, progress
from moeproxy.traces.logs.nesting import TooDeep, flat
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink

_SCAN = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
"""What `json.loads` calls, without the looks at white space before and after that cost a third of its time."""


def read_text(source: Source, sink: Sink) -> None:
    """Read a text log into a sink."""
    reader = TextReader(sink)
    number = 0
    for number, raw in lines(source.stream, sink, ahead=reader.ahead):
        reader.line(number, raw)
    if reader.open_end(number):
        sink.note(f"the file ends without a line end: the last number of line {number} may be cut short")
    sink.container = "JSON lines" if reader.n_json > reader.n_console else "console log"


class TextReader:
    """Takes the lines of a text log one after the other, each as JSON or as what a console shows."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._console, self._looker = sink, Console(sink), Looker()
        self.n_json = self.n_console = 0
        self._waits = False  # of the console, which only its own lines change
        self._last = (0, False)

    def ahead(self, stretch: bytes) -> None:
        """Take the text that the next lines are parts of; not needed, but it makes them quicker."""
        self._looker.ahead(stretch)

    def line(self, number: int, raw: bytes) -> None:
        """Take one line."""
        if raw[:1] == b"{" and (not self._waits or _whole(raw)) and _json(raw, number, self._sink):
            self.n_json += 1
            if self._waits:
                self._console.give_up()
                self._waits = self._console.waits
            return
        kind = LOOK if self._waits else self._looker.kind(raw)
        if kind == BAR:
            self.n_console += 1
            self._sink.find("progress", number, progress(raw))
        elif kind == LOOK:
            self.n_console += 1
            before = self._sink.n_rows
            self._console.line(text(raw, number, self._sink), number)
            self._last = (number, self._sink.n_rows > before)
            self._waits = self._console.waits

    def open_end(self, number: int) -> bool:
        """Whether the last line gave metrics, is no JSON (which says itself where it ends), and has no line end."""
        return self._sink.open_end and self._last == (number, True)


def _whole(raw: bytes) -> bool:
    """Whether a line is one JSON object; within something that goes on over several lines it stands for itself."""
    try:
        return isinstance(json.loads(raw), dict)
    except (ValueError, RecursionError):
        return False


def _json(raw: bytes, number: int, sink: Sink) -> bool:
    """Take a line that holds one JSON object; False when it does not."""
    try:
        line = raw.decode("utf-8")
        found, end = _SCAN(line, 0)
        if end < len(line) and (rest := line[end:].strip(" ,\t\r\n")):
            return _several(found, rest, number, sink) or _refused(raw, number, sink, ValueError("something follows"))
    except UnicodeDecodeError:
        return _replaced(raw, number, sink)
    except RecursionError:
        sink.skip(number, "objects nested too deeply")
        return True
    except (ValueError, StopIteration) as error:
        return _refused(raw, number, sink, error)
    if not found:
        return True
    # One colon after a quote for each key: an object that is flat and has no key twice. Others are looked at closer.
    if raw.count(b'":') != len(found):
        return _closer(raw, found, number, sink)
    sink.row(found, number)
    return True


def _several(first: Any, rest: str, number: int, sink: Sink) -> bool:
    """Take several objects that stand on one line; False when something else does, and then none of them."""
    found, place = [first], 0
    try:
        while place < len(rest):
            entry, place = _SCAN(rest, place)
            found.append(entry)
            place += len(rest[place:]) - len(rest[place:].lstrip(" ,\t"))
        cells = [flat(unwrapped(entry, sink)) for entry in found]
    except (ValueError, StopIteration, RecursionError, AttributeError):
        return False
    for row in cells:
        sink.row(row, number)
    return True


def _replaced(raw: bytes, number: int, sink: Sink) -> bool:
    return _json(text(raw, number, sink).encode("utf-8"), number, sink)


def _refused(raw: bytes, number: int, sink: Sink, error: Exception) -> bool:
    if "digits" in str(error):
        sink.skip(number, "an integer of more than 4300 digits")
        return True
    if b"'" in raw:
        return False  # perhaps a Python dict
    cut = not raw.rstrip().endswith(b"}")
    whole = None if cut else _behind(raw)
    sink.skip(number, "cut short" if cut or whole else "starts like JSON but is none")
    return True if whole is None else _json(whole, number, sink)


def _behind(raw: bytes) -> bytes | None:
    """Return the object that begins within a line as the line does, and is whole: the line before it was torn."""
    name = raw[: raw.find(b'"', 2) + 1]  # a nested object has other keys
    place = raw.rfind(name) if len(name) > 3 else 0
    return raw[place:] if place > 0 and _whole(raw[place:]) else None


def _closer(raw: bytes, found: dict[str, Any], number: int, sink: Sink) -> bool:
    try:
        cells = flat(unwrapped(found, sink))
    except TooDeep:
        sink.skip(number, "objects nested too deeply")
        return True
    if _repeats(raw):
        sink.note(f"line {number} and perhaps others have a key twice; the last value is taken")
    sink.row(cells, number)
    return True


def _repeats(raw: bytes) -> bool:
    seen: list[bool] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen.append(len({name for name, _ in items}) < len(items))

    json.JSONDecoder(object_pairs_hook=pairs).raw_decode(raw.decode("utf-8", "replace"))  # a comma may follow
    return any(seen)


def take_object(raw: bytes | str, number: int, sink: Sink, *, before: dict[str, Any], run: str = "") -> None:
    """Take JSON that a logger has stored as one value; the cells `before` come first."""
    try:
        found = json.loads(raw)
        if not isinstance(found, dict):
            raise ValueError
        cells = flat(found)
    except (ValueError, TypeError, RecursionError):
        sink.skip(number, "no JSON object")
        return
    sink.row(before | {name: value for name, value in cells.items() if name not in before}, number, run=run)


def unwrapped(found: dict[str, Any], sink: Sink) -> dict[str, Any]:
    """Return the metrics of a row that a logger has put into an envelope, beside its step."""
    if found.keys() == {"step", "data"} and isinstance(found["data"], dict):
        sink.hints.add("verl file logger")
        # orjson writes NaN and infinities as null; a metric that was not logged is absent.
        data = {name: _nonfinite() if value is None else value for name, value in found["data"].items()}
        return {"step": found["step"]} | data
    if isinstance(found.get("metrics"), dict) and "step" in found:
        return {name: value for name, value in found.items() if name != "metrics"} | found["metrics"]
    return found


def _nonfinite() -> tuple[float, Status, None]:
    return float("nan"), Status.NONFINITE, None
