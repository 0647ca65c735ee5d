"""Logs in the fences of a Markdown file: a table or a JSON document in one is read like a file of its own."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import NUMERIC, classify
from moeproxy.traces.logs.documents import OBJECTS, read_document
from moeproxy.traces.logs.opening import PEEK, Source
from moeproxy.traces.logs.sink import MAX_RUNS, Run, Sink
from moeproxy.traces.logs.tables import read_csv
from moeproxy.traces.logs.text import flat, read_text, unwrapped

MAX_BYTES = 64 << 20
"""Of a file whose fences are looked at; a larger one is read as any other text."""

MAX_BLOCKS = 1000
_NAME = re.compile(r"\.(?:md|markdown|mdx|qmd|rmd)$", re.IGNORECASE)
_OPENS = re.compile(rb"^([ \t]{0,40})(`{3,20}|~{3,20})([^`~\r\n]{0,200})\r?$", re.MULTILINE)
_CLOCK = re.compile(r"(?:^|/)_?(?:global_step|current_steps|step|iteration|iter|epoch)$")
_OBJECT = re.compile(r"[\s,]*(?=\{)")
_TABLE_IN = frozenset({"", "csv", "tsv", "txt", "text", "log", "logs", "console", "output", "plain", "plaintext"})
"""Words after a fence under which a table may stand: in code, lines with equally many commas are none."""


@dataclass
class _Shifted(Sink):
    """Takes lines of a block by their numbers in the whole file."""

    shift: int = 0

    def row(self, cells: dict[str, Any], line: int, origin: str = "", run: str = "") -> None:
        if run not in self.runs and len(self.runs) >= MAX_RUNS:
            self.skip(line, f"more than {MAX_RUNS} runs in one table")
        else:
            super().row(cells, line + self.shift, origin, run)

    def skip(self, line: int, reason: str) -> None:
        super().skip(line + self.shift, reason)


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Args:
        line: of the opening fence, counted from 1.
        word: after the opening fence, in small letters.
        start: of the text within, in bytes.
        end: of it; the closing fence begins here.
        indent: white space before the opening fence.
    """

    line: int
    word: str
    start: int
    end: int
    indent: bytes


def may_have_fences(source: Source) -> bool:
    """Whether a text file is Markdown by its name, or shows a fence among its first bytes."""
    return bool(_NAME.search(source.name) or _OPENS.search(source.peek()))


def blocks_of(data: bytes) -> Iterator[Block]:
    """Yield the fenced blocks of a text; one that is never closed goes on to its end.

    Example:
        >>> [(block.line, block.word) for block in blocks_of(b"a\\n```csv\\nx,y\\n1,2\\n```\\n")]
        [(2, 'csv')]
    """
    place, line, counted = 0, 1, 0
    while found := _OPENS.search(data, place):
        line, counted = line + data.count(b"\n", counted, found.start()), found.start()
        start = min(found.end() + 1, len(data))
        closing = re.compile(rb"^[ \t]*" + found[2][:1] + rb"{%d,}[ \t\r]*$" % len(found[2]), re.MULTILINE)
        close = closing.search(data, start)
        end, place = (close.start(), close.end()) if close else (len(data), len(data))
        word = found[3].decode("utf-8", "replace").strip("{}. ").lower().partition(" ")[0]
        yield Block(line, word, start, end, found[1])


def read_markdown(source: Source, sink: Sink, kind_of: Callable[[Source], str]) -> None:
    """Read a text file with fences into a sink: tables and documents in them, and all the rest as any text.

    Blocks with rows become runs of their own when there are several, or rows outside of them. In a file that is no
    Markdown by its name they count only when nothing else in it is a row: a log may show what a model has written.

    Args:
        source: the file.
        sink: where the rows go.
        kind_of: `dispatch.kind_of`.
    """
    data = source.stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        sink.note(f"more than {MAX_BYTES >> 20} MiB: tables and JSON documents in fences were not looked for")
        read_text(_source(source.name, _Chained(data, source.stream)), sink)
        return
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", "replace").encode()
    if not _NAME.search(source.name) and _is_log(source.name, data, sink):
        return
    taken = _taken(source.name, data, kind_of, sink)
    read_text(_source(source.name, io.BytesIO(_without(data, taken))), sink)
    if not taken:
        return
    containers = [sink.container] if sink.runs else []
    several = len(taken) + len(sink.runs) > 1
    for block, part in taken.items():
        _merge(part, sink, f"{PurePath(source.name.rpartition('!')[2]).name}:{block.line}" if several else "")
        containers.append(part.container)
    sink.container = f"{', '.join(dict.fromkeys(containers))} in Markdown"


def _is_log(name: str, data: bytes, sink: Sink) -> bool:
    """Read a text as if it had no fences; False, and nothing is in the sink, when it has no rows then."""
    trial = Sink()
    read_text(_source(name, io.BytesIO(data)), trial)
    if not trial.runs:
        return False
    for part in fields(Sink):
        setattr(sink, part.name, getattr(trial, part.name))
    return True


def _taken(name: str, data: bytes, kind_of: Callable[[Source], str], sink: Sink) -> dict[Block, Sink]:
    """Return the blocks that are tables or documents with rows, and what was found in each."""
    found: dict[Block, Sink] = {}
    for count, block in enumerate(blocks_of(data)):
        if count >= MAX_BLOCKS:
            sink.note(
                f"more than {MAX_BLOCKS} fenced blocks; tables and JSON documents in the others were not looked for"
            )
            break
        part = _part(name, data[block.start : block.end], block, kind_of)
        if part.runs:
            found[block] = part
    return found


def _part(name: str, raw: bytes, block: Block, kind_of: Callable[[Source], str]) -> Sink:
    """Return what is in a block; nothing when it is neither a table nor a document."""
    inner = re.sub(rb"^" + re.escape(block.indent), b"", raw, flags=re.MULTILINE) if block.indent else raw
    clean = inner.decode("utf-8", "replace").encode()
    suffix = f".{block.word}" if block.word in ("csv", "tsv") else ""
    kind = kind_of(_source(f"block{suffix}", io.BytesIO(clean))) if clean.strip() else "text"
    part = _Shifted(shift=block.line)
    if kind.startswith("csv:") and block.word in _TABLE_IN:
        read_csv(_source(name, io.BytesIO(clean)), part, kind[4:])
    elif kind == "document":
        part = _document(name, clean, block)
    if clean != inner:
        part.note(f"the fenced block on line {block.line} holds bytes that are no UTF-8; they became U+FFFD")
    return part


def _document(name: str, inner: bytes, block: Block) -> Sink:
    part = Sink()
    try:
        read_document(_source(name, io.BytesIO(inner)), part)
        if part.container == OBJECTS:
            part.runs.clear()  # below they keep the lines that they stand on
    except TraceError:
        part.runs.clear()  # several objects one after the other are no document
    if part.runs:
        part.note(f"the fenced block on line {block.line} is a JSON document: its lines are the entries of it")
        return part
    return _objects(inner.decode("utf-8"), block)


def _objects(text: str, block: Block) -> Sink:
    """Read objects that are printed over several lines each, a row an object, when they are rows at all.

    One object with neither a step nor others after it is a setting rather than a row.
    """
    sink, decoder, place, clocked = _Shifted(container=OBJECTS, shift=block.line), json.JSONDecoder(), 0, False
    line, counted = 1, 0
    while start := _OBJECT.match(text, place):
        line, counted = line + text.count("\n", counted, start.end()), start.end()
        try:
            found, place = decoder.raw_decode(text, start.end())
            cells = flat(unwrapped(found, sink))
        except (ValueError, RecursionError):
            sink.skip(line, "starts like JSON but is none")
            break
        if any(_is_number(value) for value in cells.values()):
            sink.row(cells, line)
            clocked = clocked or any(map(_CLOCK.search, cells))
    rows = sum(len(run.store) for run in sink.runs.values())
    return sink if rows > 1 or clocked else Sink()


def _is_number(value: Any) -> bool:
    return (value[1] if isinstance(value, tuple) else classify(value)[1]) in NUMERIC


def _without(data: bytes, blocks: dict[Block, Sink]) -> bytes:
    """Return the text without these blocks, its lines where they were."""
    pieces, place = [], 0
    for block in blocks:
        pieces += [data[place : block.start], b"\n" * data.count(b"\n", block.start, block.end)]
        place = block.end
    return b"".join([*pieces, data[place:]])


def _merge(part: Sink, sink: Sink, name: str) -> None:
    for key, run in part.runs.items():
        if len(sink.runs) >= MAX_RUNS:
            sink.note(f"more than {MAX_RUNS} runs in one file; the others were left out")
            break
        own = f"{name} {key}".strip() if key and key in sink.runs else key or name
        sink.runs[own] = Run(own, run.store)
    for reason, skipped in part.skipped.items():
        for line in skipped.lines:
            sink.skip(line, reason)
        sink.skipped[reason].count += skipped.count - len(skipped.lines)
    for note in part.notes:
        sink.note(note)
    sink.hints |= part.hints
    sink.facts |= part.facts


def _source(name: str, stream: Any) -> Source:
    return Source(name, io.BufferedReader(stream, PEEK))


class _Chained(io.RawIOBase):
    """Bytes that were read already, and the rest of their stream."""

    def __init__(self, first: bytes, rest: io.BufferedReader[Any]) -> None:
        self._first, self._rest = io.BytesIO(first), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._first.readinto(buffer) or self._rest.readinto(buffer)
