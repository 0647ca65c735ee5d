"""Train proxies with merged experts beside clustered ones: does merging make GRPO unstable, as arXiv 2608.10823 says?

    python -m moeproxy.lab.merge_study --out data/pruning

Healthy runs only, as in `moeproxy.lab.record`; one row a run of `merge_training.csv`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from moeproxy.experts.profile import profile
from moeproxy.files import atomic_file
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.record import Choice, build_proxies, specs_of
from moeproxy.lab.sweep import sweep
from moeproxy.traces.trace import Trace

CHOICES = (Choice("cluster", 16), Choice("merge", 16))


def training_table(traces: Iterable[Trace]) -> pd.DataFrame:
    """Return one row a run.

    Columns: model, seed, reward_first and reward_last (means of the first 5 and last 10 steps), gain, kl_last (mean KL
    to the start over the last 10 steps, nats), kl_max, grad_peak (largest gradient norm over the median), entropy_last
    (nats).
    """
    return pd.DataFrame([_row(trace) for trace in traces]).sort_values(["model", "seed"], ignore_index=True)


def _row(trace: Trace) -> dict[str, object]:
    steps = trace.steps
    first, last = steps["reward_mean"].head(5).mean(), steps["reward_mean"].tail(10).mean()
    return {
        "model": trace.provenance.model,
        "seed": trace.provenance.seed,
        "reward_first": first,
        "reward_last": last,
        "gain": last - first,
        "kl_last": steps["kl"].tail(10).mean(),
        "kl_max": steps["kl"].max(),
        "grad_peak": steps["grad_norm"].max() / steps["grad_norm"].median(),
        "entropy_last": steps["entropy"].tail(10).mean(),
    }


def main() -> None:
    """Command line: train the runs and write the table."""
    parser = argparse.ArgumentParser(description="GRPO on proxies with merged experts beside clustered ones.")
    parser.add_argument("--model", type=Path, default=Path("data/models/qwen3-moe-tiny"))
    parser.add_argument("--out", type=Path, default=Path("data/pruning"))
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        statistics = profile(options.model, calibration_texts(0), batch_size=200)
        paths = build_proxies(options.model, statistics, CHOICES, Path(scratch))
        specs = [spec for c, path in paths.items() for spec in specs_of(path, c.label, c.method, injections=())]
        traces = sweep(specs, Path(scratch) / "runs", workers=options.workers)
    with atomic_file(options.out / "merge_training.csv") as path:
        training_table(traces).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main()
