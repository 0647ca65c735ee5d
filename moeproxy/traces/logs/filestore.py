"""mlflow's file store: `<run>/meta.yaml` and `<run>/metrics/<key>` with lines "timestamp value step".

A key with slashes is a path. Lines of two parts (mlflow before 1.0) have no step, those of five name a data set too.
A store in an archive is not put together: unpack it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeproxy.errors import TraceError
from moeproxy.traces.logs.cells import bare
from moeproxy.traces.logs.lines import lines, text
from moeproxy.traces.logs.sink import Sink

META, METRICS = "meta.yaml", "metrics"
MAX_KEYS = 20_000
_NAME = re.compile(r"^run_name:[ \t]*(.{1,200}?)[ \t]*$", re.MULTILINE)
_WHOLE = re.compile(r"-?\d{1,18}\Z", re.ASCII)


def runs_below(root: Path) -> list[Path]:
    """Return the folders of runs, `root` included."""
    found = [root] if _is_run(root) else []
    return found + [meta.parent for meta in sorted(root.rglob(META)) if meta.parent != root and _is_run(meta.parent)]


def read_run(folder: Path, sink: Sink) -> str:
    """Read a run into a sink and return its name. Lines are those of the files of its metrics.

    Raises:
        TraceError: a file cannot be read, or there are too many.
    """
    sink.container = "mlflow file store"
    rows: dict[tuple[int, int], list[Any]] = {}
    for count, (key, file) in enumerate(_metrics(folder / METRICS), 1):
        if count > MAX_KEYS:
            raise TraceError(f"over {MAX_KEYS:,} metrics", where=folder, expected="a run")
        _points(file, key, rows, sink)
    for (step, _), (_, number, cells) in sorted(rows.items(), key=lambda item: (item[1][0], item[0])):
        sink.row({"step": step} | cells, number)
    if not sink.runs:
        sink.note("a run without metrics: it logged nothing, or died before")
    return _name(folder)


def _is_run(folder: Path) -> bool:
    return (folder / META).is_file() and (folder / METRICS).is_dir() and not folder.is_symlink()


def _metrics(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            yield file.relative_to(folder).as_posix(), file


def _points(file: Path, key: str, rows: dict[tuple[int, int], list[Any]], sink: Sink) -> None:
    """Add the points of one metric: the nth value of a step stands in the nth row of that step."""
    seen: dict[int, int] = {}
    counted = Sink()
    try:
        with file.open("rb") as stream:
            for number, raw in lines(stream, counted):
                point = _point(text(raw, number, sink))
                if point is None:
                    sink.skip(number, f"no point of a metric ({key})")
                    continue
                time, value, step = point
                seen[step] = seen.get(step, 0) + 1
                row = rows.setdefault((step, seen[step]), [time, number, {}])
                row[0] = min(row[0], time)
                row[2][key] = value
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror or error})", where=file) from error
    sink.lines += counted.lines
    for skipped in counted.skipped.values():
        sink.skip(skipped.lines[0], skipped.reason)


def _point(line: str) -> tuple[int, Any, int] | None:
    parts = line.split()
    if len(parts) not in (2, 3, 5) or not _WHOLE.match(parts[0]):
        return None
    step = parts[2] if len(parts) > 2 else "0"
    value = bare(parts[1])
    if not _WHOLE.match(step) or isinstance(value, str):
        return None
    return int(parts[0]), value, int(step)


def _name(folder: Path) -> str:
    try:
        with (folder / META).open(encoding="utf-8", errors="replace") as stream:
            match = _NAME.search(stream.read(65_536))
    except OSError:
        match = None
    name = match[1].strip("'\"") if match else ""
    short = folder.name[:8]
    return f"{name} ({short})" if name else short
