"""Console output that a logger keeps inside its own file: metrics where the file has no others, failures always."""

from __future__ import annotations

from moeproxy.traces.logs.lines import MAX_LINE, parts
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.text import TextReader


class StoredConsole:
    """Takes pieces of console output as a logger stored them; a piece need not be a whole line."""

    def __init__(self) -> None:
        self._sink = Sink()
        self._readers: dict[int, TextReader] = {}
        self._rests: dict[int, tuple[int, bytes]] = {}
        self.lines = 0

    def piece(self, data: bytes, number: int, stream: int = 0) -> None:
        """Take a piece of one stream (standard output and error are apart); `number` is that of its record."""
        start, rest = self._rests.pop(stream, (number, b""))
        whole, end, tail = (rest + data).rpartition(b"\n")
        if end:
            for line in whole.split(b"\n"):
                self._line(line, start, stream)
                start = number
        if tail:
            # A line without end beyond all measure is looked at in pieces.
            if len(tail) > MAX_LINE:
                self._line(tail, start, stream)
            else:
                self._rests[stream] = (start, tail)

    def finish(self, sink: Sink) -> None:
        """Hand over to the sink of the file; rows only when it has none of its own."""
        for stream, (start, tail) in self._rests.items():
            self._line(tail, start, stream)
        self._rests.clear()
        if not self.lines:
            return
        mine = self._sink
        mine.findings = mine.findings + sink.findings
        sink.findings, sink.progress = mine.findings, mine.progress or sink.progress
        for name, version in mine.versions.items():
            sink.versions.setdefault(name, version)
        if sink.runs:
            sink.note(f"the {self.lines:,} lines of console output in this file were searched for failures only")
            return
        sink.runs, sink.hints = mine.runs, sink.hints | mine.hints
        sink.skipped |= mine.skipped
        for note in mine.notes:
            sink.note(note)
        where = "metrics were read from" if sink.runs else "no metric stands in"
        sink.note(f"no history in this file; {where} the {self.lines:,} lines of console output that it holds")

    def _line(self, line: bytes, number: int, stream: int) -> None:
        self.lines += 1
        reader = self._readers.setdefault(stream, TextReader(self._sink))
        for _, part in parts(number, line, self._sink):
            reader.line(number, part)
