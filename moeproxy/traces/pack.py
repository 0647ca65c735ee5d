"""Packs: many traces in one Parquet file, and the registry of a folder of them.

A benchmark of a thousand runs as a thousand files is slow to copy and to read. A pack holds the rows of many runs one
below the other; what each run logged, and what it was, stands in the file's header, so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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


def load_pack(
    path: str | Path, *, trajectories: bool = True, keep: Callable[[RunInfo], bool] | None = None
) -> tuple[Trace, ...]:
    """Read the traces of a pack, in the order in which they were saved.

    Args:
        path: the pack.
        trajectories: whether to read single responses too; without them it takes a fraction of the time.
        keep: says of a run whether it is wanted; the others are not built, which takes most of the time.

    Raises:
        TraceError: the file is absent, cut short, no pack, or of another version.
    """
    return _read(Path(path), trajectories, keep, {})


def _read(
    path: Path, trajectories: bool, keep: Callable[[RunInfo], bool] | None, changes: dict[str, Any]
) -> tuple[Trace, ...]:
    """Build the traces that `keep` wants, with `changes` in what they say of themselves."""
    infos, runs = _infos(path)
    wanted = [index for index, info in enumerate(infos) if keep is None or keep(info)]
    columns = {index: _columns(runs[index], trajectories) for index in wanted}
    if not wanted:
        return ()
    read = dict.fromkeys([_RUN, *(name for names in columns.values() for name in names)])
    table = parquet.read_table(path, list(read))
    numbers = table[_RUN].to_numpy()
    traces = []
    for index in wanted:
        # Rows of a run lie together and in order, so a run is a slice.
        start, stop = np.searchsorted(numbers, [index, index + 1])
        steps, responses = parquet.from_table(table.slice(start, stop - start).select(columns[index]))
        traces.append(Trace(steps, responses, replace(infos[index], **changes)))
    return tuple(traces)


def load_infos(path: str | Path) -> tuple[RunInfo, ...]:
    """Read what the runs of a pack are, in the order in which they were saved, without their rows.

    Raises:
        TraceError: the file is absent, cut short, no pack, or of another version.
    """
    return _infos(Path(path))[0]


def _infos(path: Path) -> tuple[tuple[RunInfo, ...], list[dict]]:
    runs = _runs(parquet.read_metadata(path), path)
    return tuple(RunInfo.from_dict(run["info"]) for run in runs), runs


def _columns(run: dict, trajectories: bool) -> list[str]:
    return [name for name in run["columns"] if trajectories or not name.startswith(parquet.PREFIX)]


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
    keep: Callable[[RunInfo], bool] | None = None,
) -> tuple[Trace, ...]:
    """Read the traces of a folder of packs, marked as recorded.

    Args:
        folder: holds `registry.csv` and the packs that it names.
        models: labels of the models wanted; None is all.
        faults: ids of the faults wanted, None among them for healthy runs; without it all.
        trajectories: whether to read single responses too (see `load_pack`).
        keep: says of a run whether it is wanted (see `load_pack`).

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
    labels = None if models is None else set(wanted["model"])
    ids = None if faults is None else {fault or None for fault in wanted["fault"]}

    def asked(info: RunInfo) -> bool:
        named = (labels is None or info.model in labels) and (ids is None or info.fault in ids)
        return named and (keep is None or keep(info))

    packs = [Path(folder) / pack for pack in wanted["pack"].unique()]
    return tuple(trace for pack in packs for trace in _read(pack, trajectories, asked, {"source": "recorded"}))


def _rows(table: pd.DataFrame, column: str, wanted: list[str], folder: str | Path) -> pd.DataFrame:
    unknown = [name for name in wanted if name not in set(table[column])]
    if unknown:
        raise TraceError(
            f"no recorded run with {column} {unknown[0]!r}",
            where=folder,
            expected=f"one of {', '.join(sorted(name or 'healthy' for name in table[column].unique()))}",
        )
    return table.loc[table[column].isin(wanted)]


def _runs(metadata: Mapping[bytes, bytes], path: Path) -> list[dict]:
    try:
        header = json.loads(metadata[_KEY])
        kind, version, runs = header["format"], header["version"], list(header["runs"])
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError("no pack of traces", where=path, expected="a file written by save_pack") from error
    if (kind, version) != (FORMAT, VERSION):
        raise TraceError(f"format {kind!r}, version {version!r}", where=path, expected=f"{FORMAT}, version {VERSION}")
    return runs
