"""The fidelity study: many faults, strengths, seeds and models, scored by one protocol that was declared before.

    python -m moeproxy.triage.study --bench data/bench --out data/bench

reads the recorded runs and writes `fidelity.parquet` (a `Study`) and `FIDELITY.md` (the same for readers). Everything
here needs NumPy, SciPy and pandas only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.files import atomic_file, provenance, sha256_file
from moeproxy.traces.pack import REGISTRY, load_bench, load_registry
from moeproxy.traces.trace import Trace, load_dir
from moeproxy.triage.study_false import false_table
from moeproxy.triage.study_frames import rows
from moeproxy.triage.study_measures import measure
from moeproxy.triage.study_page import page
from moeproxy.triage.study_protocol import FAMILIES, Protocol
from moeproxy.triage.study_result import RESULT, Study
from moeproxy.triage.study_runs import Case, ModelRuns, faults_of, sort_runs
from moeproxy.triage.study_scores import Grid, ModelScores, make_grid, score_model
from moeproxy.triage.study_tables import difference_table, family_table, fault_table, model_table

__all__ = ["Protocol", "Study", "study"]

PAGE = "FIDELITY.md"


def study(
    traces: Sequence[Trace],
    protocol: Protocol | None = None,
    *,
    levels: Mapping[tuple[str, float], str] | None = None,
    crashed: Mapping[tuple[str, str, str, int], str] | None = None,
    families: Mapping[str, str] | None = None,
    registry_hash: str = "",
) -> Study:
    """Score every model of the traces against the original.

    Args:
        traces: healthy and broken runs of the original, of proxies and of controls.
        protocol: what is compared and what counts; the declared one by default.
        levels: level of each (fault, strength); by default the larger strength is "clear", the next "subtle".
        crashed: reason by (model, fault, level, seed) of runs that ended without a result.
        families: family of each fault; by default those of the catalogue.
        registry_hash: hash of the registry that the runs come from, for the provenance.

    Raises:
        ComparisonError: the original has no broken run, or too few healthy ones.

    Example:
        >>> study(load_dir("data/runs"))
        Study(2 faults, protocol 7e1c...; top-1, clear: original 1.00, cluster-16 1.00, ...)
    """
    rules = protocol or Protocol()
    models = sort_runs(traces, rules, levels=levels, crashed=crashed)
    if not models[rules.original].twins:
        raise ComparisonError(
            f"no broken run of {rules.original!r} with a healthy twin",
            expected="both, of the same seed and settings",
            remedy="record them",
        )
    grid, skipped = make_grid(models, rules)
    scores, without = _scored(models, grid)
    cells = _cells(scores, grid, families or dict(FAMILIES))
    controls = _controls(scores, rules)
    return Study(
        protocol=rules,
        models=model_table(cells, rules),
        faults=fault_table(cells),
        families=family_table(cells, rules),
        differences=difference_table(cells, controls, rules),
        false=false_table(scores, grid),
        cells=cells,
        responses=_responses(scores, grid),
        signals=grid.names,
        skipped=tuple(skipped + without + _notes(scores)),
        provenance=_provenance(traces, rules, registry_hash),
    )


def _scored(models: Mapping[str, ModelRuns], grid: Grid) -> tuple[dict[str, ModelScores], list[tuple[str, str]]]:
    scores: dict[str, ModelScores] = {}
    without = []
    for label, runs in models.items():
        try:
            scores[label] = score_model(runs, grid)
        except ComparisonError as error:
            if label == grid.protocol.original:
                raise
            without.append((label, f"skipped: {error.found}"))
    return scores, without


def _cells(scores: Mapping[str, ModelScores], grid: Grid, families: Mapping[str, str]) -> pd.DataFrame:
    """Return one row for each case of the original and each model that was run at its level."""
    ours = scores[grid.protocol.original]
    levels = sorted({case[1] for case in ours.runs.twins}, key=_level_order(grid.protocol))
    table = []
    for label, theirs in scores.items():
        for level in levels:
            if not any(case[1] == level for case in theirs.status):
                continue  # controls were run at one level only; that is no missing run
            known = faults_of({grid.protocol.original: ours.runs}, level, grid.protocol.original)
            cases = sorted(case for case in {*ours.runs.twins, *theirs.status} if case[1] == level and case[0] in known)
            table += [_cell_row(ours, theirs, case, known, grid, families) | {"model": label} for case in cases]
    frame: Any = pd.DataFrame(table)
    first = ["model", "method", "n_experts", "level", "family", "fault", "seed", "onset"]
    return frame[[*first, *(name for name in frame if name not in first)]]


def _cell_row(
    ours: ModelScores,
    theirs: ModelScores,
    case: Case,
    known: tuple[str, ...],
    grid: Grid,
    families: Mapping[str, str],
) -> dict[str, Any]:
    fault, level, seed = case
    twins = theirs.runs.twins.get(case) or ours.runs.twins.get(case)
    return {
        "method": theirs.runs.method,
        "n_experts": theirs.runs.n_experts,
        "level": level,
        "family": families.get(fault, "?"),
        "fault": fault,
        "seed": seed,
        "onset": twins.onset if twins else -1,
        **measure(ours, theirs, case, known, grid).row(),
    }


def _level_order(protocol: Protocol):
    return lambda level: (protocol.levels.index(level) if level in protocol.levels else len(protocol.levels), level)


def _controls(scores: Mapping[str, ModelScores], protocol: Protocol) -> tuple[str, ...]:
    """Return every model that is neither the original nor chosen by the method under test."""
    return tuple(label for label, model in scores.items() if model.runs.method not in ("original", protocol.method))


def _responses(scores: Mapping[str, ModelScores], grid: Grid) -> pd.DataFrame:
    """Return mean, lowest and highest score over the seeds for every entry."""
    parts = []
    windows = [f"{start}–{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in grid.protocol.windows]
    for label, model in scores.items():
        for fault, level in dict.fromkeys((case[0], case[1]) for case in sorted(model.scores)):
            found = np.stack([score for case, score in model.scores.items() if case[:2] == (fault, level)])
            seen = np.isfinite(found)
            count = seen.sum(0)
            frame = pd.DataFrame(
                {
                    "model": label,
                    "fault": fault,
                    "level": level,
                    "signal": np.repeat(grid.names, len(windows)),
                    "window": np.tile(windows, len(grid.names)),
                    "mean": np.where(count > 0, np.where(seen, found, 0).sum(0) / np.maximum(count, 1), np.nan).ravel(),
                    "low": np.where(count > 0, np.where(seen, found, np.inf).min(0), np.nan).ravel(),
                    "high": np.where(count > 0, np.where(seen, found, -np.inf).max(0), np.nan).ravel(),
                }
            )
            parts.append(frame.astype(dict.fromkeys(("mean", "low", "high"), np.float32)))
    return pd.concat(parts, ignore_index=True)


def _notes(scores: Mapping[str, ModelScores]) -> list[tuple[str, str]]:
    notes = []
    for label, model in scores.items():
        if model.missing:
            notes.append((label, f"does not log {', '.join(model.missing)}: compared without them"))
        if model.runs.without_twin:
            alone = ", ".join(f"{fault} {level} seed {seed}" for fault, level, seed in model.runs.without_twin)
            notes.append((label, f"no healthy twin for {alone}: not scored"))
        notes += [(label, f"crashed: {'/'.join(map(str, case))} ({why})") for case, why in model.runs.crashed.items()]
    return notes


def _provenance(traces: Sequence[Trace], protocol: Protocol, registry_hash: str) -> dict[str, Any]:
    prints = {trace.provenance.model: trace.provenance.checkpoint_fingerprint for trace in traces}
    healthy = [trace for trace in traces if trace.provenance.healthy and "seconds_per_step" in trace.signals]
    seconds: dict[str, list[float]] = {}
    for trace in healthy:
        seconds.setdefault(trace.provenance.model, []).append(float(np.median(trace.values("seconds_per_step"))))
    return provenance(
        seconds_per_step={model: round(float(np.median(found)), 4) for model, found in seconds.items()},
        protocol_hash=protocol.hash,
        registry_hash=registry_hash,
        checkpoint_fingerprints=prints,
        n_traces=len(traces),
    )


def study_folder(folder: str | Path, protocol: Protocol | None = None) -> Study:
    """Score the recorded runs of a folder: a benchmark with its registry, or plain trace files.

    Raises:
        TraceError, ComparisonError: the folder or its runs are unusable.
    """
    root = Path(folder)
    if not (root / REGISTRY).is_file():
        return study(load_dir(root), protocol)
    runs = rows(load_registry(root, failed=True))
    broken = [run for run in runs if run["fault"]]
    return study(
        load_bench(root),
        protocol,
        levels={(run["fault"], float(run["strength"])): run["level"] for run in broken},
        crashed={
            (run["model"], run["fault"], run["level"], int(run["seed"])): run.get("failed") or "no result"
            for run in broken
            if not run["pack"]
        },
        families={run["fault"]: run["family"] for run in broken},
        registry_hash=sha256_file(root / REGISTRY),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: score a benchmark, write the study and its page."""
    parser = argparse.ArgumentParser(description="Score the recorded runs by the declared protocol.")
    parser.add_argument("--bench", type=Path, default=Path("data/bench"), help="folder of recorded runs")
    parser.add_argument("--out", type=Path, default=Path("data/bench"), help="where the results go")
    options = parser.parse_args(arguments)
    try:
        result = study_folder(options.bench)
        result.save(options.out / RESULT)
        with atomic_file(options.out / PAGE) as temporary:
            temporary.write_text(page(result), encoding="utf-8")
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    sys.stdout.write(f"{result!r}\n{options.out / PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
