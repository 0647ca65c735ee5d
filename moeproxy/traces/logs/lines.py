"""Lines of a stream in flat memory: any line end, any length, any encoding; what cannot be shown is counted."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator

from moeproxy.traces.logs.sink import Sink

MAX_LINE = 8 << 20
"""Bytes of a line that are looked at; a longer line is left out and named."""

_CHUNK = 1 << 18
_ENDS = re.compile(rb"\r\n|\n|\r")
_BOMS = ((codecs.BOM_UTF8, ""), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def lines(
    stream: io.BufferedIOBase, sink: Sink, *, ahead: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, bytes without the line end); a carriage return ends a line but does not count as one.

    Numbers are those an editor shows: they count line feeds. Progress bars put many pieces on one line.
    `ahead` is called with the text that the next lines are parts of, before these come.
    """
    number, rest, dropping = 1, b"", False
    for chunk in _utf8(stream):
        data = rest + chunk
        if ahead is not None:
            ahead(data)
        # A carriage return at the end may be half of a line end.
        tail = b"\r" if data.endswith(b"\r") else b""
        pieces = data.removesuffix(tail).split(b"\n") if b"\n" in data else [data.removesuffix(tail)]
        rest = pieces.pop() + tail
        for piece in pieces:
            if not dropping and piece:
                if len(piece) <= MAX_LINE and b"\r" not in piece:
                    yield number, piece
                else:
                    yield from parts(number, piece, sink)
            dropping = False
            number += 1
        if len(rest) > MAX_LINE:
            if not dropping:
                sink.skip(number, f"longer than {MAX_LINE >> 20} MiB")
            rest, dropping = b"", True
    if rest and not dropping:
        yield from parts(number, rest, sink)
        number += 1
    sink.lines = number - 1


def text(line: bytes, number: int, sink: Sink) -> str:
    """Return a line as text; bytes that are no UTF-8 become U+FFFD, which is noted."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        sink.note(f"line {number} and perhaps others hold bytes that are no UTF-8; they became U+FFFD")
        return line.decode("utf-8", "replace")


def parts(number: int, piece: bytes, sink: Sink) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of one line that carriage returns part; a line too long is left out."""
    if len(piece) > MAX_LINE:
        sink.skip(number, f"longer than {MAX_LINE >> 20} MiB")
    elif b"\r" in piece:
        yield from ((number, part) for part in _ENDS.split(piece) if part)
    elif piece:
        yield number, piece


def _utf8(stream: io.BufferedIOBase) -> Iterator[bytes]:
    first = stream.read(_CHUNK)
    for mark, encoding in _BOMS:
        if first.startswith(mark):
            yield from _recoded(first[len(mark) :], stream, encoding)
            return
    yield from _recoded(first, stream, "")


def _recoded(first: bytes, stream: io.BufferedIOBase, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    chunk = first
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace") if decoder else chunk
        chunk = stream.read(_CHUNK)
