"""Write what was read from a log: as files of this program, or as CSV tables for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moeproxy.errors import TraceError
from moeproxy.files import atomic_file
from moeproxy.traces.logtrace import LogTrace

Format = Literal["parquet", "csv"]
_UNSAFE = re.compile(r"[^\w.\-+]+")
_TAKEN = re.compile(r"\.(status|original)$")
"""What is added to the name of a run for its further files; a run of such a name would write over them."""


def convert(logs: Sequence[LogTrace], to: Format, out: str | Path) -> list[Path]:
    """Write every run that has metrics into a directory and return the files.

    For each run: the trace (`<name>.parquet`, which `Trace.load` reads, or `<name>.csv`), the states of its cells
    (`<name>.status`), every original row with its place in the log (`<name>.original`), and the states of the cells of
    those rows (`<name>.original.status`), which tell a NaN that was logged from null and from a key that is not there.

    Args:
        logs: of `read`.
        to: "parquet" or "csv".
        out: directory; it is made when absent.

    Raises:
        TraceError: no run has a metric.
    """
    kept = [log for log in logs if log.has_metrics]
    if not kept:
        said = f"no run with a metric: {logs[0].contents}" if logs else "no run"
        raise TraceError(f"{said}; nothing to write", expected="the result of read with at least one metric")
    names, written, folder = _names(kept), [], Path(out)
    for name, log in zip(names, kept, strict=True):
        target = folder / f"{name}.{to}"
        if to == "parquet":
            log.trace.save(target)
        else:
            _write_csv(_numbers(log.trace.steps), target)
        states = pd.concat([_places(log), log.original_status.astype(str)], axis=1)
        tables = {"status": log.status.astype(str), "original": with_places(log), "original.status": states}
        further = [(_write_csv if to == "csv" else _write_parquet, folder / f"{name}.{part}.{to}") for part in tables]
        for (write, file), table in zip(further, tables.values(), strict=True):
            write(table, file)
        written += [target, *(file for _, file in further)]
    return written


def with_places(log: LogTrace) -> pd.DataFrame:
    """Return the original rows with the columns `log:file`, `log:line`, ... before them, which say where they stood."""
    return pd.concat([_places(log), log.original], axis=1)


def _places(log: LogTrace) -> pd.DataFrame:
    return log.places.add_prefix("log:")


def _numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Return a table in which NaN is written as nan and a gap as nothing."""
    return steps.astype(object).where(~steps.isna() | _is_nan(steps), "")


def _is_nan(steps: pd.DataFrame) -> pd.DataFrame:
    found = {}
    for name, column in steps.items():
        array = pa.array(column.array, from_pandas=False) if column.dtype == float else pa.array(column.array)
        gaps = array.is_null(nan_is_null=False).to_numpy(zero_copy_only=False)
        found[name] = pd.isna(column.to_numpy(float, na_value=float("nan"))) & ~gaps
    return pd.DataFrame(found, index=steps.index)


def _names(logs: Sequence[LogTrace]) -> list[str]:
    """Return a file name for each run, without signs that a file system minds, each once."""
    names: list[str] = []
    for log in logs:
        base = _UNSAFE.sub("-", log.info.name).strip("-.") or "run"
        base = _TAKEN.sub(r"-\1", base)
        name, number = base[:120], 2
        while name in names:
            name, number = f"{base[:110]}-{number}", number + 1
        names.append(name)
    return names


def _write_csv(table: pd.DataFrame, target: Path) -> None:
    with atomic_file(target) as temporary:
        table.to_csv(temporary, na_rep="nan")


def _write_parquet(table: pd.DataFrame, target: Path) -> None:
    # Columns that hold text and numbers become text: Parquet has one type a column.
    mixed = {
        str(name): column.map(lambda cell: None if cell is None or cell != cell else str(cell))
        for name, column in table.items()
        if column.dtype == object
    }
    whole = pa.Table.from_pandas(table.assign(**mixed))
    with atomic_file(target) as temporary:
        pq.write_table(whole, temporary, compression="zstd")
