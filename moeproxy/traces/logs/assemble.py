"""From the rows of a log to LogTraces: which framework, which runs, which signals, which states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pyarrow as pa

from moeproxy.errors import TraceError
from moeproxy.traces import parquet
from moeproxy.traces.keys import FRAMEWORKS, GENERIC, Framework, Key, custom, recognised
from moeproxy.traces.logs import joining
from moeproxy.traces.logs.cells import KEEPS_TEXT, NUMERIC, Status
from moeproxy.traces.logs.joining import Joined
from moeproxy.traces.logs.rows import Column, Rows
from moeproxy.traces.logs.sink import MAX_RUNS, Sink
from moeproxy.traces.logtrace import LogInfo, LogTrace, words
from moeproxy.traces.trace import RunInfo, Trace

_NUMERIC = [int(status) for status in NUMERIC]
_NO_VALUE = [int(Status.MISSING), int(Status.EMPTY), int(Status.NULL)]
_NAN = [Status.NAN, Status.NAN_TEXT, Status.NONFINITE]
SHOWN = 5
ALIKE = 0.9
"""Share of steps that two clocks must have in common to tick alike."""
_FILE_NAMES = ("logging.jsonl",)
"""Names that only one framework gives its log; they count as hints of it."""
_PACKAGES = {"megatron-lm": "megatron-core", "llama-factory": "llamafactory"}
"""Names of the packages whose versions logs tell, where they differ from the framework's."""


@dataclass(frozen=True)
class Wishes:
    """What the caller decides: a mapping from keys to signals, the key of the step, the framework."""

    mapping: Mapping[str, str] | None = None
    step: str | None = None
    framework: str | None = None


@dataclass(frozen=True)
class Chosen:
    """A signal, the key it is read from, and its column."""

    key: Key
    name: str
    column: Column


def assembled(name: str, rows: Rows, sink: Sink, files: tuple[str, ...], wishes: Wishes) -> list[LogTrace]:
    """Return the runs that these rows hold; one without metrics when they hold none."""
    framework = _framework(rows, sink, files, wishes)
    info = LogInfo(
        name=name,
        framework=framework.name,
        container=sink.container,
        files=files,
        version=sink.versions.get(_PACKAGES.get(framework.name, framework.name), ""),
        lines=sink.lines,
        rows=len(rows),
        skipped=tuple(sink.skipped.values()),
        findings=tuple(sink.findings),
        progress=sink.progress,
        notes=(*sink.notes, *_framework_notes(framework, rows, wishes, sink.container)),
        facts=dict(sink.facts) | ({"versions": dict(sink.versions)} if sink.versions else {}),
    )
    chosen = _chosen(rows, framework)
    steps, clocks, names, info = _steps(rows, framework, chosen, info)
    chosen = _chosen(rows, framework, steps)
    if joining.newest_first(steps, clocks):
        note = "the rows stand newest first; they were taken from the last to the first"
        rows, steps, clocks = rows.reversed(), steps[::-1], clocks[::-1]
        chosen, info = _chosen(rows, framework, steps), replace(info, notes=(*info.notes, note))
    parts = _parts(rows, steps, clocks, names, chosen, info)
    return [_log(part, framework, taken, at, of, names) for part, taken, at, of in parts]


def _framework(rows: Rows, sink: Sink, files: tuple[str, ...], wishes: Wishes) -> Framework:
    names = {hint for hint in _FILE_NAMES if any(file.endswith(hint) for file in files)}
    base = FRAMEWORKS[wishes.framework] if wishes.framework else recognised(rows.columns, sink.hints | names)
    if wishes.mapping is not None:
        return custom(wishes.mapping, wishes.step, base)
    return replace(base, steps=(wishes.step,)) if wishes.step else base


def _framework_notes(framework: Framework, rows: Rows, wishes: Wishes, container: str) -> Iterator[str]:
    if not len(rows):
        return
    yield from framework.notes
    if "console" in container:
        yield from framework.console_notes
    if framework is GENERIC:
        yield "the framework is not known; names were taken at their word, a mapping would say for sure"
    if wishes.mapping:
        lost = sorted(name for name in wishes.mapping if name not in rows.columns)
        if lost:
            yield f"the mapping names {', '.join(lost)}, which this log does not have"
        blank = sorted(name for name in wishes.mapping if name in rows.columns and not rows.columns[name].numeric)
        if blank:
            yield f"the mapping names {', '.join(blank)}, which holds no number in this log"
        signals = list(wishes.mapping.values())
        for signal in sorted({signal for signal in signals if signals.count(signal) > 1}):
            keys = [name for name, mine in wishes.mapping.items() if mine == signal]
            yield f"the mapping gives {signal} several keys ({', '.join(keys)}); the first that has numbers is taken"
    if wishes.step and wishes.step not in rows.columns:
        yield f"the step was to be in {wishes.step!r}, which this log does not have"


def _chosen(rows: Rows, framework: Framework, steps: np.ndarray | None = None) -> list[Chosen]:
    """Return for every signal the first of its keys that the log has with a number, at a step if at all possible."""
    found: dict[str, Chosen] = {}
    second: dict[str, Chosen] = {}
    for key in framework.keys:
        for name in framework.among(key.name, rows.columns):
            column = rows.columns[name]
            if key.signal not in found and column.numeric:
                stepped = steps is None or bool((steps[column.at[column.numeric_at]] >= 0).any())
                (found if stepped else second).setdefault(key.signal, Chosen(key, name, column))
    chosen = second | found
    return [chosen[name] for name in dict.fromkeys(key.signal for key in framework.keys) if name in chosen]


def _steps(
    rows: Rows, framework: Framework, chosen: list[Chosen], info: LogInfo
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], LogInfo]:
    steps, clocks, names = joining.steps_of(rows, framework.steps)
    # A lone row with a step and no metric, such as "resuming with {'step': 0}", makes no clock of the others.
    if (steps[_has(rows, [item.column for item in chosen])] >= 0).any() or not chosen:
        return steps, clocks, names, info
    often = max(chosen, key=lambda item: len(item.column.at))
    main = next((item.name for item in chosen if item.key.name == framework.ordinal), often.name)
    steps, doubt = joining.numbered(rows, main)
    notes = ["the log has no step: its rows are numbered from 1, a row being one log interval, not one step"]
    if names:
        notes.append(f"{', '.join(map(repr, names))} gives no row with a metric a whole number from 0 on")
    if doubt:
        notes.append(f"where the run was resumed is taken from its rounded epochs: rows after it may be {doubt} off")
    clocks = np.where(steps >= 0, 0, -1).astype(np.int32)
    return steps, clocks, ("row",), replace(info, notes=(*info.notes, *notes))


def _parts(
    rows: Rows, steps: np.ndarray, clocks: np.ndarray, names: tuple[str, ...], chosen: list[Chosen], info: LogInfo
) -> Iterator[tuple[LogInfo, Rows, np.ndarray, np.ndarray]]:
    """Yield every run: restarted ones, processes that logged side by side, and clocks that tick differently."""
    for label, keep in _kept(rows, steps, clocks, names, chosen):
        if keep.all() and not label:
            yield info, rows, steps, clocks
        else:
            part = replace(info, name=f"{info.name} [{label}]" if label else info.name, rows=int(keep.sum()))
            yield part, rows.take(keep), steps[keep], clocks[keep]


def _kept(
    rows: Rows, steps: np.ndarray, clocks: np.ndarray, names: tuple[str, ...], chosen: list[Chosen]
) -> Iterator[tuple[str, np.ndarray]]:
    columns = [item.column for item in chosen]
    has = _has(rows, columns) & (steps >= 0)
    processes = joining.interleaved(rows, steps, columns)
    everything = [np.ones(len(rows), bool)]
    groups = [rows.origins == number for number in processes] or everything
    for number, group in enumerate(groups):
        label = rows.origin_names[processes[number]] if processes else ""
        for run, part in enumerate(_restarted(rows, steps, clocks, group & has, group, columns), 1):
            for clock, ticks in _ticking(steps, clocks, names, part & has):
                several = f"run {run}" if part.sum() < group.sum() else ""
                yield ", ".join(filter(None, (label, several, clock))), part & (ticks if clock else part)


def _has(rows: Rows, columns: list[Column]) -> np.ndarray:
    has = np.zeros(len(rows), bool)
    for column in columns:
        has[column.at] = True
    return has


def _restarted(
    rows: Rows, steps: np.ndarray, clocks: np.ndarray, has: np.ndarray, group: np.ndarray, columns: list[Column]
) -> Iterator[np.ndarray]:
    numbers = joining.restarts(rows, np.where(has, steps, -1), clocks, columns)
    if numbers.max(initial=0) >= MAX_RUNS:
        raise TraceError(
            f"over {MAX_RUNS:,} returns to the first step",
            expected="a log whose steps go on, with a few runs in it",
            remedy="name the key of the step: read(path, step='...') or --step",
        )
    for number in range(int(numbers.max(initial=0)) + 1):
        yield group & (numbers == number)


def _ticking(
    steps: np.ndarray, clocks: np.ndarray, names: tuple[str, ...], has: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """Return one group of rows when all clocks tick alike, else one for each clock."""
    found = {int(clock): joining.distinct(steps[has & (clocks == clock)]) for clock in joining.distinct(clocks[has])}
    if len(found) < 2 or _alike(list(found.values())):
        return [("", has)]
    return [(names[clock], (clocks == clock) | (clocks < 0)) for clock in found]


def _alike(steps: list[np.ndarray]) -> bool:
    first = steps[0]
    for other in steps[1:]:
        low, high = max(first[0], other[0]), min(first[-1], other[-1])
        mine, theirs = (values[(values >= low) & (values <= high)] for values in (first, other))
        ends = abs(int(first[0]) - int(other[0])) + abs(int(first[-1]) - int(other[-1]))
        most = max(mine.size, theirs.size)  # steps whose lines were torn make no clock of their own
        if np.intersect1d(mine, theirs).size < ALIKE * most or ends > 1 + (1 - ALIKE) * most:
            return False
    return True


def _log(
    info: LogInfo, framework: Framework, rows: Rows, steps: np.ndarray, clocks: np.ndarray, names: tuple[str, ...]
) -> LogTrace:
    chosen = _chosen(rows, framework, steps)
    joined = joining.join(rows, steps, clocks, names, [item.column for item in chosen])
    states = {item.name: item.column.status.copy() for item in chosen}
    hidden = _hidden_nan(rows, framework, states)
    index = joining.distinct(steps[joined.shown & _has(rows, [item.column for item in chosen])])
    table = {item.key.signal: _signal(item, framework, states[item.name], joined, index) for item in chosen}
    # A key that has numbers only in rows without a step is no signal of this run.
    table = {name: cells for name, cells in table.items() if (cells[1] != Status.MISSING).any()}
    kept = [item for item in chosen if item.key.signal in table]
    info = replace(
        info,
        resumes=tuple(joined.resumes),
        clock=_clock(joined, names),
        keys={item.key.signal: item.name for item in kept},
        definitions={item.key.signal: item.key.definition for item in kept},
        notes=(*info.notes, *_notes(joined, hidden, steps)),
    )
    numbers = pd.Index(index, name="step")
    status = pd.DataFrame({name: words(cells[1]) for name, cells in table.items()}, index=numbers)
    trace = _trace(info, table, index) if table else None
    return LogTrace(info, status, *originals(rows), _places(rows, joined, info), trace)


def _signal(
    item: Chosen, framework: Framework, states: np.ndarray, joined: Joined, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return values and states of a signal by step; of several rows of one step the last counts."""
    values, status = np.full(len(index), np.nan), np.full(len(index), Status.MISSING, np.uint8)
    column, known = item.column, states
    sentinel = framework.infinite.get(item.key.name)
    if sentinel is not None:
        known = np.where(column.values == sentinel, np.uint8(Status.NONFINITE), known)
    shown, nothing = joined.shown[column.at] & (known != Status.MISSING), np.isin(known, _NO_VALUE)
    for use in (shown & nothing, shown & ~nothing):  # an empty cell of a later row takes no value away
        place = np.searchsorted(index, joined.steps[column.at[use]])
        values[place], status[place] = column.values[use] / item.key.divisor, known[use]
    values[np.isin(status, _NAN)] = np.nan
    return values, status


def _hidden_nan(rows: Rows, framework: Framework, states: dict[str, np.ndarray]) -> tuple[int, int]:
    """Mark losses that are 0 where the gradient norm of the same row is not finite.

    Returns:
        How many there are, and how many other losses are finite beside such a norm.
    """
    if framework.hides_nan is None:
        return 0, 0
    losses, norms = (framework.names(name) for name in framework.hides_nan)
    count = doubtful = 0
    for loss, norm in zip(losses, norms, strict=True):
        if loss not in rows.columns or norm not in rows.columns or loss not in states:
            continue
        mine, theirs = rows.columns[loss], rows.columns[norm]
        values, _ = theirs.dense(len(rows))
        logged = np.zeros(len(rows), bool)
        logged[theirs.at[np.isin(theirs.status, _NUMERIC)]] = True
        broken = logged & ~np.isfinite(values)
        hidden = broken[mine.at] & (mine.values == 0)
        states[loss][hidden] = Status.FILTERED
        count += int(hidden.sum())
        doubtful += int((broken[mine.at] & np.isfinite(mine.values) & ~hidden).sum())
    return count, doubtful


def _notes(joined: Joined, hidden: tuple[int, int], steps: np.ndarray) -> Iterator[str]:
    yield from joined.notes
    zeros, doubtful = hidden
    if doubtful:
        yield f"{doubtful} losses beside a gradient norm that is not finite may be means that leave out steps"
    if zeros:
        yield f"{zeros} losses of 0 beside a gradient norm that is not finite: the loss was not 0 (marked filtered)"
    if joined.duplicates:
        first = ", ".join(map(str, joined.duplicates[:SHOWN]))
        yield f"{len(joined.duplicates)} steps have two values of a signal ({first}); the later is shown, both are kept"
    if joined.late:
        yield f"{joined.late} rows came after later steps; they were put to their own"
    without = int((steps < 0).sum())
    if without:
        yield f"{without} rows have no step; they are kept among the original rows only"


def _clock(joined: Joined, names: tuple[str, ...]) -> str:
    used = joining.distinct(joined.clocks[joined.shown])
    return ", ".join(names[number] for number in used)


def _trace(info: LogInfo, table: dict[str, tuple[np.ndarray, np.ndarray]], index: np.ndarray) -> Trace:
    columns = {}
    for name, (values, status) in table.items():
        array = pa.array(values, mask=~np.isin(status, _NUMERIC), from_pandas=False)
        columns[name] = parquet.from_arrow(array).set_axis(index)
    log: dict[str, object] = {"clock": info.clock}
    log |= {
        "framework": info.framework,
        "version": info.version,
        "container": info.container,
        "files": list(info.files),
    }
    config = {"log": log | {"keys": dict(info.keys), "definitions": dict(info.definitions), "notes": list(info.notes)}}
    versions = dict(info.facts.get("versions", {}))
    run = RunInfo(
        model=info.name, method="original", n_experts=0, seed=-1, config=config, versions=versions, source="file"
    )
    return Trace(pd.DataFrame(columns, index=pd.Index(index)), None, run)


def originals(rows: Rows) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return every row with every original key, and the state of every cell.

    Columns that hold text anywhere keep it, and the digits of integers that float64 cannot hold; others are float64.
    """
    values, status = {}, {}
    for name, column in rows.columns.items():
        numbers, states = column.dense(len(rows))
        values[name], status[name] = _with_text(numbers, states, column), words(states)
    index = pd.RangeIndex(len(rows), name="row")
    return pd.DataFrame(values, index=pd.RangeIndex(len(rows))).set_axis(index), pd.DataFrame(status, index=index)


def _with_text(numbers: np.ndarray, states: np.ndarray, column: Column) -> pd.Series:
    if not column.texts:
        return pd.Series(numbers)
    cells = numbers.astype(object)
    cells[np.isin(states, [*KEEPS_TEXT, Status.MISSING, Status.NULL, Status.EMPTY])] = None
    for row, text in column.texts.items():
        cells[row] = text
    return pd.Series(cells, dtype=object)  # pandas would make text of numbers


def _places(rows: Rows, joined: Joined, info: LogInfo) -> pd.DataFrame:
    files = np.array(info.files, dtype=object)
    return pd.DataFrame(
        {
            "file": pd.Categorical(files[rows.files] if len(rows) else []),
            "line": rows.lines,
            "process": pd.Categorical(np.array(rows.origin_names, dtype=object)[rows.origins]),
            "step": joined.steps,
            "attempt": joined.attempts,
            "shown": joined.shown,
        },
        index=pd.RangeIndex(len(rows), name="row"),
    )
