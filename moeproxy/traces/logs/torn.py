"""Records that the line of another writer tore: soon after them a line begins with the rest of a number."""

from __future__ import annotations

import re

from moeproxy.traces.logs.sink import Sink

_LINES = 3  # within which the rest of a record comes


class Torn:
    """Knows which line was the last record, and whether a line soon after it is its rest.

    Args:
        sink: takes what is found.
        rest: pattern of a rest, from the start of a line.
    """

    def __init__(self, sink: Sink, rest: re.Pattern[str]) -> None:
        self._sink, self._rest, self._last = sink, rest, 0

    @property
    def waits(self) -> bool:
        """Whether the next line may be a rest."""
        return self._last > 0

    def took(self, number: int) -> None:
        """Note that a record ended with this line."""
        self._last = number

    def rest(self, body: str, number: int) -> bool:
        """Whether a line is the rest of the last record, whose last number then is not whole."""
        if not self._last:
            return False
        found = number - self._last <= _LINES and self._rest.match(body) is not None
        if found:
            self._sink.skip(number, f"the rest of a torn line; the last number of line {self._last} is cut short")
        if found or number - self._last >= _LINES:
            self._last = 0
        return found
