"""Trace: what one RL run leaves behind, healthy or broken."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import pyarrow as pa

from moeproxy.errors import TraceError
from moeproxy.traces import parquet
from moeproxy.traces.signals import TOOL_COLUMNS, TRAJECTORY_COLUMNS, signal_of

Source = Literal["live", "recorded", "file"]
_INTEGER_COLUMNS = ("step", "prompt", "length", *TOOL_COLUMNS)


@dataclass(frozen=True)
class RunInfo:
    """Where a trace comes from.

    Args:
        model: label of the model, e.g. "original", "cluster-16" or "random-16-s1".
        method: how its experts were chosen: "original", "cluster", "random", "first", "frequency", ...
        n_experts: routed experts in each MoE layer.
        seed: seed of the run; runs of equal seed saw the same prompts in the same order.
        fault: id of the injected fault, or None for a healthy run.
        strength: strength of the fault in [0, 1]; 0 for a healthy run.
        onset: first step at which the fault acts, or None.
        further: faults that act beside `fault`: (id, strength, onset) of each.
        remedies: what was done against them: (id, first step) of each.
        config: settings of the run (JSON values).
        versions: versions of the programs involved.
        checkpoint_fingerprint: hash of the model the run started from.
        wall_seconds: duration of the run in seconds.
        peak_memory_bytes: largest resident size of the run's process, 0 when not measured.
        source: "live" (trained just now), "recorded" (shipped) or "file" (read from somebody's log).
    """

    model: str
    method: str
    n_experts: int
    seed: int
    fault: str | None = None
    strength: float = 0.0
    onset: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    checkpoint_fingerprint: str = ""
    wall_seconds: float = 0.0
    peak_memory_bytes: int = 0
    source: Source = "live"
    further: tuple[tuple[str, float, int], ...] = ()
    remedies: tuple[tuple[str, int], ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether no fault was injected; that says nothing of a run that was read from a log, see `unknown`."""
        return self.fault is None

    @property
    def unknown(self) -> bool:
        """Whether the run was read from somebody's log, so that nobody says whether a fault acts in it."""
        return self.fault is None and self.source == "file" and "log" in self.config

    @property
    def faults(self) -> tuple[tuple[str, float, int | None], ...]:
        """All faults of the run: (id, strength, onset) of each."""
        return () if self.fault is None else ((self.fault, self.strength, self.onset), *self.further)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        stored = asdict(self)
        for name in ("further", "remedies"):
            if not stored[name]:
                del stored[name]  # files of runs without them stay as they always were
        return stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RunInfo:
        """Return what `to_dict` wrote, leaving out what this version does not know."""
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in stored.items() if name in known}
        further, remedies = values.pop("further", ()), values.pop("remedies", ())
        return cls(
            **values,
            further=tuple((str(name), float(level), int(onset)) for name, level, onset in further),
            remedies=tuple((str(name), int(start)) for name, start in remedies),
        )

    def __str__(self) -> str:
        faults = " and ".join(f"{fault} {strength:g} from step {onset}" for fault, strength, onset in self.faults)
        remedies = "".join(f", {remedy} from step {start}" for remedy, start in self.remedies)
        if self.unknown:
            return f"{self.model}, read from a log{remedies}"
        return f"{self.model}, {faults or 'healthy'}{remedies}, seed {self.seed}, {self.source}"


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One run: canonical signals by step, trajectories, provenance.

    Args:
        steps: table indexed by integer step (increasing), one signal of `moeproxy.traces.SIGNALS` a column.
            A NaN in a float column was measured as NaN; a null (None, `pd.NA`) is missing: both are kept.
        trajectories: one row a sampled response, columns `step`, `TRAJECTORY_COLUMNS` and, where there
            are tools, `TOOL_COLUMNS`; or None.
        provenance: where the run comes from.

    Raises:
        TraceError: a column name is not canonical, a value is no number, or steps do not increase.

    Example:
        >>> run = RunInfo(model="original", method="original", n_experts=32, seed=0)
        >>> Trace(pd.DataFrame({"reward_mean": [0.4, 0.5]}), None, run)
        Trace(original, healthy, seed 0, live; 2 steps, 1 signals)
    """

    steps: pd.DataFrame
    trajectories: pd.DataFrame | None
    provenance: RunInfo

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _checked_steps(self.steps))
        if self.trajectories is not None:
            object.__setattr__(self, "trajectories", _checked_trajectories(self.trajectories))

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the columns of `steps`."""
        return tuple(str(name) for name in self.steps.columns)

    def values(self, name: str) -> np.ndarray:
        """Return one signal as float64 (S,). Missing values are NaN here; `missing` tells them apart."""
        return self._column(name).to_numpy(np.float64, na_value=np.nan)

    def missing(self, name: str) -> np.ndarray:
        """Return bool (S,): True where the run logged nothing. A logged NaN is False."""
        column = self._column(name)
        if column.dtype == np.float64:  # plain storage holds no missing value
            return np.zeros(len(column), bool)
        return np.asarray(parquet.to_arrow(column).is_null(nan_is_null=False))

    def equals(self, other: Trace, ignore: Iterable[str] = ("seconds_per_step",)) -> bool:
        """Return whether both runs logged the same bits, but for signals in `ignore` and the provenance."""
        skip = set(ignore)
        names = [name for name in self.signals if name not in skip]
        if names != [name for name in other.signals if name not in skip]:
            return False
        if not self.steps.index.equals(other.steps.index):
            return False
        same = all(_same_bits(self, other, name) for name in names)
        return same and _same_table(self.trajectories, other.trajectories)

    def save(self, path: str | Path) -> Path:
        """Write the trace to one Parquet file, atomically, and return its path."""
        target = Path(path)
        parquet.write(target, self.steps, self.trajectories, self.provenance.to_dict())
        return target

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace.

        Raises:
            TraceError: the file is absent, cut short, no trace, or of another version.
        """
        steps, trajectories, run = parquet.read(Path(path))
        try:
            return Trace(steps, trajectories, RunInfo.from_dict(run))
        except (TypeError, ValueError) as error:
            raise TraceError(f"unusable contents ({error})", where=path, remedy=parquet.REMEDY) from error

    def _column(self, name: str) -> pd.Series:
        if name not in self.steps.columns:
            raise TraceError(f"no signal {name!r} in {self!r}", expected=f"one of {', '.join(self.signals)}")
        return cast(pd.Series, self.steps[name])

    def __repr__(self) -> str:
        return f"Trace({self.provenance}; {len(self.steps)} steps, {len(self.signals)} signals)"

    def _repr_html_(self) -> str:
        tail = self.steps.tail(5).to_html(max_cols=8, border=0)
        head = f"{html.escape(str(self.provenance))}; {len(self.steps)} steps, the last:"
        return f"<p><strong>Trace</strong>: {head}</p>{tail}"


def load_dir(path: str | Path) -> list[Trace]:
    """Load every trace below a directory, sorted by path.

    Raises:
        TraceError: the directory does not exist, or a file in it is no usable trace.
    """
    root = Path(path)
    if not root.is_dir():
        raise TraceError("no such directory", where=root, expected=f"a directory of *{parquet.SUFFIX} files")
    # Hidden names are unfinished writes.
    found = sorted(file for file in root.rglob(f"*{parquet.SUFFIX}") if not file.name.startswith("."))
    return [Trace.load(file) for file in found]


def _checked_steps(steps: pd.DataFrame) -> pd.DataFrame:
    index = steps.index
    if not pd.api.types.is_integer_dtype(index) or not index.is_monotonic_increasing or not index.is_unique:
        raise TraceError(
            "steps are not increasing integers",
            expected="an integer index, each step once",
            remedy="set the index of `steps` to the step number and sort it",
        )
    numbers = pd.Index(index.to_numpy(np.int64), name="step")
    columns = {str(name): _checked_column(str(name), column).set_axis(numbers) for name, column in steps.items()}
    return pd.DataFrame(columns, index=numbers)


def _checked_column(name: str, column: pd.Series) -> pd.Series:
    signal_of(name)
    if column.dtype == np.float64:  # as it is stored: a NaN in it was measured
        return column.copy()
    try:
        return parquet.from_arrow(parquet.to_arrow(column))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise TraceError(f"signal {name!r} holds something that is no number ({error})", expected="numbers") from error


def _checked_trajectories(table: pd.DataFrame) -> pd.DataFrame:
    wanted = ["step", *TRAJECTORY_COLUMNS]
    lost = [name for name in wanted if name not in table.columns]
    if lost:
        raise TraceError(f"trajectories lack {', '.join(lost)}", expected=f"the columns {', '.join(wanted)}")
    wanted += [name for name in TOOL_COLUMNS if name in table.columns]
    kinds = {name: np.int64 if name in _INTEGER_COLUMNS else np.float64 for name in wanted}
    return pd.DataFrame(table[wanted].astype(kinds)).sort_values(by="step", kind="stable", ignore_index=True)


def _same_bits(left: Trace, right: Trace, name: str) -> bool:
    if not np.array_equal(left.missing(name), right.missing(name)):
        return False
    return np.array_equal(left.values(name).view(np.int64), right.values(name).view(np.int64))


def _same_table(left: pd.DataFrame | None, right: pd.DataFrame | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.equals(right)
