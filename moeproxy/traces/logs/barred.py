"""Lines whose metrics stand between bars: Megatron-LM's "iteration 5/ 9 | ...", prime-rl's "Step 5 | ..."."""

from __future__ import annotations

import re
from typing import Any

from moeproxy.traces.logs.cells import bare
from moeproxy.traces.logs.nesting import MAX_KEY
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.torn import Torn

_PIPES = re.compile(r"(?<![A-Za-z])iteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|")
_PRIME = re.compile(r"(?<![A-Za-z])Step (\d{1,15}) \|")
_NAMED = re.compile(r"\s*([A-Za-z][\w. ]*?):?\s+([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\s*\S*\s*\Z")
_STAMP = re.compile(r"\[?\d{4}-\d\d-\d\d[ T][^|]{0,60}$|\s*(?:SUCCESS|INFO)\s*$")
_REST = re.compile(r"[\d.eE+-]{1,24}\s*\|")


class Barred:
    """Recognises such lines, of which a second one may begin behind the first."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._torn = Torn(sink, _REST)

    @property
    def waits(self) -> bool:
        """Whether the next line may be the rest of the last."""
        return self._torn.waits

    def line(self, body: str, number: int, origin: str) -> bool:
        """Take a line; False when it is nothing of this kind."""
        if self._torn.rest(body, number):
            return True
        for head, row in ((_PIPES, self._pipes), (_PRIME, self._prime)):
            if "{" in body and head is _PRIME:
                continue
            if starts := list(head.finditer(body)):
                ends = [match.start() for match in starts[1:]] + [len(body)]
                for match, end in zip(starts, ends, strict=True):
                    row(match, self._text(body[match.end() : end], last=end == len(body)), number, origin)
                self._torn.took(number)
                return True
        return False

    @staticmethod
    def _text(text: str, *, last: bool) -> str:
        """Return what belongs to a record: before another one stands the time that this one begins with."""
        return text if last else _STAMP.sub("", text)

    def _pipes(self, match: re.Match[str], text: str, number: int, origin: str) -> None:
        cells: dict[str, Any] = {"iteration": bare(match[1]), "total iterations": bare(match[2])}
        parts = text.split("|")
        for part in parts:
            key, colon, value = part.rpartition(":")
            if colon and key.strip() and len(key) <= MAX_KEY:
                cells[key.strip()] = bare(value.strip())
        if parts[-1].strip():
            self._sink.skip(number, "the end of a line without its last bar; its last number may be cut short")
        self._sink.hints.add("| line")
        self._sink.row(cells, number, origin)

    def _prime(self, match: re.Match[str], text: str, number: int, origin: str) -> None:
        """prime-rl: "Step 5 | Loss 0.1 | Mismatch KL 0.02"; parts without a number, such as a duration, are left."""
        named = [found for part in text.split("|") if (found := _NAMED.match(part[:MAX_KEY])) is not None]
        if named:
            self._sink.hints.add("Step N | line")
            cells = {found[1]: bare(found[2]) for found in named}
            self._sink.row({"step": bare(match[1])} | cells, number, origin)
