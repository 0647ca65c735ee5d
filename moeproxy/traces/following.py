"""Follow a text log while its program writes it: only what is new is read."""

from __future__ import annotations

import codecs
import io
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from moeproxy.errors import TraceError
from moeproxy.traces.logs.assemble import Wishes
from moeproxy.traces.logs.dispatch import kind_of
from moeproxy.traces.logs.lines import MAX_LINE, lines
from moeproxy.traces.logs.opening import PEEK, Source, packing
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.text import TextReader
from moeproxy.traces.logtrace import LogTrace
from moeproxy.traces.reading import logs_of, stem

_CHUNK = 16 << 20
_TAIL = 256
"""Bytes before the place that was read to, by which a file that was written anew is told from one that has grown."""

_NAMES = {"database": "an SQLite database", "events": "an event file", "unknown": "binary data"}


class LogFollower:
    """Reads what has been added to a log since the last look.

    JSON lines and console output are followed, uncompressed. A last line without its end is left for the next look.
    When the file was replaced (rotated), the rest of the old one is read first, then the new one from its start as a
    continuation of the run; likewise when it was cut, or cut and written anew. The file stays open between looks, so
    that nothing is lost by a rotation; `close` it, or use the follower as a context manager.

    Args:
        path: of the log; it need not exist yet.
        mapping: as in `read`.
        step: as in `read`.
        framework: as in `read`.

    Example:
        >>> with LogFollower("train.log") as follower:
        ...     while running:
        ...         if follower.poll():
        ...             show(follower.logs())
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
        self._offset, self._lines, self._tail = 0, 0, b""
        self._refused = False
        self._stream: BinaryIO | None = None
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> LogFollower:
        """Return the follower."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; the next look opens it again where this one stopped."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def poll(self) -> int:
        """Read what is new and return the number of new rows; 0 while there is no file.

        Raises:
            TraceError: the file cannot be read, or is none that can be followed: an archive, a table, ...
        """
        before = self._rows()
        try:
            now = self._now()
            if self._stream is not None and now is not None:
                self._check(self._stream, now)
            if self._stream is None and now is not None:
                self._open()
            if self._stream is not None:
                self._drain(self._stream)
        except OSError as error:
            raise TraceError(f"cannot be read ({error.strerror or error})", where=self._path) from error
        return self._rows() - before

    def logs(self) -> tuple[LogTrace, ...]:
        """Return the runs as far as they are read."""
        self._sink.lines = self._lines
        return tuple(logs_of(stem(str(self._path)), self._sink, (str(self._path),), self._wishes))

    def _rows(self) -> int:
        return sum(len(run.store) for run in self._sink.runs.values())

    def _now(self) -> os.stat_result | None:
        try:
            return self._path.stat()
        except FileNotFoundError:
            return None

    def _check(self, stream: BinaryIO, now: os.stat_result) -> None:
        """Leave the file when another one has taken its name."""
        if _identity(os.fstat(stream.fileno())) != _identity(now):
            if not self._refused:
                self._drain(stream)
                self._end(stream)
            self.close()

    def _open(self) -> None:
        stream = self._path.open("rb")
        identity = _identity(os.fstat(stream.fileno()))
        if self._identity is not None and identity != self._identity:
            self._restart()
        self._stream, self._identity = stream, identity
        weakref.finalize(self, stream.close)

    def _restart(self) -> None:
        self._sink.note("the log was replaced or cut while it was followed; line numbers go on from the old one")
        self._offset, self._tail = 0, b""

    def _drain(self, stream: BinaryIO) -> None:
        """Take every whole line that is new."""
        if not self._goes_on(stream):
            self._restart()
            self._reader = TextReader(self._sink)  # lines were lost, so what they had begun does not go on here
        self._check_kind(stream)
        stream.seek(self._offset)
        while data := stream.read(_CHUNK):
            if not self._take(data):
                break
            stream.seek(self._offset)

    def _goes_on(self, stream: BinaryIO) -> bool:
        """Whether what was read still stands there; a file cut and written anew may be longer than it was."""
        if os.fstat(stream.fileno()).st_size < self._offset:
            return False
        stream.seek(self._offset - len(self._tail))
        return stream.read(len(self._tail)) == self._tail

    def _check_kind(self, stream: BinaryIO) -> None:
        """Refuse what is no text log, as long as the first bytes, which show it, may not all have been seen."""
        if self._offset < PEEK:
            stream.seek(0)
            self._refused = True
            _check_head(stream.read(PEEK), self._path)
            self._refused = False

    def _end(self, stream: BinaryIO) -> None:
        """Take the last line of a file that nobody will end."""
        stream.seek(self._offset)
        if rest := stream.read(MAX_LINE):
            self._lines_of(rest)
            self._lines += 1

    def _take(self, data: bytes) -> bool:
        """Take the whole lines of what was read, ended by line feeds or carriage returns; False when there is none."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) <= MAX_LINE:
            return False
        # A line without end beyond all measure is given up in pieces, so that the look goes on.
        self._lines_of(data[:cut] if cut else data)
        return True

    def _lines_of(self, part: bytes) -> None:
        counted = Sink()
        for number, raw in lines(io.BytesIO(part), counted):
            self._reader.line(self._lines + number, raw)
        for skipped in counted.skipped.values():
            for number in skipped.lines:
                self._sink.skip(self._lines + number, skipped.reason)
        self._lines += part.count(b"\n")
        self._offset += len(part)
        self._tail = (self._tail + part[-_TAIL:])[-_TAIL:]


def check_followable(path: Path) -> None:
    """Raise unless a log can be followed while it grows: an uncompressed text file, which need not exist yet.

    Raises:
        TraceError: it is a directory, or its first bytes are those of something else.
    """
    if path.is_dir():
        raise TraceError("a directory cannot be followed", where=path, expected="one text log")
    if path.is_file():
        with path.open("rb") as stream:
            _check_head(stream.read(PEEK), path)


def _check_head(head: bytes, path: Path) -> None:
    what = packing(head) and f"a {packing(head)} archive"
    if not what and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        what = "UTF-16 text"
    if not what:
        stream = io.BufferedReader(io.BytesIO(head), PEEK)  # pyright: ignore[reportArgumentType]
        kind, _, further = kind_of(Source(str(path), stream)).partition(":")
        if kind in ("text", "document"):  # a console log may begin with the JSON of its settings
            return
        what = {"csv": "a CSV table", "alien": further.partition(";")[0]}.get(kind, _NAMES.get(kind, f"a {kind} file"))
    raise TraceError(
        f"{what} cannot be followed",
        where=path,
        expected="JSON lines or console output, uncompressed",
        remedy="read it with moeproxy.traces.read (a panel: press Read), again for a look at what is new",
    )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
