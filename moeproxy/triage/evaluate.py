"""Score detection and diagnosis on recorded runs that were held out: seeds, models and whole faults.

    python -m moeproxy.triage.evaluate --bench data/bench --out data/triage

writes `scores.json` and `TRIAGE.md`; the page also has what `moeproxy.triage.public_tools` measured, where it lies in
the folder. Healthy runs are judged by references that they are no part of; broken runs by libraries that hold no run of
their seed, and, for the transfer, no run of their model.

Axes: N run, F feature, C fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.files import atomic_file
from moeproxy.traces.pack import REGISTRY, load_bench
from moeproxy.traces.trace import Trace, load_dir
from moeproxy.triage.alone import Priors
from moeproxy.triage.baselines import EVERY, baseline_classes, baseline_detectors
from moeproxy.triage.detect import ALARM, ALONE, BESIDE, Detection, judge
from moeproxy.triage.detection_scores import detection_scores
from moeproxy.triage.evaluate_logged import as_logged
from moeproxy.triage.evaluate_page import page
from moeproxy.triage.evaluate_reproduce import reproduction_scores
from moeproxy.triage.learn import Fits, Run, learn_alone, learn_beside, learn_priors, references, runs_of
from moeproxy.triage.library import Library
from moeproxy.triage.public_tools import FILE
from moeproxy.triage.study_protocol import FAMILIES

SCORES = "scores.json"


@dataclass(frozen=True)
class Judgement:
    """One held-out run and what detection said of it."""

    model: str
    fault: str
    level: str
    seed: int
    usual: bool
    onset: int
    n_steps: int
    alarm: bool
    found_onset: int
    strength: float


def judgements(runs: Sequence[Run], mode: str) -> list[Judgement]:
    """Judge every run without itself among what judges it."""
    return _beside(runs) if mode == BESIDE else _alone(runs)


def _beside(runs: Sequence[Run]) -> list[Judgement]:
    found = []
    for model, members in references(runs).items():
        fits = Fits([run.table for run in members])
        for run in runs:
            if run.info.model == model:
                seen = judge(run.table, fits.departures(run.table), BESIDE, len(members))
                found.append(_judgement(run, seen, usual=run.info.config == members[0].info.config))
    return found


def _alone(runs: Sequence[Run]) -> list[Judgement]:
    """Judge the runs of each model by priors that were learned from the other models."""
    found = []
    healthy = [run for run in runs if run.info.healthy]
    for model in dict.fromkeys(run.info.model for run in runs):
        others = [run for run in healthy if run.info.model != model]
        # A prior needs two models; with one other its runs are split by seed.
        labels = [run.info.model for run in others]
        if len(set(labels)) < 2:
            labels = [f"{run.info.model} {run.info.seed % 2}" for run in others]
        priors = Priors.of([run.table for run in others], labels)
        for run in runs:
            if run.info.model == model:
                seen = judge(run.table, priors.departures(run.table), ALONE, priors.n_runs)
                found.append(_judgement(run, seen, usual=True))
    return found


def _judgement(run: Run, seen: Detection, usual: bool) -> Judgement:
    info = run.info
    return Judgement(
        model=info.model,
        fault=info.fault or "",
        level=run.level,
        seed=info.seed,
        usual=usual,
        onset=info.onset if info.onset is not None else -1,
        n_steps=len(run.table.steps_S),
        alarm=seen.verdict == ALARM,
        found_onset=seen.onset if seen.onset is not None else -1,
        strength=float(seen.strength),
    )


def held_out(library: Library, train_N: np.ndarray, test_N: np.ndarray) -> np.ndarray:
    """Return the faults named for the runs of `test_N`, each by runs of `train_N` with another seed."""
    named = np.full(len(library.fault_N), "", object)
    for seed in np.unique(library.seed_N[test_N]):
        rest = library.only(train_N & (library.seed_N != seed)).calibrated()
        for place in np.flatnonzero(test_N & (library.seed_N == seed)):
            named[place] = rest.nearest(library.features_NF[place])
    return named[test_N]


def macro_f1(right: Sequence[str] | np.ndarray, named: Sequence[str] | np.ndarray) -> float:
    """Return the mean over faults of F1."""
    right_N, named_N = np.asarray(right, object), np.asarray(named, object)
    scores = []
    for fault in dict.fromkeys(right):
        hits = np.sum((right_N == fault) & (named_N == fault))
        scores.append(2 * hits / (np.sum(right_N == fault) + np.sum(named_N == fault)))
    return float(np.mean(scores))


def diagnosis_scores(library: Library, level: str) -> list[dict[str, object]]:
    """Return macro-F1 by what was trained on and what was tested, each model and all together, seeds held out."""
    at = library.level_N == level
    models = list(dict.fromkeys(map(str, library.model_N)))
    rows, right, named = [], defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for tested in models:
        test_N = at & (library.model_N == tested)
        others = library.model_N != tested
        splits = {"all models": np.ones(len(at), bool), "the same model": ~others, "other models only": others}
        for name, train_N in splits.items():
            if (train_N & at).any():
                mine, told = list(map(str, library.fault_N[test_N])), list(held_out(library, train_N, test_N))
                rows.append({"tested": tested, "trained": name, "level": level, **_class_scores(mine, told)})
                right[name] += mine
                named[name] += told
    pooled = [
        {"tested": EVERY, "trained": name, "level": level, **_class_scores(right[name], named[name])} for name in right
    ]
    return [*pooled, *rows]


def _class_scores(right: Sequence[str], named: Sequence[str]) -> dict[str, float]:
    accuracy = float(np.mean([one == other for one, other in zip(right, named, strict=True)]))
    return {"accuracy": accuracy, "macro_f1": macro_f1(right, named), "chance": 1 / len(set(right))}


def unknown_scores(library: Library, level: str) -> dict[str, float]:
    """Return what becomes of faults that were left out of the library altogether.

    Returns:
        Shares called unknown, named a relative of the same family, and either of both; and the share of known faults
        (seeds held out) that are called unknown by mistake.
    """
    at = library.level_N == level
    unknown, related, either, false = [], [], [], []
    for fault in sorted(set(map(str, library.fault_N[at]))):
        rest = library.only(library.fault_N != fault).calibrated()
        for place in np.flatnonzero(at & (library.fault_N == fault)):
            features_F = library.features_NF[place]
            far = rest.per_feature(features_F) > rest.farthest
            nearest = rest.nearest(features_F)
            kin = FAMILIES.get(nearest) == FAMILIES.get(fault)
            unknown.append(far)
            related.append(kin)
            either.append(far or kin)
    for seed in sorted(set(library.seed_N)):
        rest = library.only(library.seed_N != seed).calibrated()
        for place in np.flatnonzero(at & (library.seed_N == seed)):
            false.append(rest.per_feature(library.features_NF[place]) > rest.farthest)
    return {
        "unknown": float(np.mean(unknown)),
        "same_family": float(np.mean(related)),
        "either": float(np.mean(either)),
        "known_called_unknown": float(np.mean(false)),
    }


def evaluate(traces: Sequence[Trace]) -> dict[str, object]:
    """Score both ways of judging on recorded runs."""
    runs, libraries = runs_of(traces), dict[str, Library]()
    levels = [level for level in ("clear", "subtle") if any(run.level == level for run in runs)]
    parts = ("detection", "diagnosis", "unknown", "reproduction")
    result: dict[str, Any] = {"runs": len(runs), **{part: [] for part in parts}}
    for mode in (BESIDE, ALONE):
        table = pd.DataFrame([asdict(one) for one in judgements(runs, mode)])
        result["detection"] += _detection_rows(table, mode, levels)
        library = learn_beside(runs) if mode == BESIDE else learn_alone(runs, learn_priors(runs))
        libraries[mode] = library
        for level in levels:
            rows = diagnosis_scores(library, level)
            result["diagnosis"] += [{"mode": mode, "method": "this", **row} for row in rows]
            result["unknown"].append({"mode": mode, "level": level, **unknown_scores(library, level)})
            if mode == BESIDE:
                result["diagnosis"] += [{"mode": mode, **row} for row in baseline_classes(library, level, macro_f1)]
        if mode == BESIDE:
            result["reproduction"] = reproduction_scores(runs, library)
    result["detection"] += baseline_detectors(runs, levels)
    result["as_logged"] = as_logged(traces, libraries)
    return result


def _detection_rows(table: Any, mode: str, levels: Sequence[str]) -> list[dict[str, object]]:
    rows = []
    for level in levels:
        for model, part in [("all", table), *table.groupby("model", sort=False)]:
            rows.append(
                {"mode": mode, "method": "this", "model": model, "level": level} | detection_scores(part, level)
            )
    other = table[(table["fault"] == "") & ~table["usual"]]
    if len(other):
        rows.append(
            {"mode": mode, "method": "this", "model": "healthy at other settings", "level": ""}
            | {"healthy_runs": len(other), "flagged": float(other["alarm"].mean())}
        )
    return rows


def save(result: Mapping[str, object], out: Path) -> None:
    """Write the scores as JSON and as a page for readers."""
    with atomic_file(out / SCORES) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_page(out)


def write_page(out: Path) -> None:
    """Write the page from the scores in a folder, those of public tools among them where they were measured.

    Raises:
        ComparisonError: there are no scores, or they are broken.
    """
    try:
        result, *more = [
            json.loads((out / name).read_text(encoding="utf-8"))
            for name in (SCORES, FILE)
            if name == SCORES or (out / name).is_file()
        ]
        text = page(result, *more)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(f"no scores ({error!r})", where=out, remedy="call without --page first") from error
    with atomic_file(out / "TRIAGE.md") as temporary:
        temporary.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: score a folder of recorded runs."""
    parser = argparse.ArgumentParser(description="Score detection and diagnosis on held-out runs.")
    parser.add_argument("--bench", type=Path, default=Path("data/bench"))
    parser.add_argument("--out", type=Path, default=Path("data/triage"))
    parser.add_argument("--page", action="store_true", help="only write the page, from the scores in the folder")
    options = parser.parse_args(arguments)
    try:
        if options.page:
            write_page(options.out)
        else:
            traces = load_bench(options.bench) if (options.bench / REGISTRY).is_file() else load_dir(options.bench)
            save(evaluate(traces), options.out)
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    sys.stdout.write(f"{options.out / 'TRIAGE.md'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
