"""verl's lines, "step:5 - key:value - key:value": whole, glued together, or wrapped by pprint over several lines."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from moeproxy.traces.logs.cells import bare
from moeproxy.traces.logs.literals import NotALiteral, dicts
from moeproxy.traces.logs.nesting import MAX_KEY
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.torn import Torn

MAX_PARTS = 5000  # metrics on one line
MAX_LINES = 400  # of one string that pprint wraps

_START = re.compile(r"(?:^|[\s'\"])(step:\s*\d+ - .*)$")
_RECORD = re.compile(r"(?<![A-Za-z_/.-])step:\s*\d+ - ")
_LABEL = re.compile(r"\([\w.:<>-]+(?: [\w=:-]+)*? pid=\d+[^()]*\)$")
_WRAPPED = re.compile(r"\s*\(\s*(['\"])step:\s*\d+ - .*\1\s*$")
_PIECE = re.compile(r"\s*(['\"])(.*)\1(\)?)\s*$")
_REPEATED = re.compile(r"\[repeated \d+x across (?:the )?cluster\].*$")
_QUOTED = re.compile(r"['\"]\)?\s*$")  # pprint puts a long line into quotes and brackets
_THEN_TEXT = re.compile(r"(-?\d[\d.]*(?:[eE][-+]?\d+)?|nan|-?inf)(?:(?![\w.])(?=\S*\s\S)|(?=[A-Z][a-z]|[A-Z]{2,}))")
_REST = re.compile(r"[\d.eE+-]{1,24} - \S+:\S")


class Strung:
    """Recognises such lines; it keeps the pieces of a string that goes on over the next lines of its process."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._open: dict[str, tuple[int, list[str]]] = {}
        self._torn = Torn(sink, _REST)

    @property
    def waits(self) -> bool:
        """Whether a string goes on, so that its next line must be shown."""
        return bool(self._open) or self._torn.waits

    def line(self, body: str, number: int, origin: str) -> bool:
        """Take a line; False when it is nothing of this kind."""
        if self._torn.rest(body, number) or (origin in self._open and self._piece(body, origin)):
            return True
        if _WRAPPED.match(body):
            self._open[origin] = (number, [])
            return self._piece(body.lstrip().removeprefix("("), origin)
        match = _START.search(body)
        if match is not None:
            self._several(match[1], number, origin)
            self._torn.took(number)
        return match is not None

    def _piece(self, body: str, origin: str) -> bool:
        """Take a further piece of a wrapped string; what is none ends it."""
        number, pieces = self._open.pop(origin)
        match = _PIECE.match(body)
        if match is not None:
            pieces.append(match[2])
            if not match[3] and len(pieces) < MAX_LINES:
                self._open[origin] = (number, pieces)
                return True
        self._several("".join(pieces), number, origin)
        return match is not None

    def _several(self, text: str, number: int, origin: str) -> None:
        """Take the records of a line: a second one may begin behind the first, with the label of its process."""
        text = _QUOTED.sub("", _REPEATED.sub("", text).rstrip())
        starts = [match.start() for match in _RECORD.finditer(text)]
        for start, end in pairwise([*starts, len(text)]):
            part = text[start:end].rstrip()
            label = _LABEL.search(part[-MAX_KEY:]) if end < len(text) else None
            self._row(part[: len(part) - len(label[0])] if label else part, number, origin)

    def _row(self, text: str, number: int, origin: str) -> None:
        cells: dict[str, Any] = {}
        parts = text.split(" - ", MAX_PARTS)
        if len(parts) > MAX_PARTS:
            self._sink.skip(number, f"more than {MAX_PARTS:,} metrics on a line")
        for part in parts[:MAX_PARTS]:
            key, colon, value = part.rpartition(":")
            if glued := _THEN_TEXT.match(part.partition(":")[2].strip()):
                key, value = part.partition(":")[0], glued[1]
                self._sink.skip(number, "something else that follows a number on its line; the number may be cut short")
            if not colon or len(key) > MAX_KEY or not key.strip():
                self._sink.skip(number, "a part between dashes without a key")
                continue
            if key.strip() in cells:
                self._sink.note(f"line {number} and perhaps others have a key twice; the last value is taken")
            cells[key.strip()] = _wrapped(value.strip())
        if len(cells) > 1:
            self._sink.hints.add("step:- line")
            self._sink.row(cells, number, origin)


def _wrapped(value: str) -> Any:
    """np.float64(0.25) is 0.25; so are tensor(0.25) and the like."""
    number = bare(value)
    if isinstance(number, str) and number.endswith(")"):
        try:
            found, _ = dicts("{'x': " + number + "}")
            return found[0][1]["x"] if found else number
        except (NotALiteral, KeyError):
            return number
    return number
