"""Files that are one JSON value: trainer_state.json, Megatron's golden values, lists of rows, tables of columns."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import Status, classify
from moeproxy.traces.logs.nesting import TooDeep, flat
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.text import read_text, unwrapped

MAX_BYTES = 256 << 20
"""As Python objects a document takes about ten times as much; a state of 100,000 steps has 60 MB."""
MAX_DIGITS = 4300
OBJECTS = "JSON objects"
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_LIST = re.compile(r"\s*\[")
_BETWEEN = re.compile(r"[\s,]*")


def read_document(source: Source, sink: Sink) -> None:
    """Read a JSON document into a sink. "Lines" are the entries of its list of rows, counted from 1.

    Raises:
        TraceError: it is too large, no JSON, nested too deeply, or of no known shape.
    """
    data = source.stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TraceError(f"JSON of more than {MAX_BYTES >> 20} MiB", where=source.name, expected="JSON lines")
    try:
        found = _loaded(data, sink)
    except RecursionError as error:
        raise TraceError("objects nested too deeply", where=source.name, expected="a log") from error
    except ValueError as error:
        if not (_sequence(_text(data), sink) or _beginning(_text(data), sink) or _lines(data, source.name, sink)):
            raise TraceError(
                f"no JSON ({error})",
                where=source.name,
                expected="a complete JSON document",
                remedy="copy the file again",
            ) from error
        return
    if isinstance(found, dict) and isinstance(found.get("log_history"), list):
        _trainer_state(found, sink)
    elif isinstance(found, dict) and _is_golden(found):
        _golden(found, sink)
    elif isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        sink.container = "JSON list of rows"
        _entries(found, sink)
    elif isinstance(found, dict) and _is_columns(found):
        _columns(found, sink)
    else:
        sink.container = "JSON document"
        sink.note("a JSON document, but no list of rows and no table of columns")


def is_document(found: Any) -> bool:
    """Whether a JSON value on one line is a document of its own rather than the only row of a log."""
    return isinstance(found, dict) and ("log_history" in found or _is_golden(found) or _is_columns(found))


def _text(data: bytes) -> str:
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if wide else "utf-8-sig", "replace")


def _loaded(data: bytes, sink: Sink) -> Any:
    endless: list[str] = []

    def whole(digits: str) -> int | str:
        if len(digits) < MAX_DIGITS:
            return int(digits)
        endless.append(digits)
        return f"{digits[:20]}... ({len(digits)} digits)"

    try:
        return json.loads(_text(data))
    except ValueError as error:
        if "digits" not in str(error):
            raise
        # Python refuses to convert such an integer; the other numbers are as good as ever.
        found = json.loads(_text(data), parse_int=whole)
        for _ in endless:
            sink.skip(0, f"an integer of more than {MAX_DIGITS} digits")
        return found


def _lines(data: bytes, name: str, sink: Sink) -> bool:
    """Read as text what only begins like JSON, such as a console that shows its configuration first.

    Returns:
        whether there is anything in it; otherwise it is a document that is broken.
    """
    tried = Sink()
    read_text(Source(name, io.BufferedReader(io.BytesIO(data))), tried)  # pyright: ignore[reportArgumentType]
    if not (tried.runs or tried.findings or tried.progress):
        return False
    vars(sink).update(vars(tried))
    return True


def _sequence(text: str, sink: Sink) -> bool:
    """Read objects that follow one another, each over several lines; False when that is not all there is."""
    decoder, place, entries = json.JSONDecoder(), 0, []
    end = len(text.rstrip(" \t\r\n,"))
    try:
        while (place := _BETWEEN.match(text, place).end()) < end:  # pyright: ignore[reportOptionalMemberAccess]
            entry, place = decoder.raw_decode(text, place)
            entries.append(entry)
    except (ValueError, RecursionError):
        return False
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        return False
    sink.container = OBJECTS
    _entries(entries, sink)
    return True


def _beginning(text: str, sink: Sink) -> bool:
    """Read the whole entries of a list of rows that was cut short; False when there is none."""
    history = _HISTORY.search(text)
    start = _LIST.match(text) or history
    if start is None:
        return False
    decoder, place, entries = json.JSONDecoder(), start.end(), []
    try:
        while True:
            place = _BETWEEN.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
            entry, place = decoder.raw_decode(text, place)
            entries.append(entry)
    except (ValueError, RecursionError):
        pass
    if not any(isinstance(entry, dict) for entry in entries):
        return False
    if start is history:
        _trainer_state({"log_history": entries}, sink)
    else:
        sink.container = "JSON list of rows"
        _entries(entries, sink)
    sink.skip(len(entries) + 1, "cut short")
    sink.note(f"the file is no complete JSON: its first {len(entries)} entries were read")
    return True


def _trainer_state(found: dict[str, Any], sink: Sink) -> None:
    sink.container = "trainer_state.json"
    sink.hints.add("trainer state")
    sink.facts |= {key: found[key] for key in ("global_step", "max_steps", "logging_steps") if key in found}
    _entries(found["log_history"], sink)


def _entries(entries: list[Any], sink: Sink) -> None:
    sink.lines = len(entries)
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            sink.skip(number, "an entry that is no object")
            continue
        try:
            sink.row(flat(unwrapped(entry, sink)), number)
        except TooDeep:
            sink.skip(number, "objects nested too deeply")


def _is_golden(found: dict[str, Any]) -> bool:
    values = list(found.values())
    return bool(values) and all(isinstance(v, dict) and isinstance(v.get("values"), dict) for v in values)


def _golden(found: dict[str, Any], sink: Sink) -> None:
    """Megatron-LM writes "nan" in quotes where it has no value; that is missing, not NaN."""
    sink.container = "Megatron golden values"
    sink.hints.add("golden values")
    rows: dict[int, dict[str, Any]] = {}
    for name, entry in found.items():
        for step, value in entry["values"].items():
            if not step.isdigit() or len(step) > 15:
                sink.skip(0, f"a step that is no number in {name!r}")
                continue
            number, status, text = classify(value)
            if status == Status.NAN_TEXT:
                number, status, text = float("nan"), Status.MISSING, "nan"
            rows.setdefault(int(step), {"step": int(step)})[name] = (number, status, text)
    sink.note('"nan" in quotes stands for "no value" in these files; such cells are missing')
    sink.lines = len(rows)
    for number_, step in enumerate(sorted(rows), 1):
        sink.row(rows[step], number_)


def _is_columns(found: dict[str, Any]) -> bool:
    lengths = {len(value) if isinstance(value, list) else -1 for value in found.values()}
    return len(lengths) == 1 and lengths.pop() > 0


def _columns(found: dict[str, Any], sink: Sink) -> None:
    sink.container = "JSON table of columns"
    names = list(found)
    _entries([dict(zip(names, cells, strict=True)) for cells in zip(*found.values(), strict=True)], sink)
