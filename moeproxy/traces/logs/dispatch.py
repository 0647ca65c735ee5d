"""Which container a file is, by its first bytes; the name only helps where these leave it open."""

from __future__ import annotations

import codecs
import json
import re

from moeproxy.errors import TraceError
from moeproxy.traces.logs.databases import MAGIC, read_database
from moeproxy.traces.logs.documents import is_document, read_document
from moeproxy.traces.logs.looking import INTERESTING
from moeproxy.traces.logs.markdown import may_have_fences, read_markdown
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.swanlabfile import MARK as SWANLAB
from moeproxy.traces.logs.swanlabfile import read_swanlab
from moeproxy.traces.logs.tables import delimiter_of, read_csv
from moeproxy.traces.logs.text import read_text
from moeproxy.traces.logs.tfevents import is_events, read_events
from moeproxy.traces.logs.wandbfile import read_wandb


class UnknownKindError(TraceError):
    """A file that is no log of any kind; among others it is passed over."""


_ALIEN = {
    b"PAR1": "a Parquet file; Trace.load or load_pack reads those of moeproxy",
    b"\x7fELF": "a program",
    b"\x80\x04": "a pickle, which is never opened here",
}
_OPENS = re.compile(r"\s*(?:\{\s*(?:[\"}]|\Z)|\[\s*(?:[{\[\]]|\Z))")


def kind_of(source: Source) -> str:
    """Return what a file is: "events", "document", "text", ..., "csv:<delimiter>", "alien:<what>" or "unknown"."""
    head = source.peek()
    if not head:
        return "text"
    if is_events(head):
        return "events"
    if head.startswith(MAGIC):
        return "database"
    if head.startswith(b":W&B"):
        return "wandb"
    if head.startswith(SWANLAB):
        return "swanlab"
    for mark, what in _ALIEN.items():
        if head.startswith(mark):
            return f"alien:{what}"
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in head and not wide:
        if not _is_text(head.replace(b"\0", b"")):
            return "unknown"
        head = head.replace(b"\0", b" ")  # a hole that a cut or a crashed node left in a text
    text = head.decode("utf-16" if wide else "utf-8-sig", "replace")
    if _OPENS.match(text) and _is_one_value(text):
        return "document"
    sign = None if text.lstrip()[:1] in "{[" and text.strip() else delimiter_of(_whole_lines(text, len(head)))
    named = re.search(r"\.(csv|tsv)\b", source.name.rpartition("!")[2], re.IGNORECASE)
    if named and not (sign or INTERESTING.search(head)):
        sign = "\t" if named[1].lower() == "tsv" else ","
    if sign and (named or not INTERESTING.search(head)):
        return f"csv:{sign}"
    return "text"


def fill(source: Source, kind: str, sink: Sink) -> None:
    """Read a file of this kind into a sink.

    Raises:
        UnknownKindError: nothing here can read it.
        TraceError: it is broken.
    """
    _fill(source, kind, sink)
    if source.cut:
        sink.find("unreadable", 0, f"{source.cut} is cut short; what came before the cut was read")


def _fill(source: Source, kind: str, sink: Sink) -> None:
    if kind == "events":
        read_events(source, sink)
    elif kind == "document":
        read_document(source, sink)
    elif kind.startswith("csv:"):
        read_csv(source, sink, kind[4:])
    elif kind == "database":
        read_database(source, sink)
    elif kind == "wandb":
        read_wandb(source, sink)
    elif kind == "swanlab":
        read_swanlab(source, sink)
    elif kind == "text" and may_have_fences(source):
        read_markdown(source, sink, kind_of)
    elif kind == "text":
        read_text(source, sink)
    else:
        what = kind.removeprefix("alien:") if kind != "unknown" else "binary data of no known kind"
        raise UnknownKindError(
            what,
            where=source.name,
            expected="a text log, CSV, JSON, event file, or an archive of these",
            remedy="export the run as CSV or JSON lines and read that",
        )


def _is_text(head: bytes) -> bool:
    """Whether bytes are text but for a few: control characters and what is no UTF-8 are the mark of binary data."""
    text = head.decode("utf-8", "replace")
    odd = sum(1 for sign in text if sign == "\ufffd" or (sign < " " and sign not in "\t\r\n\x1b\b"))
    return len(text) > 20 and odd <= len(text) / 100


def _is_one_value(text: str) -> bool:
    """Whether a file that begins with a bracket is one JSON value, rather than one object a line."""
    if text.lstrip().startswith("["):
        return True
    line, end, rest = text.lstrip().partition("\n")
    try:
        found = json.loads(line)
    except RecursionError:
        return False
    except ValueError:
        # Not whole on one line: a document over several lines, or one that is longer than what was looked at; but
        # a line cut short before other objects is no document.
        return not end or line.rstrip().endswith(("{", "[")) or not rest.lstrip().startswith("{")
    return not rest.strip() and is_document(found)


def _whole_lines(text: str, size: int) -> str:
    return text if size < 32_768 else text.rpartition("\n")[0]
