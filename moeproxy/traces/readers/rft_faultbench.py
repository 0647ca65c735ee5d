"""RFT-FaultBench (arXiv 2605.04431): 779 recorded fine-tuning runs with 16 types of faults.

**Documented** (the paper): every run has `openrlhf_train_train_step.jsonl`, one object a step, and
`openrlhf_train_trajectory.jsonl`, one object a response with the parts `metadata`, `metrics` and `flags`; registries
are CSV files; faults act from step 1. Trajectory metrics include reward, return, response length, advantage mean and
spread, repetition ratio, share of unique tokens, tool calls and errors; flags say empty, short, long.

**Seen** in a public program that reads the published archive (ilovehhhyn/cado, `scripts/rft_faultbench`): registries
lie in `metadata/registries/`, with the columns `experiment_id` (the name of the run's folder), `control_or_fault`,
`fault_type`, `fault_family`; the two files lie one folder below the run's; steps carry a part `metrics` too;
`metadata/rollout_step` counts from 1; `metadata/fault_injection` names the injected type and strength.

**Inferred**: the names of the step metrics. Those of OpenRLHF whose meaning is certain become canonical signals
(`STEP_ALIASES`); every other column is kept under its own name. So are the values of `control_or_fault`: a word
outside `FAULTY` and `HEALTHY` is an error.

**Labels come from the registry, never from the folder's name**: half of the runs in each folder of "hard" faults were
not injected at all, though the paper counts them as faulty. Whether trajectories carry an injection is read as well
(`RftRun.injected`), and a contradiction is noted. A run outside the registries (the archive has 11 such baselines) has
the label "unknown" unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from moeproxy.errors import TraceError
from moeproxy.traces.readers.jsonl import NUMBER, Row, Table, read_rows, table
from moeproxy.traces.readers.rft_registry import RUN_KEYS, Label, label_of, read_registries, run_info
from moeproxy.traces.trace import Trace

STEP_FILE = "openrlhf_train_train_step.jsonl"
TRAJECTORY_FILE = "openrlhf_train_trajectory.jsonl"

STEP_ALIASES: Mapping[str, str] = {
    "policy_loss": "policy_loss",
    "act_loss": "policy_loss",
    "grad_norm": "grad_norm",
    "actor_grad_norm": "grad_norm",
    "reward": "reward_mean",
    "reward_mean": "reward_mean",
    "kl": "kl",
    "entropy": "entropy",
    "response_length": "response_length",
    "gen_len": "response_length",
}
"""Step metrics whose meaning is certain, with or without the prefix `train/`. Left out on purpose: `loss` (policy or
total), `entropy_loss` (sign), `ppo_kl` and `vllm_kl` (not to the reference policy), `ppo_clip_ratio` (both bounds)."""

STEP_KEYS = ("global_step", "train_step", "step", "rollout_step")
"""Names under which a row may say its step: at its top, in `metadata`, in `metrics`, looked for in this order."""

TRAJECTORY_ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("metadata/prompt_index", "metadata/prompt_id", "metadata/prompt_idx"),
    "reward": ("metrics/reward",),
    "length": ("metrics/response_length",),
    "repetition_ratio": ("metrics/repetition_ratio",),
    "advantage": ("metrics/advantage_mean",),
}
"""Where the columns of a trace's trajectories are looked for. `repetition_ratio` is theirs: it may count otherwise."""

Repeated = Literal["error", "first", "last"]
_WHOLE = ("step", "prompt", "length")


@dataclass(frozen=True, eq=False, repr=False)
class RftRun:
    """One run: what is canonical as a trace, and everything as it was written.

    Args:
        trace: canonical signals. Its trajectories are None unless every one of their columns was found.
        steps: all columns of the step file by step, with the kind of every cell.
        trajectories: all columns of the trajectory file, in the file's order; None when there is no such file.
        registry_row: the registry's row, as text; empty when the run is in no registry.
        label: what the registry says. A trace of label "unknown" names no fault, which does not make it healthy.
        injected: whether any trajectory carries an injection of a strength other than 0; None when none says.
        notes: what a reader must know: columns left out, lines cut short, contradictions.
    """

    trace: Trace
    steps: Table
    trajectories: Table | None
    registry_row: Mapping[str, str] = field(default_factory=dict)
    label: Label = "unknown"
    injected: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return str(self.trace.provenance.config["run"])

    @property
    def extra_steps(self) -> pd.DataFrame:
        """The columns of the step file that are no canonical signal."""
        return self.steps.values.drop(columns=[c for c in self.steps.values if canonical(str(c)) is not None])

    def __repr__(self) -> str:
        responses = "no" if self.trajectories is None else str(len(self.trajectories.values))
        fault = self.trace.provenance.fault if self.label == "fault" else self.label
        return f"RftRun({self.name}: {fault}; {len(self.steps.values)} steps, {responses} trajectories)"


def read_run(
    path: str | Path, registry_row: Mapping[str, str] | None = None, *, repeated: Repeated = "error"
) -> RftRun:
    """Read one run.

    Args:
        path: the run's folder; the two files lie in it or in one folder below it.
        registry_row: the registry's row of this run; without one its label is unknown.
        repeated: what to do with a step that stands in two lines: refuse, or keep the first or the last.

    Raises:
        TraceError: a file is absent or unreadable, with the line; steps are missing, repeated or no whole numbers.

    Example:
        >>> run = read_run("rf_hard_fault/run_017", registry["run_017"])
        >>> run.label, run.trace.signals
        ('healthy', ('reward_mean', 'kl'))
    """
    folder, row = Path(path), dict(registry_row or {})
    file = _file(folder, STEP_FILE)
    if file is None:
        raise TraceError(f"no {STEP_FILE}", where=folder, expected="it, in this folder or one folder below")
    steps, notes = _steps(file, repeated)
    trajectories, more = _trajectories(_file(folder, TRAJECTORY_FILE))
    label = label_of(row, folder)
    injected = None if trajectories is None else _injected(trajectories)
    notes += [*more, *_contradiction(label, injected)]
    info, remarks = run_info(folder, row, label)
    signals, left_out = _signals(steps)
    responses, why = _canonical_trajectories(trajectories, steps)
    trace = Trace(signals, responses, info)
    return RftRun(trace, steps, trajectories, row, label, injected, (*notes, *remarks, *left_out, *why))


def read_benchmark(
    path: str | Path,
    registries: str | Path | None = None,
    *,
    unregistered: Literal["unknown", "healthy"] = "unknown",
    repeated: Repeated = "error",
) -> tuple[RftRun, ...]:
    """Read every run below a folder, labelled by its registries.

    Args:
        path: folder with the runs at any depth.
        registries: folder of the CSV files, by default `metadata/registries` in `path`.
        unregistered: label of runs that no registry names. The archive's baselines are such runs; so would be a run
            whose folder was renamed.
        repeated: as in `read_run`.

    Raises:
        TraceError: there are no runs or registries, or a file is unusable.
    """
    root = Path(path)
    found = sorted(root.rglob(STEP_FILE))
    if not found:
        raise TraceError(f"no {STEP_FILE} here", where=root, expected="folders of runs")
    rows = read_registries(Path(registries) if registries else root / "metadata" / "registries")
    runs = []
    for folder in dict.fromkeys(run_folder(file, rows) for file in found):
        row = rows.get(folder.name)
        if row is None and unregistered == "healthy":
            row = {RUN_KEYS[0]: folder.name, "control_or_fault": "baseline"}
        runs.append(read_run(folder, row, repeated=repeated))
    return tuple(runs)


def _file(folder: Path, name: str) -> Path | None:
    found = [path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file()]
    if len(found) > 1:
        raise TraceError(f"{len(found)} files {name}", where=folder, expected="one", remedy="give one run's folder")
    return found[0] if found else None


def run_folder(file: Path, rows: Mapping[str, Any]) -> Path:
    """Return the folder that a registry names; without one, that above the file's, as in the archive."""
    near = (file.parent, file.parent.parent)
    return next((folder for folder in near if folder.name in rows), near[1])


def _steps(file: Path, repeated: Repeated) -> tuple[Table, list[str]]:
    rows, notes = read_rows(file)
    if not rows:
        raise TraceError("no steps", where=file, expected="one JSON object a line")
    said = [_step_of(row, file) for row in rows]
    if all(step is None for step in said):
        numbered = list(enumerate(rows, start=1))
        extra = [f"{file.name}: no row says its step, so rows are numbered from 1 in their order"]
        return table(rows, [step for step, _ in numbered]), [*notes, *extra]
    by_step: dict[int, Row] = {}
    for step, row in zip(said, rows, strict=True):
        if step is None:
            raise TraceError("no step, unlike other lines", where=f"{file}, line {row.line}", expected=_one_of_keys())
        if step in by_step and repeated == "error":
            first = by_step[step].line
            raise TraceError(
                f"step {step} again, after line {first}",
                where=f"{file}, line {row.line}",
                expected="each step once",
                remedy="say repeated='first' or 'last' if you know which one counts",
            )
        if step not in by_step or repeated == "last":
            by_step[step] = row
    ordered = sorted(by_step)
    if len(ordered) < len(rows):
        notes = (*notes, f"{file.name}: {len(rows) - len(ordered)} lines repeat a step, the {repeated} one is kept")
    return table([by_step[step] for step in ordered], ordered), list(notes)


def _step_of(row: Row, file: Path) -> int | None:
    places = [f"{part}{key}" for part in ("", "metadata/", "metrics/") for key in STEP_KEYS]
    name = next((place for place in places if place in row.cells), None)
    if name is None:
        return None
    value = row.cells[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53 or value % 1:
        raise TraceError(f"{name} is {value!r}", where=f"{file}, line {row.line}", expected="a whole number")
    return int(value)


def _one_of_keys() -> str:
    return f"one of {', '.join(STEP_KEYS)}"


def canonical(column: str) -> str | None:
    """Return the signal that a column of the step file stands for, None for most."""
    return STEP_ALIASES.get(column.removeprefix("metrics/").removeprefix("train/"))


def _signals(steps: Table) -> tuple[pd.DataFrame, list[str]]:
    signals, notes = {}, []
    for column in map(str, steps.values):
        name = canonical(column)
        if name is None:
            continue
        if name in signals:
            notes.append(f"{column} would be {name} too: kept among the extra columns only")
        elif not steps.numeric(column):
            notes.append(f"{column} holds no numbers ({steps.count(column)}): not read as {name}")
        else:
            signals[name] = steps.column(column)
    return pd.DataFrame(signals, index=steps.values.index), notes


def _trajectories(file: Path | None) -> tuple[Table | None, list[str]]:
    if file is None:
        return None, [f"no {TRAJECTORY_FILE}"]
    rows, notes = read_rows(file)
    for row in rows:
        if not any(name.startswith("metrics/") for name in row.cells):
            raise TraceError("no metrics", where=f"{file}, line {row.line}", expected="metadata, metrics and flags")
    return table(rows), list(notes)


def _canonical_trajectories(found: Table | None, steps: Table) -> tuple[pd.DataFrame | None, list[str]]:
    if found is None or found.values.empty:
        return None, []
    places = {"step": tuple(f"metadata/{key}" for key in STEP_KEYS), **TRAJECTORY_ALIASES}
    columns = {name: _first(found, where, name in _WHOLE) for name, where in places.items()}
    lost = [name for name, column in columns.items() if column is None]
    if lost:
        return None, [f"trajectories are not canonical: {', '.join(lost)} not found as numbers in every row"]
    frame = pd.DataFrame({name: found.values[str(column)] for name, column in columns.items()})
    strangers = set(frame["step"]) - set(steps.values.index)
    if strangers:
        return None, [f"trajectories are not canonical: steps {sorted(strangers)[:3]} are not in the step file"]
    return frame, []


def _first(found: Table, places: Sequence[str], whole: bool) -> str | None:
    """Return the first of these columns that holds a plain number, or a whole one, in every row."""
    for name in places:
        if name in found.values and set(found.kinds[name]) == {NUMBER}:
            numbers = found.values[name].to_numpy()
            if not whole or bool((numbers % 1 == 0).all()):
                return name
    return None


def _injected(found: Table) -> bool | None:
    """Return whether a trajectory names an injected type with a strength other than 0."""
    head = "metadata/fault_injection"
    if not any(str(name).startswith(head) for name in found.values):
        return None
    types = _cells(found, f"{head}/fault_injection_type")
    strengths = _cells(found, f"{head}/fault_injection_strength")
    return any(bool(kind) and not _zero(strength) for kind, strength in zip(types, strengths, strict=True))


def _cells(found: Table, name: str) -> list[Any]:
    if name not in found.values:
        return [None] * len(found.values)
    gone = found.kinds[name].isin(["absent", "null"])
    return [None if lost else value for lost, value in zip(gone, found.values[name], strict=True)]


def _zero(value: Any) -> bool:
    try:
        return value is None or float(value) == 0
    except (TypeError, ValueError):
        return False


def _contradiction(label: Label, injected: bool | None) -> list[str]:
    if label == "fault" and injected is False:
        return ["the registry says fault, but no trajectory carries an injection"]
    if label == "healthy" and injected:
        return ["the registry says healthy, but trajectories carry an injection"]
    return []
