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
    number, held, size, dropping, ended = 1, [], 0, False, True
    half = b""  # a carriage return at the end of a chunk may be half of a line end
    for new in _utf8(stream):
        if b"\0" in new:
            sink.note("the file holds NUL bytes, as a hole of a cut or a crash leaves them; they count as spaces")
            new = new.replace(b"\0", b" ")  # not nothing: the two sides of a hole are no number together
        chunk = half + new
        half = b"\r" if chunk.endswith(b"\r") else b""
        chunk = chunk.removesuffix(half)
        ended = chunk.endswith(b"\n") and not half
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not cut:
            size += len(chunk)
            held.append(chunk)
            if size > MAX_LINE:
                if not dropping:
                    sink.skip(number, f"longer than {MAX_LINE >> 20} MiB")
                held, size, dropping = [], 0, True
            continue
        data = b"".join([*held, chunk[:cut]])
        held, size = [chunk[cut:]], len(chunk) - cut
        if dropping:
            data, number, dropping = *_after_end(data, number), False
        if ahead is not None:
            ahead(data)
        if not data.strip(b"\r\n"):
            number += data.count(b"\n")
            continue
        pieces = data.split(b"\n")
        last = pieces.pop()
        for piece in pieces:
            if len(piece) <= MAX_LINE and b"\r" not in piece:
                if piece:
                    yield number, piece
            else:
                yield from parts(number, piece, sink)
            number += 1
        if last:
            yield from parts(number, last, sink)
    rest = b"".join([*held, half])
    if rest and not dropping:
        if ahead is not None:
            ahead(rest)
        yield from parts(number, rest, sink)
    sink.lines, sink.open_end = number - ended, not ended


def _after_end(data: bytes, number: int) -> tuple[bytes, int]:
    """Return what follows the first line end, and the number of its line; a "\\r" does not end the count."""
    places = [place for place in (data.find(b"\n"), data.find(b"\r")) if place >= 0]
    first = min(places)
    return (data[first + 1 :], number + 1) if data[first : first + 1] == b"\n" else (data[first:], number)


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
