"""Parquet storage of traces: one row a step, trajectories as lists; NaN and null stay distinct."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moeproxy.errors import TraceError
from moeproxy.files import atomic_file

FORMAT = "moeproxy.trace"
VERSION = 1
SUFFIX = ".parquet"
REMEDY = "run again, or copy the file again from where it came"
_KEY = b"moeproxy"
PREFIX = "traj/"  # of the columns that hold trajectories as lists


def write(path: Path, steps: pd.DataFrame, trajectories: pd.DataFrame | None, run: Mapping[str, Any]) -> None:
    """Write one trace to one zstd-compressed Parquet file; the file appears complete or not at all."""
    header = json.dumps({"format": FORMAT, "version": VERSION, "run": run}, sort_keys=True, default=str)
    table = to_table(steps, trajectories).replace_schema_metadata({_KEY: header.encode()})
    try:
        with atomic_file(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
    except OSError as error:
        raise TraceError(
            f"the trace cannot be written ({error.strerror or error})",
            where=path,
            expected="a writable directory with room for it",
            remedy="choose another place or free some space",
        ) from error


def read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame | None, dict[str, Any]]:
    """Read steps, trajectories and provenance of one file.

    Raises:
        TraceError: the file is absent, cut short, no trace, or of another version.
    """
    table = read_table(path)
    run = _run(table.schema.metadata or {}, path)
    try:
        return *from_table(table), run
    except (KeyError, pa.ArrowException) as error:
        raise TraceError(f"a trace without {error}", where=path, remedy=REMEDY) from error


def to_table(steps: pd.DataFrame, trajectories: pd.DataFrame | None) -> pa.Table:
    """Return steps and trajectories as one Arrow table, a row a step, trajectories as lists."""
    steps_S = steps.index.to_numpy()
    columns = {"step": pa.array(steps_S)} | {str(name): to_arrow(column) for name, column in steps.items()}
    if trajectories is not None:
        columns |= _lists(trajectories, steps_S)
    return pa.table(columns)


def from_table(table: pa.Table) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Return the steps and trajectories that `to_table` put into a table."""
    return _steps(table), _trajectories(table)


def to_arrow(column: pd.Series) -> pa.Array:
    """Return a column as Arrow float64: NaN where NaN was measured, null where nothing was.

    In a plain NumPy column every NaN was measured. In object, masked or Arrow columns None and pd.NA are
    missing.
    """
    if isinstance(column.dtype, np.dtype) and column.dtype != object:
        return pa.array(column.to_numpy(np.float64), from_pandas=False)
    if isinstance(column.dtype, pd.ArrowDtype):
        return _whole(pa.chunked_array(pa.array(column.array))).cast(pa.float64())
    return pa.array([None if value is None or value is pd.NA else float(value) for value in column], pa.float64())


def from_arrow(values: pa.Array) -> pd.Series:
    """Return Arrow float64 as a column: plain float64 when nothing is missing, Arrow storage otherwise."""
    if values.null_count == 0:
        return pd.Series(values.to_numpy(zero_copy_only=False))
    return pd.Series(pd.array(values, dtype=pd.ArrowDtype(pa.float64())))


def _whole(chunked: pa.ChunkedArray) -> pa.Array:
    whole = chunked.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _lists(table: pd.DataFrame, steps_S: np.ndarray) -> dict[str, pa.Array]:
    at = table["step"].to_numpy()
    strangers = np.setdiff1d(at, steps_S)
    if strangers.size:
        found = f"trajectories name step {strangers[0]}, which the run lacks"
        raise TraceError(found, expected="steps of the run only")
    bounds = pa.array(np.append(np.searchsorted(at, steps_S, "left"), len(at)).astype(np.int32))
    names = [str(name) for name in table if name != "step"]
    return {PREFIX + name: pa.ListArray.from_arrays(bounds, pa.array(table[name].to_numpy())) for name in names}


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file, or some of its columns.

    Raises:
        TraceError: the file is absent or cut short, or lacks a column.
    """
    with _reading(path):
        # partitioning=None: a directory called seed=3 must not grow a column.
        table = pq.read_table(path, columns=columns, partitioning=None)  # pyright: ignore[reportArgumentType]
    if lost := [name for name in columns or () if name not in table.column_names]:
        raise TraceError(f"no column {lost[0]!r}", where=path, expected="what the file's header names", remedy=REMEDY)
    return table


def read_metadata(path: Path) -> Mapping[bytes, bytes]:
    """Read the key-value metadata of a Parquet file, none of its rows.

    Raises:
        TraceError: the file is absent or cut short.
    """
    with _reading(path):
        return pq.read_schema(path).metadata or {}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise TraceError("no such file", where=path, expected="a trace written by Trace.save")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            "not a complete Parquet file: it was cut short or is something else",
            where=path,
            expected="a trace written by Trace.save",
            remedy=REMEDY,
        ) from error


def _run(metadata: Mapping[bytes, bytes], path: Path) -> dict[str, Any]:
    try:
        header = json.loads(metadata[_KEY])
        kind, version, run = header["format"], header["version"], dict(header["run"])
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(
            "a Parquet file, but no moeproxy trace",
            where=path,
            expected="a trace written by Trace.save",
            remedy="give a trace; other logs must be read by a reader first",
        ) from error
    if kind != FORMAT or version != VERSION:
        raise TraceError(
            f"format {kind!r}, version {version!r}",
            where=path,
            expected=f"{FORMAT}, version {VERSION}",
            remedy="use the moeproxy release that wrote it, or record the run again",
        )
    return run


def _steps(table: pa.Table) -> pd.DataFrame:
    names = [name for name in table.column_names if name != "step" and not name.startswith(PREFIX)]
    frame = pd.DataFrame({name: from_arrow(_whole(table[name])) for name in names}, index=range(table.num_rows))
    return frame.set_axis(table["step"].to_numpy(), axis=0)


def _trajectories(table: pa.Table) -> pd.DataFrame | None:
    lists = {name: _whole(table[name]) for name in table.column_names if name.startswith(PREFIX)}
    if not lists:
        return None
    counts_S = next(iter(lists.values())).value_lengths().to_numpy(zero_copy_only=False)
    data = {"step": np.repeat(table["step"].to_numpy(), counts_S)}
    flat = {name.removeprefix(PREFIX): values.flatten() for name, values in lists.items()}
    return pd.DataFrame(data | {name: values.to_numpy(zero_copy_only=False) for name, values in flat.items()})
