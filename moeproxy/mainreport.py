"""The report of the main job: costs, accuracies, words, limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import provenance
from moeproxy.lab.faults import fault
from moeproxy.lab.pruning_study import summary
from moeproxy.places import data_dir
from moeproxy.proxy.build import Proxy
from moeproxy.proxy.cost import cost
from moeproxy.proxy.plan import KeepPlan
from moeproxy.traces.trace import Trace
from moeproxy.triage.compare import Comparison
from moeproxy.view.report import ReportInput, write_report

OVERLAID = ("policy_loss", "grad_norm", "logprob_diff_mean", "reward_mean")
"""Signals of the overlay: loss and gradient norm, and one that shows each of the two faults."""

WAYS = (
    "Ways of choosing experts: cluster, k-medoids on three views (router rows, co-activation, routed context); "
    "frequency, the most used; gate, the largest sum of gate weights; reap, the largest gate weight times output norm "
    "a token (arXiv 2510.13999); random, one draw; first, the first ones by number."
)

LIMITS = (
    "Seconds a step depend on what else the machine does: read them as a rough ratio.",
    "The models are tiny and the tasks are sums and short strings: this shows that method and protocol work, not that "
    "a verdict carries over to a model of 30 billion parameters.",
    "Random choice is one draw of experts; three seeds are scored, too few to call a difference between ways of "
    "choosing experts.",
    "With top-k fixed a kept expert sees experts / kept times as many tokens: only scale-free measures are compared.",
)


def cost_measured(checkpoint: Checkpoint, proxy: Proxy, label: str, live: Sequence[Trace]) -> pd.DataFrame:
    """Return parameters, bytes, seconds a step and process memory of original and proxy.

    Seconds are the lower quartile over the steps of the live healthy run (other processes only ever add to a step),
    memory is its process's largest resident size, libraries included.
    """
    rows = []
    for name, path in (("original", checkpoint.path), (label, proxy.path)):
        opened = Checkpoint.open(path)
        size = cost(opened)
        row: dict[str, object] = {"model": name, "params": size.params, "nbytes": size.nbytes}
        run = next((t for t in live if t.provenance.model == name and t.provenance.healthy), None)
        if run is not None:
            row["seconds_per_step"] = float(np.percentile(run.values("seconds_per_step"), 25))
            row["peak_mb"] = run.provenance.peak_memory_bytes / 1e6
        rows.append(row)
    return pd.DataFrame(rows)


def accuracy_by_method(model: str) -> pd.DataFrame | None:
    """Return the recorded accuracy of each way of choosing experts: mean, and mean -/+ one standard deviation."""
    path = data_dir() / "pruning" / "methods.csv"
    if not path.is_file():
        return None
    table = summary(pd.read_csv(path))
    table = table[(table["model"] == model) & (table["variant"] != "original")]
    spread = pd.Series(table["accuracy_std"]).fillna(0.0)
    return pd.DataFrame(
        {
            "method": table["variant"],
            "n_experts": table["n_keep"],
            "accuracy": table["accuracy"],
            "low": table["accuracy"] - spread,
            "high": table["accuracy"] + spread,
        }
    )


def main_report(
    checkpoint: Checkpoint,
    statistics: ExpertProfile,
    plan: KeepPlan,
    proxy: Proxy,
    traces: Sequence[Trace],
    comparisons: Sequence[Comparison],
    scores: pd.DataFrame,
    seconds: Sequence[tuple[str, float]],
    out: Path,
    *notes: str,
) -> Path:
    """Write the report of the main job, with `notes` at the end of its summary, and return the path of the page."""
    label = str(scores["model"].iloc[1])
    live = [trace for trace in traces if trace.provenance.source == "live"]
    result = ReportInput(
        title="Does the proxy show the same failure?",
        summary=(*_summary(checkpoint, plan, scores, live, traces), *notes, *_faults(comparisons), WAYS),
        checkpoint=checkpoint,
        profile=statistics,
        plan=plan,
        proxy=proxy,
        costs=cost_measured(checkpoint, proxy, label, live),
        accuracy=accuracy_by_method(checkpoint.path.name),
        accuracy_original=float(scores["accuracy"].iloc[0]),
        accuracy_chance=float(scores["chance"].iloc[0]),
        traces=tuple(traces),
        overlay_models=("original", label),
        overlay_signals=OVERLAID,
        comparisons=tuple(comparisons),
        seconds=tuple(seconds),
        limits=LIMITS,
        provenance=provenance(checkpoint=checkpoint.fingerprint, settings=dict(live[0].provenance.config)),
    )
    return write_report(result, out)


def _faults(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    known = [fault(item.fault) for item in comparisons]
    return tuple(f"{item.title} ({item.id}): {item.what} Stands for {item.twin}." for item in known)


def _summary(
    checkpoint: Checkpoint,
    plan: KeepPlan,
    scores: pd.DataFrame,
    live: Sequence[Trace],
    traces: Sequence[Trace],
) -> tuple[str, ...]:
    original, proxy = scores["accuracy"].iloc[0], scores["accuracy"].iloc[1]
    return (
        f"The original has {checkpoint.n_experts} experts in each MoE layer; the proxy keeps {plan.n_keep}, chosen by "
        f"{plan.method}, with backbone, router rows and top-{checkpoint.top_k} unchanged and no training afterwards.",
        f"Greedy accuracy on {scores['n'].iloc[0]} unseen test tasks, measured now: original {original:.3f}, "
        f"proxy {proxy:.3f}, best constant answer {scores['chance'].iloc[0]:.3f}.",
        f"{len(live)} GRPO runs were trained live with seed {live[0].provenance.seed}; {len(traces) - len(live)} "
        "recorded runs give bands, healthy spreads, thresholds and the control proxies.",
    )
