"""Measure how much of its ability the testbed keeps under each way of choosing experts.

Two questions of arXiv 2608.10823 are asked again here: do informed choices beat random ones, and does clustering in
three views beat counting how often an expert is used? The details that the paper leaves open are tried on the
validation split; every number in the report comes from the test split.

    python -m moeproxy.lab.pruning_study --out data/pruning

"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import atomic_file
from moeproxy.lab.scoring import accuracy
from moeproxy.lab.tasks import RL_SKILLS, sample_many
from moeproxy.proxy.check import prune_in_memory
from moeproxy.proxy.cluster import select
from moeproxy.proxy.plan import KeepPlan

N_EVALUATED = {"validation": 120, "test": 280}
CALIBRATION_TEXTS = 800


@dataclass(frozen=True)
class Variant:
    """One way of choosing experts: a name for the table and the options of `moeproxy.proxy.select`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draws_seed: bool = False


METHODS = (
    Variant("random", {"method": "random"}, draws_seed=True),
    Variant("first", {"method": "first"}),
    Variant("frequency", {"method": "frequency"}),
    Variant("gate", {"method": "gate"}),
    Variant("reap", {"method": "reap"}),
    Variant("cluster", {"method": "cluster"}),
    Variant("merge", {"method": "merge"}),
    Variant("cluster: router", {"method": "cluster", "weights": (1, 0, 0)}),
    Variant("cluster: co-activation", {"method": "cluster", "weights": (0, 1, 0)}),
    Variant("cluster: context", {"method": "cluster", "weights": (0, 0, 1)}),
)

DETAILS = tuple(
    Variant(
        f"{normalisation}, {'centred' if centred else 'raw'} context, {'with' if own else 'without'} own load, {best}",
        {"normalisation": normalisation, "centred": centred, "own_load": own, "representative": best},
    )
    for normalisation in ("minmax", "rank")
    for centred in (False, True)
    for own in (True, False)
    for best in ("most_used", "most_gate", "medoid")
)


def calibration_texts(draw: int, n: int = CALIBRATION_TEXTS) -> list[str]:
    """Return calibration texts of the RL domain (prompt and answer); each draw is another sample of the split."""
    tasks = sample_many(n, seed=1000 + draw, split="calibration", skills=RL_SKILLS)
    return [task.prompt + task.answer for task in tasks]


def study(
    model_path: Path,
    variants: Iterable[Variant],
    *,
    counts: Iterable[int],
    draws: int,
    split: str,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Return one row for each variant, count and draw: accuracy on `split` and its share of the original's.

    Args:
        model_path: testbed checkpoint.
        variants: ways of choosing.
        counts: experts kept in each layer.
        draws: calibration samples; for random choices also the seed of the choice.
        split: of the evaluated tasks.
        progress: called with one line a row.

    Returns:
        Columns model, split, n_keep, variant, draw, accuracy, above_chance (share of the original's accuracy above
        chance that is kept; 1 = all, 0 = chance).
    """
    checkpoint = Checkpoint.open(model_path)
    model = load_model(checkpoint).eval()
    n = N_EVALUATED[split]
    original = accuracy(model, RL_SKILLS, n=n, split=split)
    profiles = [profile(checkpoint, calibration_texts(draw), batch_size=200) for draw in range(draws)]
    base = {"model": Path(model_path).name, "split": split}
    rows = [
        {
            **base,
            "n_keep": checkpoint.n_experts,
            "variant": "original",
            "draw": 0,
            "accuracy": original.mean,
            "kept": 1.0,
        }
    ]
    for n_keep in counts:
        for variant in variants:
            for draw, statistics in enumerate(profiles):
                plan = _plan(statistics, n_keep, variant, draw)
                pruned = accuracy(prune_in_memory(model, plan, checkpoint.family), RL_SKILLS, n=n, split=split)
                kept = (pruned.mean - original.chance) / original.above_chance
                rows.append(
                    {
                        **base,
                        "n_keep": n_keep,
                        "variant": variant.name,
                        "draw": draw,
                        "accuracy": pruned.mean,
                        "kept": kept,
                    }
                )
                if progress:
                    progress(f"{n_keep} {variant.name} draw {draw}: {pruned.mean:.3f}")
    return pd.DataFrame(rows)


def _plan(statistics: ExpertProfile, n_keep: int, variant: Variant, draw: int) -> KeepPlan:
    seed: dict[str, Any] = {"seed": draw} if variant.draws_seed else {}
    return select(statistics, n_keep, **variant.options, **seed)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean, standard deviation over draws, and number of draws for each model, count and variant."""
    grouped = table.groupby(["model", "split", "n_keep", "variant"], sort=False)
    return grouped.agg(
        accuracy=("accuracy", "mean"),
        accuracy_std=("accuracy", "std"),
        kept=("kept", "mean"),
        draws=("draw", "count"),
    ).reset_index()


def main() -> None:
    """Command line: measure both tables of `data/pruning`."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="Accuracy of the testbed under each way of choosing experts.")
    parser.add_argument("--models", type=Path, default=Path("data/models"))
    parser.add_argument("--out", type=Path, default=Path("data/pruning"))
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = options.models / "qwen3-moe-tiny"
    other = options.models / "deepseek-v3-tiny"
    parts = {
        "details": [study(model, DETAILS, counts=(8, 16), draws=3, split="validation", progress=tqdm.write)],
        "methods": [
            study(model, METHODS, counts=(8, 16, 24), draws=options.draws, split="test", progress=tqdm.write),
            study(other, METHODS, counts=(8, 16, 24), draws=options.draws, split="test", progress=tqdm.write),
        ],
    }
    for name, tables in parts.items():
        with atomic_file(options.out / f"{name}.csv") as path:
            pd.concat(tables).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main()
