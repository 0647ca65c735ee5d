"""Study: what came out of the fidelity study, as tables with their protocol and provenance."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.triage.study_frames import where
from moeproxy.triage.study_protocol import Protocol

RESULT = "fidelity.parquet"
FORMAT = "moeproxy.study"
VERSION = 1
_KEY = b"moeproxy"
_SMALL = ("models", "faults", "families", "differences", "false", "cells")


@dataclass(frozen=True, eq=False, repr=False)
class Study:
    """The fidelity study: how far each model shows the failures that the original shows.

    Args:
        protocol: what was declared before scoring.
        models: one row a model, level and measure: mean, interval over faults and seeds, counts.
        faults: one row a model, level and fault: means over the seeds, answers seed by seed.
        families: top-1 and top-3 by family of faults.
        differences: proxy minus control, with interval and sign test over faults.
        false: healthy against healthy, one row a model.
        cells: one row a broken run: fault, level, seed, onset, status, nearest fault and every measure.
        responses: response over threshold by model, fault, level, signal and window: mean over the seeds, lowest and
            highest seed.
        signals: signals compared.
        skipped: signals, models or runs left out, each with the reason.
        provenance: versions, command, time, hashes of protocol and registry, checkpoints.
    """

    protocol: Protocol
    models: pd.DataFrame
    faults: pd.DataFrame
    families: pd.DataFrame
    differences: pd.DataFrame
    false: pd.DataFrame
    cells: pd.DataFrame
    responses: pd.DataFrame
    signals: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all models, the original first."""
        return tuple(dict.fromkeys(self.cells["model"]))

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of strength."""
        return tuple(dict.fromkeys(self.cells["level"]))

    def chance(self, level: str) -> float:
        """Share of right answers by guessing among the faults of a level."""
        ours = where(self.cells, model=self.protocol.original, level=level)
        return 1 / ours["fault"].nunique()

    def value(self, model: str, level: str, measure: str) -> tuple[float, float, float]:
        """Return mean, low and high of one measure.

        Raises:
            ComparisonError: the study does not hold it.
        """
        row = where(self.models, model=model, level=level, measure=measure)
        if row.empty:
            raise ComparisonError(
                f"no {measure!r} of {model!r} at level {level!r}",
                expected=f"models {list(self.labels)}, levels {list(self.levels)}",
            )
        first = row.iloc[0]
        return (float(first["mean"]), float(first["low"]), float(first["high"]))

    def confusion(self, model: str, level: str) -> pd.DataFrame:
        """Return how often each fault (rows) was answered by each fault or "none" (columns), over the seeds."""
        cells = where(self.cells, model=model, level=level)
        seen = cells[cells["top1"].notna()]
        return pd.DataFrame(pd.crosstab(seen["fault"], seen["nearest"]))

    def summary(self) -> pd.DataFrame:
        """Return the main measures as text, one row a model and level."""
        shown = ("top1", "top3", "detected", "direction", "rank", "onset_difference")
        keys = dict.fromkeys(zip(self.models["model"], self.models["level"], strict=True))
        rows = []
        for model, level in keys:
            told = {name: _told(self.value(model, level, name)) for name in shown}
            rows.append({"model": model, "level": level, **told})
        return pd.DataFrame(rows)

    def save(self, path: str | Path) -> Path:
        """Write the study to one Parquet file, atomically: responses as its table, all else in the header."""
        target = Path(path)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "protocol": self.protocol.to_dict(),
            "signals": self.signals,
            "skipped": self.skipped,
            "provenance": self.provenance,
            "tables": {name: _columns(getattr(self, name)) for name in _SMALL},
        }
        table = pa.Table.from_pandas(self.responses, preserve_index=False)
        table = table.replace_schema_metadata({_KEY: json.dumps(header, default=str).encode()})
        try:
            with atomic_file(target) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        except OSError as error:
            raise ComparisonError(
                f"the study cannot be written ({error.strerror or error})",
                where=target,
                expected="a writable directory",
            ) from error
        return target

    @staticmethod
    def load(path: str | Path) -> Study:
        """Read a study.

        Raises:
            ComparisonError: the file is absent, cut short, no study, or of another version.
        """
        try:
            table = pq.read_table(path, partitioning=None)  # pyright: ignore[reportArgumentType]
            header = json.loads((table.schema.metadata or {})[_KEY])
            kind, version = header["format"], header["version"]
            if (kind, version) == (FORMAT, VERSION):
                return _restored(table, header)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise ComparisonError(
                f"unreadable ({error})", where=path, expected="a file of Study.save", remedy="score again"
            ) from error
        raise ComparisonError(
            f"format {kind!r}, version {version!r}",
            where=path,
            expected=f"{FORMAT}, version {VERSION}",
            remedy="score again",
        )

    def __repr__(self) -> str:
        level = self.levels[0]
        told = ", ".join(f"{model} {self.value(model, level, 'top1')[0]:.2f}" for model in self.labels)
        return f"Study({self.cells['fault'].nunique()} faults, protocol {self.protocol.hash}; top-1, {level}: {told})"

    def _repr_html_(self) -> str:
        head = f"{self.cells['fault'].nunique()} faults, protocol {html.escape(self.protocol.hash)}"
        return f"<p><strong>Study</strong>: {head}</p>{self.summary().to_html(index=False, border=0)}"


def _restored(table: pa.Table, header: dict[str, Any]) -> Study:
    known = {item.name for item in fields(Study)}
    parts = {
        **{name: _frame(columns) for name, columns in header["tables"].items()},
        "protocol": Protocol.from_dict(header["protocol"]),
        "responses": table.replace_schema_metadata(None).to_pandas(),
        "signals": tuple(header["signals"]),
        "skipped": tuple((what, why) for what, why in header["skipped"]),
        "provenance": header["provenance"],
    }
    return Study(**{name: value for name, value in parts.items() if name in known})


def _columns(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    # JSON knows no NaN: null stands for "no value".
    plain = frame.astype(object).where(frame.notna(), None)
    return {str(name): {"type": str(frame[name].dtype), "values": plain[name].tolist()} for name in frame}


def _frame(columns: dict[str, dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(part["values"], dtype=part["type"]) for name, part in columns.items()})


def _told(value: tuple[float, float, float]) -> str:
    middle, low, high = value
    if np.isnan(middle):
        return "–"
    return f"{middle:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")
