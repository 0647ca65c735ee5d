"""SQLite databases of mlflow and trackio, opened for reading only."""

from __future__ import annotations

import math
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import Status
from moeproxy.traces.logs.opening import Source
from moeproxy.traces.logs.sink import MAX_RUNS, Sink
from moeproxy.traces.logs.text import take_object

MAGIC = b"SQLite format 3\0"
SECONDS = 600.0
MAX_VALUE = 8 << 20
"""Bytes of one value in a database; larger ones are refused by SQLite."""

MAX_HELD = 256 << 20
"""Bytes of a database in an archive."""

_MLFLOW = {"key", "value", "run_uuid", "step", "is_nan"}
_TRACKIO = {"run_name", "step", "metrics"}


def read_database(source: Source, sink: Sink) -> None:
    """Read a database into a sink, a run a run. "Lines" are rows of the table of metrics.

    One in an archive is held in memory.

    Raises:
        TraceError: it is broken, too large for an archive, or none of mlflow or trackio.
    """
    path = Path(source.name)
    if path.with_name(f"{path.name}-wal").exists():
        sink.note(f"{path.name}-wal holds writes that are not in the database yet; they are not read")
    try:
        with closing(_opened(path) if _is_database(path) else _held(source)) as base:
            _guard(base)
            _read(base, source.name, sink)
    except sqlite3.Error as error:
        raise TraceError(f"a broken database ({error})", where=source.name, remedy="copy it again") from error


def _is_database(path: Path) -> bool:
    """Whether the file on disk is the database itself; a compressed one has the same name."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _opened(path: Path) -> sqlite3.Connection:
    # immutable: no lock, no journal, nothing written beside somebody's database.
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)


def _held(source: Source) -> sqlite3.Connection:
    data = bytearray(source.stream.read(MAX_HELD + 1))
    if len(data) > MAX_HELD:
        raise TraceError(
            f"a database of more than {MAX_HELD >> 20} MiB in an archive",
            where=source.name,
            remedy="unpack it, and give its path",
        )
    # A database in write-ahead mode asks for a second file; these two bytes say so (sqlite.org/fileformat2.html).
    if data[18:20] == b"\2\2":
        data[18:20] = b"\1\1"
    base = sqlite3.connect(":memory:")
    base.deserialize(bytes(data))
    return base


def _guard(base: sqlite3.Connection) -> None:
    """Bound what a hostile database can do."""
    base.text_factory = bytes
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
    end = time.monotonic() + SECONDS
    base.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    base.execute("PRAGMA trusted_schema = OFF")


def _read(base: sqlite3.Connection, where: str, sink: Sink) -> None:
    # A view called "metrics" could compute anything; only a table is read.
    tables = {_text(name) for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    columns = {_text(row[1]) for row in base.execute("PRAGMA table_info(metrics)")} if "metrics" in tables else set()
    if columns >= _MLFLOW:
        _mlflow(base, sink, named="runs" in tables)
    elif columns >= _TRACKIO:
        _trackio(base, sink, with_ids="run_id" in columns)
    else:
        raise TraceError(
            f"a database with the tables {', '.join(sorted(tables)[:10]) or 'none'}",
            where=where,
            expected="a database of mlflow or trackio, which have a table of metrics",
        )


def _mlflow(base: sqlite3.Connection, sink: Sink, *, named: bool) -> None:
    """One row a metric: those of one step that were written one after the other are put together."""
    sink.container = "mlflow database"
    names = dict(base.execute("SELECT run_uuid, name FROM runs")) if named else {}
    row: dict[str, Any] = {}
    state = (b"", 0)
    start = 0
    order = "SELECT key, value, is_nan, run_uuid, step FROM metrics ORDER BY run_uuid, timestamp, rowid"
    for number, (raw, value, is_nan, run, step) in enumerate(base.execute(order), 1):
        sink.lines = number
        key = _text(raw)
        if row and (state != (run, step) or key in row):
            _put(sink, row, start, state[0], names)
            row = {}
        if not row:
            state, start, row = (run, step), number, {"step": step}
        row[key] = _mlflow_cell(value, is_nan)
    if row:
        _put(sink, row, start, state[0], names)


def _put(sink: Sink, row: dict[str, Any], number: int, run: bytes, names: dict[bytes, bytes]) -> None:
    name = _text(names.get(run) or b"")
    short = _text(run)[:8]
    sink.row(row, number, run=f"{name} ({short})" if name else short)


def _mlflow_cell(value: Any, is_nan: Any) -> Any:
    """mlflow writes NaN as 0 with a mark, and the infinities as the largest numbers there are."""
    if is_nan:
        return (math.nan, Status.NAN, None)
    if isinstance(value, float) and abs(value) == sys.float_info.max:
        return math.copysign(math.inf, value)
    return _text(value) if isinstance(value, bytes) else value


def _trackio(base: sqlite3.Connection, sink: Sink, *, with_ids: bool) -> None:
    """One row a call: its metrics are JSON, in which NaN and infinities are text."""
    sink.container = "trackio database"
    column = "run_id" if with_ids else "NULL"
    names = _trackio_names(base) if with_ids else {}
    query = f"SELECT {column}, run_name, step, metrics FROM metrics ORDER BY rowid"
    for number, (run_id, run, step, metrics) in enumerate(base.execute(query), 1):
        sink.lines = number
        raw = metrics if isinstance(metrics, bytes | str) else b""
        name = names.get((run, run_id)) or _with_id(run, run_id)
        take_object(raw, number, sink, before={"step": step}, run=name)


def _trackio_names(base: sqlite3.Connection) -> dict[tuple[Any, Any], str]:
    """Return the name of each (run_name, run_id): its own, with the id where several runs have one name.

    Empty for a database with more runs than are read: there each gets its id.
    """
    pairs = list(base.execute("SELECT DISTINCT run_name, run_id FROM metrics LIMIT ?", (MAX_RUNS + 1,)))
    if len(pairs) > MAX_RUNS:
        return {}
    shared = Counter(run for run, _ in pairs)
    short = Counter(_with_id(run, run_id, 8) for run, run_id in pairs)
    found = {}
    for run, run_id in pairs:
        cut = _with_id(run, run_id, 8)
        found[run, run_id] = _text(run) if shared[run] == 1 else cut if short[cut] == 1 else _with_id(run, run_id)
    return found


def _with_id(run: Any, run_id: Any, length: int | None = None) -> str:
    return _text(run) if run_id is None else f"{_text(run)} ({_text(run_id)[:length]})"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
