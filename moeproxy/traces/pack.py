"""Packs: many traces in one Parquet file, and the registry of a folder of them.

A benchmark of a thousand runs as a thousand files is slow to copy and to read. A pack holds the rows of many runs one
below the other; what each run logged, and what it was, stands in the file's header, so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moeproxy.errors import TraceError
from moeproxy.files import atomic_file
from moeproxy.traces import parquet
from moeproxy.traces.trace import RunInfo, Trace

FORMAT = "moeproxy.pack"
VERSION = 1
REGISTRY = "registry.csv"
_KEY = b"moeproxy"
_RUN = "run"


def save_pack(traces: Sequence[Trace], path: str | Path) -> Path:
    """Write traces to one Parquet file, atomically, and return its path.

    Raises:
        TraceError: there is none to write, or the file cannot be written.
    """
    target = Path(path)
    if not traces:
        raise TraceError("a pack of no traces", where=target, expected="at least one")
    tables = [parquet.to_table(trace.steps, trace.trajectories) for trace in traces]
    runs = [
        {"info": trace.provenance.to_dict(), "columns": table.column_names}
        for trace, table in zip(traces, tables, strict=True)
    ]
    numbered = [
        table.append_column(_RUN, pa.array([index] * table.num_rows, pa.int32())) for index, table in enumerate(tables)
    ]
    whole = pa.concat_tables(numbered, promote_options="default")
    header = json.dumps({"format": FORMAT, "version": VERSION, "runs": runs}, sort_keys=True, default=str)
    with atomic_file(target) as temporary:
        pq.write_table(
            whole.replace_schema_metadata({_KEY: header.encode()}), temporary, compression="zstd", compression_level=12
        )
    return target


def load_pack(path: str | Path, *, trajectories: bool = True) -> tuple[Trace, ...]:
    """Read every trace of a pack, in the order in which they were saved.

    Args:
        path: the pack.
        trajectories: whether to read single responses too; without them it takes a fraction of the time.

    Raises:
        TraceError: the file is absent, cut short, no pack, or of another version.
    """
    table = parquet.read_table(Path(path))
    runs = _runs(table, Path(path))
    numbers = table[_RUN].to_numpy()
    # Rows of a run lie together, so a run is a slice.
    starts = [int(start) for start in pd.Series(numbers).drop_duplicates().index]
    stops = [*starts[1:], table.num_rows]
    traces = []
    for run, start, stop in zip(runs, starts, stops, strict=True):
        columns = [name for name in run["columns"] if trajectories or not name.startswith(parquet.PREFIX)]
        steps, responses = parquet.from_table(table.slice(start, stop - start).select(columns))
        traces.append(Trace(steps, responses, RunInfo.from_dict(run["info"])))
    return tuple(traces)


def load_registry(folder: str | Path, *, failed: bool = False) -> pd.DataFrame:
    """Read the registry of a folder of packs: one row a run; `fault`, `family` and `level` are empty when healthy.

    Args:
        folder: holds `registry.csv`.
        failed: whether to return the rows of runs that failed too: they have no pack, and `failed` says why.

    Raises:
        TraceError: there is no registry.
    """
    path = Path(folder) / REGISTRY
    if not path.is_file():
        raise TraceError("no such file", where=path, expected="the registry of a folder of packs")
    text = ("fault", "family", "level", "key", "pack", "failed")
    table = pd.read_csv(path, dtype=dict.fromkeys(text, str), keep_default_na=False)
    return table if failed or "pack" not in table else table.loc[table["pack"] != "", :]


def load_bench(
    folder: str | Path,
    *,
    models: Iterable[str] | None = None,
    faults: Iterable[str | None] | None = None,
    trajectories: bool = True,
) -> tuple[Trace, ...]:
    """Read the traces of a folder of packs, marked as recorded.

    Args:
        folder: holds `registry.csv` and the packs that it names.
        models: labels of the models wanted; None is all.
        faults: ids of the faults wanted, None among them for healthy runs; without it all.
        trajectories: whether to read single responses too (see `load_pack`).

    Raises:
        TraceError: the registry or a pack is missing or broken, or a model or fault is not in the registry.

    Example:
        >>> traces = load_bench("data/bench", models=["original"], faults=["kl_sign", None])
    """
    registry = load_registry(folder)
    wanted = registry
    if models is not None:
        wanted = _rows(wanted, "model", list(models), folder)
    if faults is not None:
        wanted = _rows(wanted, "fault", [fault or "" for fault in faults], folder)
    found = [
        trace for pack in wanted["pack"].unique() for trace in load_pack(Path(folder) / pack, trajectories=trajectories)
    ]
    labels = None if models is None else set(models)
    ids = None if faults is None else set(faults)
    return tuple(
        _recorded(trace)
        for trace in found
        if (labels is None or trace.provenance.model in labels) and (ids is None or trace.provenance.fault in ids)
    )


def _recorded(trace: Trace) -> Trace:
    return replace(trace, provenance=replace(trace.provenance, source="recorded"))


def _rows(table: pd.DataFrame, column: str, wanted: list[str], folder: str | Path) -> pd.DataFrame:
    unknown = [name for name in wanted if name not in set(table[column])]
    if unknown:
        raise TraceError(
            f"no recorded run with {column} {unknown[0]!r}",
            where=folder,
            expected=f"one of {', '.join(sorted(name or 'healthy' for name in table[column].unique()))}",
        )
    return table.loc[table[column].isin(wanted)]


def _runs(table: pa.Table, path: Path) -> list[dict]:
    try:
        header = json.loads((table.schema.metadata or {})[_KEY])
        kind, version, runs = header["format"], header["version"], list(header["runs"])
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError("no pack of traces", where=path, expected="a file written by save_pack") from error
    if (kind, version) != (FORMAT, VERSION):
        raise TraceError(f"format {kind!r}, version {version!r}", where=path, expected=f"{FORMAT}, version {VERSION}")
    return runs
