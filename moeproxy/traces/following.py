"""Follow a text log while its program writes it: only what is new is read."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from moeproxy.errors import TraceError
from moeproxy.traces.logs.assemble import Wishes
from moeproxy.traces.logs.lines import MAX_LINE, lines
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.text import TextReader
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.reading import logs_of, stem

_CHUNK = 16 << 20


class LogFollower:
    """Reads what has been added to a log since the last look.

    JSON lines and console output are followed, uncompressed. A last line without its end is left for the next look.
    When the file was replaced (rotated) or cut, the new one is read from its start as a continuation of the run.

    Args:
        path: of the log; it need not exist yet.
        mapping: as in `read`.
        step: as in `read`.
        framework: as in `read`.

    Example:
        >>> follower = LogFollower("train.log")
        >>> while running:
        ...     if follower.poll():
        ...         show(follower.logs())
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mapping: Mapping[str, str] | None = None,
        step: str | None = None,
        framework: str | None = None,
    ) -> None:
        self._path, self._wishes = Path(path), Wishes(mapping, step, framework)
        self._sink = Sink(container="growing log")
        self._reader = TextReader(self._sink)
        self._offset, self._lines = 0, 0
        self._identity: tuple[int, int] | None = None

    def poll(self) -> int:
        """Read what is new and return the number of new rows; 0 while there is no file.

        Raises:
            TraceError: the file cannot be read.
        """
        before = self._rows()
        try:
            with self._path.open("rb") as stream:
                self._begin(os.fstat(stream.fileno()))
                stream.seek(self._offset)
                while data := stream.read(_CHUNK):
                    taken = self._take(data)
                    if not taken:
                        break
                    stream.seek(self._offset)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise TraceError(f"cannot be read ({error.strerror or error})", where=self._path) from error
        return self._rows() - before

    def logs(self) -> tuple[LogTrace, ...]:
        """Return the runs as far as they are read."""
        self._sink.lines = self._lines
        return tuple(logs_of(stem(str(self._path)), self._sink, (str(self._path),), self._wishes))

    def _rows(self) -> int:
        return sum(len(run.store) for run in self._sink.runs.values())

    def _begin(self, now: os.stat_result) -> None:
        """Start anew when the file is another one or has become shorter."""
        identity = (now.st_dev, now.st_ino)
        if self._identity is not None and (identity != self._identity or now.st_size < self._offset):
            self._sink.note("the log was replaced or cut while it was followed; line numbers go on from the old one")
            self._offset = 0
        self._identity = identity

    def _take(self, data: bytes) -> bool:
        """Take the whole lines of what was read; False when there is none yet."""
        whole, end, rest = data.rpartition(b"\n")
        if not end and len(rest) <= MAX_LINE:
            return False
        # A line without end beyond all measure is given up in pieces, so that the look goes on.
        part = whole + end if end else rest
        counted = Sink()
        for number, raw in lines(io.BytesIO(part), counted):
            self._reader.line(self._lines + number, raw)
        for skipped in counted.skipped.values():
            for number in skipped.lines:
                self._sink.skip(self._lines + number, skipped.reason)
        self._lines += part.count(b"\n")
        self._offset += len(part)
        return True
