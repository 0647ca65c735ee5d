"""Strategies side by side: the same faults, answered by nothing, by restarts of everything, by restarts of one role.

    python -m moeproxy.recovery.study --out out/recovery

Jobs that have ended are not made again, and one that was cut short is: it can be stopped and called again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.places import data_dir
from moeproxy.recovery.calculator import NONE, ROLE, STRATEGIES, TASK
from moeproxy.recovery.outcome import RoleRun, read_job
from moeproxy.recovery.parting import verify
from moeproxy.recovery.plan import PHASES, Mishap, RolePlan

_FORMAT = "moeproxy.recovery_study"
FREQUENCIES = (0.0, 0.02, 0.10)
SEEDS = (0, 1, 2)
_ENDED = ("finished", "failed")
SETTINGS = GRPOSettings(steps=50, prompts=4, samples=4, tasks=256)


@dataclass(frozen=True)
class Row:
    """One job of the study.

    Args:
        strategy: a key of `STRATEGIES`.
        frequency: trainer faults a step.
        seed: of the run and of its faults.
        outcome: "finished", or why not.
        faults: how many there were.
        recovery: median seconds from a fault to the trainer's next step; None without faults.
        again: steps that were done again.
        ettr, strict: effective training time ratio, with and without credit for rollouts.
        wall: seconds from the first step's begin to the end.
        equal: whether all states are those of the undisturbed job, bit for bit.
    """

    strategy: str
    frequency: float
    seed: int
    outcome: str
    faults: int
    recovery: float | None
    again: int
    ettr: float
    strict: float
    wall: float
    equal: bool


@dataclass(frozen=True)
class Study:
    """Rows of all jobs."""

    rows: tuple[Row, ...]

    def table(self) -> str:
        """Return a Markdown table: means over seeds, with the range where there are several."""
        head = ["after a fault", "faults a step", "recovery (s)", "steps again", "ETTR", "without credit", "wall (s)"]
        lines = [" | ".join(head), " | ".join(["---"] * len(head))]
        for strategy in (NONE, TASK, ROLE):
            for frequency in sorted({row.frequency for row in self.rows}):
                rows = [row for row in self.rows if (row.strategy, row.frequency) == (strategy, frequency)]
                if rows:
                    lines.append(" | ".join([STRATEGIES[strategy], f"{frequency:.0%}", *_cells(rows)]))
        return "\n".join(f"| {line} |" for line in lines)

    def __repr__(self) -> str:
        return f"Study({len(self.rows)} jobs, {sum(row.equal for row in self.rows)} equal bit for bit)"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.table())}</pre>"

    def in_order(self, frequency: float) -> bool:
        """Whether restarting only the failed role beats restarting everything, in ETTR, for every seed."""
        found = {(row.strategy, row.seed): row.ettr for row in self.rows if row.frequency == frequency}
        seeds = {seed for _, seed in found}
        return bool(seeds) and all(found[ROLE, seed] > found[TASK, seed] for seed in seeds)

    def save(self, path: str | Path) -> Path:
        """Write the study to a JSON file, atomically, and return its path."""
        target = Path(path)
        with atomic_file(target) as temporary:
            made = provenance(machine=_machine())
            stored = {"format": _FORMAT, "rows": [asdict(row) for row in self.rows], "provenance": made}
            temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        return target

    @staticmethod
    def load(path: str | Path) -> Study:
        """Read what `save` wrote.

        Raises:
            RecoveryError: the file is something else.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored["format"] != _FORMAT:
                raise ValueError("another format")
            return Study(tuple(Row(**row) for row in stored["rows"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecoveryError(f"no study of recovery ({error})", where=path) from error


def faults_for(steps: int, frequency: float, seed: int) -> tuple[Mishap, ...]:
    """Return trainer kills at random steps and phases: `frequency` of the steps, rounded, none in the first step.

    Raises:
        RecoveryError: more faults than steps to have them in.
    """
    n = round(frequency * steps)
    if not 0 <= n < steps:
        raise RecoveryError(f"{n} faults in {steps} steps", expected=f"0 to {steps - 1}")
    rng = np.random.default_rng([seed, 8])
    chosen = sorted(rng.choice(np.arange(2, steps + 1), size=n, replace=False).tolist())
    phases = [phase for phase in PHASES["trainer"] if phase != "recover"]
    return tuple(Mishap("trainer", step, str(rng.choice(phases))) for step in chosen)


def compare_strategies(
    spec: RunSpec,
    out: Path,
    *,
    frequencies: Sequence[float] = FREQUENCIES,
    seeds: Iterable[int] = SEEDS,
    strategies: Sequence[str] = (NONE, TASK, ROLE),
    report: Callable[[Row], None] | None = None,
    limit: float = 1800.0,
) -> Study:
    """Make the same job under every strategy, with the same faults, and compare.

    Args:
        spec: the run; its seed is replaced by each of `seeds`.
        out: folder for one folder a job; finished ones are read, not made again.
        frequencies: trainer faults a step.
        seeds: of runs and faults.
        strategies: keys of `STRATEGIES`.
        report: called with each row.
        limit: seconds for one job.

    Raises:
        LabError: no Ray could be started.
        RecoveryError: Ray is not installed, or a folder holds another job.
    """
    rows = []
    for seed in seeds:
        here = replace(spec, seed=seed)
        calm = _job(here, out, NONE, 0.0, limit)
        for frequency in frequencies:
            for strategy in strategies:
                made = _job(here, out, strategy, frequency, limit)
                rows.append(_row(made, calm, frequency))
                if report:
                    report(rows[-1])
    return Study(tuple(rows))


def _job(spec: RunSpec, out: Path, strategy: str, frequency: float, limit: float) -> RoleRun:
    mishaps = faults_for(spec.settings.steps, frequency, spec.seed)
    plan = RolePlan(strategy=strategy, mishaps=mishaps, standby=strategy == ROLE, max_task_restarts=1000)
    return _made(spec, out / f"{strategy}-f{frequency:g}-s{spec.seed}", plan, limit)


def _made(spec: RunSpec, folder: Path, plan: RolePlan, limit: float) -> RoleRun:
    from moeproxy.recovery.job import Job

    if (folder / "job.json").exists():
        if read_job(folder) != (spec, plan):
            raise RecoveryError("another job is here", where=folder, remedy="choose another folder")
        with contextlib.suppress(RecoveryError):  # its process ended before it
            if (found := RoleRun.load(folder)).outcome.startswith(_ENDED):
                return found
        shutil.rmtree(folder)  # this very job, cut short
    return Job(spec, folder, plan).run(limit)


def _row(run: RoleRun, calm: RoleRun, frequency: float) -> Row:
    effective = run.ettr()
    away = [item.seconds for item in effective.outages if item.role == "trainer" or item.whole_task]
    return Row(
        strategy=run.plan.strategy,
        frequency=frequency,
        seed=run.spec.seed,
        outcome=run.outcome,
        faults=len(run.plan.mishaps),
        recovery=float(np.median(away)) if away else None,
        again=_again(run),
        ettr=effective.ratio,
        strict=effective.ratio_strict,
        wall=effective.wall,
        equal=verify(calm.folder, run.folder).equal,
    )


def _machine() -> str:
    """Return the machine's processor and cores, and how many programs wanted one in the last quarter of an hour."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        name = next((line.partition(":")[2].strip() for line in stream if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f} at the end"


def _again(run: RoleRun) -> int:
    """Return how many finished steps were done again, each as often as it was."""
    from moeproxy.recovery.events import STEP_COMMIT, read_events

    commits = [event.step for event in read_events(run.folder) if event.event == STEP_COMMIT]
    return len(commits) - len(set(commits))


def _cells(rows: Sequence[Row]) -> list[str]:
    def cell(name: str, digits: int) -> str:
        values: list[Any] = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        if not values:
            return ""
        spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
        return f"{np.mean(values):.{digits}f}{spread}"

    return [cell("recovery", 1), cell("again", 0), cell("ettr", 2), cell("strict", 2), cell("wall", 0)]


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the study, or what is missing of it; return the exit status."""
    from tqdm.auto import tqdm

    from moeproxy.recovery.crew import ray_running

    parser = argparse.ArgumentParser(description="Compare strategies of recovery on the same faults.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the jobs and study.json")
    parser.add_argument("--model", type=Path, default=data_dir() / "models" / "qwen3-moe-tiny")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--frequencies", type=float, nargs="+", default=list(FREQUENCIES))
    parser.add_argument("--strategies", nargs="+", default=[NONE, TASK, ROLE], choices=list(STRATEGIES))
    options = parser.parse_args(arguments)
    spec = RunSpec(options.model, settings=replace(SETTINGS, steps=options.steps))
    with ray_running():
        found = compare_strategies(
            spec,
            options.out,
            frequencies=options.frequencies,
            seeds=options.seeds,
            strategies=options.strategies,
            report=lambda row: tqdm.write(f"{row.strategy} {row.frequency:.0%} seed {row.seed}: ETTR {row.ettr:.2f}"),
        )
    found.save(options.out / "study.json")
    tqdm.write(found.table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
