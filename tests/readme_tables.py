"""The README's measured tables, made from the shipped data: `python -m tests.readme_tables` prints them."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from moeproxy import mainjob
from moeproxy.lab.pruning_study import summary
from moeproxy.lab.record import SUBTLE
from moeproxy.places import data_dir
from moeproxy.triage.compare import Comparison

RANK = "rank correlation (no response)"
SHOWN = ("random", "first", "frequency", "gate", "reap", "cluster", "merge")


def verdicts() -> str:
    """Return the verdict table: one row a fault and proxy."""
    recorded = mainjob.recorded_runs()
    main = [trace for trace in recorded if trace.provenance.model in ("original", "cluster-16")]
    rows = [row for item in mainjob.compare_faults(recorded) for row in _rows(item)]
    rows += [row for item in mainjob.compare_faults(main, SUBTLE) for row in _rows(item)]
    columns = ("fault, strength", "proxy", "verdict", "same direction", "significant too", RANK, "right fault")
    head = "| " + " | ".join(columns) + " |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def _rows(item: Comparison) -> list[str]:
    return [
        f"| `{item.fault}`, {item.strength:g} | {proxy.model} | {proxy.verdict} | {_percent(proxy.direction.mean)} "
        f"| {_percent(proxy.found.mean)} | {proxy.rank.mean:.2f} ({proxy.rank_null_high:.2f}) "
        f"| {sum(name == item.fault for name in proxy.retrieved)} of {len(proxy.retrieved)} |"
        for proxy in item.proxies
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def accuracies(model: str = mainjob.MODEL) -> str:
    """Return the accuracy table: one row a method, one column a number of kept experts."""
    table = summary(pd.read_csv(data_dir() / "pruning" / "methods.csv"))
    table = table[table["model"] == model]
    counts = sorted({int(n) for n in table.loc[table["variant"] != "original", "n_keep"]}, reverse=True)
    head = "| kept of 32 | " + " | ".join(SHOWN) + " |"
    rows = []
    for count in counts:
        cells = []
        for variant in SHOWN:
            row = table[(table["n_keep"] == count) & (table["variant"] == variant)].iloc[0]
            cells.append(f"{row['accuracy']:.2f} ± {row['accuracy_std']:.2f}")
        rows.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join([head, "|---|" + "---|" * len(SHOWN), *rows])


def gains() -> str:
    """Return the mean gain in sampled reward over 60 healthy steps, for each model: last ten steps minus first five."""
    found: dict[str, list[float]] = {}
    for trace in mainjob.recorded_runs():
        if trace.provenance.healthy:
            reward = trace.values("reward_mean")
            found.setdefault(trace.provenance.model, []).append(float(reward[-10:].mean() - reward[:5].mean()))
    order = sorted(
        found, key=lambda name: (name != "original", -int(name.rsplit("-", 1)[-1]) if "-" in name else 0, name)
    )
    cells = [f"{np.mean(found[name]):+.2f} ± {np.std(found[name], ddof=1):.2f}" for name in order]
    return "\n".join(["| " + " | ".join(order) + " |", "|---" * len(order) + "|", "| " + " | ".join(cells) + " |"])


if __name__ == "__main__":
    for make in (accuracies, gains, verdicts):
        sys.stdout.write(make() + "\n\n")
