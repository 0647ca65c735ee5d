"""RFT-FaultBench's registries: which run is which fault. See `rft_faultbench` for what is documented of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from moeproxy.errors import TraceError
from moeproxy.traces.trace import RunInfo

FAULT_ALIASES: Mapping[str, str] = {
    "too_short": "response_too_short",
    "short_response": "response_too_short",
    "too_long": "response_too_long",
    "long_response": "response_too_long",
    "actor_update_omission": "update_freeze",
}
"""Fault types whose name differs from the catalogue's; others keep theirs, in lower case with underscores."""

FAULTY, HEALTHY = ("fault", "faulty", "injected"), ("control", "baseline", "normal", "healthy")
RUN_KEYS = ("experiment_id", "run_id", "run_name")
Label = Literal["fault", "healthy", "unknown"]
_MORE = "more cells than columns"


def read_registries(path: str | Path) -> dict[str, dict[str, str]]:
    """Return the registries' rows by run, every value as the text that stands there.

    Raises:
        TraceError: there is no CSV file, a file has no column that names the run, or a run has two different rows.
    """
    root, rows = Path(path), {}
    files = sorted(root.glob("*.csv")) if root.is_dir() else [root] if root.is_file() else []
    if not files:
        raise TraceError("no registries", where=root, expected="CSV files with one row a run")
    for file in files:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            lines = csv.DictReader(stream, restkey=_MORE)
            key = next((name for name in RUN_KEYS if name in (lines.fieldnames or ())), None)
            if key is None:
                expected = f"one of {', '.join(RUN_KEYS)}"
                raise TraceError(f"columns {lines.fieldnames}, none names the run", where=file, expected=expected)
            for row in lines:
                _register(rows, row, key, f"{file}, line {lines.line_num}")
    return rows


def _register(rows: dict[str, dict[str, str]], row: dict[str, str], key: str, where: str) -> None:
    if _MORE in row or None in row.values():
        raise TraceError("more or fewer cells than columns", where=where, expected="one cell a column")
    name = row[key].strip()
    if not name:
        raise TraceError(f"{key} is empty", where=where, expected="the name of a run's folder")
    if rows.setdefault(name, row) != row:
        raise TraceError(f"a second, different row of {name!r}", where=where, expected="one row a run")


def label_of(row: Mapping[str, str], folder: Path) -> Label:
    """Return what a registry's row says of the run in `folder`; no row says nothing.

    Raises:
        TraceError: the row says it in a word that is not known.
    """
    if not row:
        return "unknown"
    word = row.get("control_or_fault", "").strip().lower()
    if word in FAULTY:
        return "fault"
    if word in HEALTHY:
        return "healthy"
    raise TraceError(
        f"the registry's control_or_fault is {word!r}",
        where=folder,
        expected=f"one of {', '.join((*FAULTY, *HEALTHY))}",
        remedy="mend the registry; a label is not guessed from the folder's name",
    )


def run_info(folder: Path, row: Mapping[str, str], label: Label) -> tuple[RunInfo, list[str]]:
    """Return the provenance of a run, and notes on what the registry leaves open."""
    fault, notes = None, []
    if label == "fault":
        words = "_".join(row.get("fault_type", "").lower().replace("-", " ").replace("_", " ").split())
        if not words:
            raise TraceError("the registry says fault but not which", where=folder, expected="fault_type")
        fault = FAULT_ALIASES.get(words, words)
    strength = _share(row.get("fault_strength") or row.get("strength") or "")
    if fault and strength is None:
        notes.append("no strength between 0 and 1 in the registry: 1 stands for 'as published'")
    seed = row.get("seed", "").strip()
    if not seed.isdigit():
        notes.append("no seed in the registry: -1")
    info = RunInfo(
        model=row.get("model") or "rft-faultbench",
        method="original",
        n_experts=0,
        seed=int(seed) if seed.isdigit() else -1,
        fault=fault,
        strength=(1.0 if strength is None else strength) if fault else 0.0,
        onset=1 if fault else None,
        config={"run": folder.name, "group": folder.parent.name, "label": label, "registry": dict(row)},
        source="file",
    )
    return info, notes


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
