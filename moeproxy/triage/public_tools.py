"""What public tools for the logs of RL runs say of the runs of the benchmark: rl-doctor, rlprobe, rlwatch.

They are no dependencies; an environment of their own serves:

    python -m venv out/tools
    out/tools/bin/pip install rldoctor==0.2.0 rlprobe==0.1.0 rlwatch==0.5.1 pandas pyarrow scipy
    PYTHONPATH=. out/tools/bin/python -m moeproxy.triage.public_tools     # a minute; writes data/triage/tools.json
    python -m moeproxy.triage.evaluate --page                            # puts it into data/triage/TRIAGE.md

Each tool gets every quantity that the lab logs and the tool has a name for, NaN and infinities as they are, and judges
by its defaults. None of them knows a signal of routers or of the difference between the engines.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import ComparisonError, MoeproxyError
from moeproxy.files import atomic_file
from moeproxy.traces.pack import load_bench
from moeproxy.traces.trace import Trace
from moeproxy.triage.detection_scores import detection_scores
from moeproxy.triage.jsonable import plain

METHODS = ("original", "cluster")
"""As in `moeproxy.triage.learn`: the original and proxies by clustering."""

FILE = "tools.json"
REFERENCE_FROM = 100
"""Seeds from which on healthy runs serve as references, as in `moeproxy.triage.learn`."""

TRL = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "zero_variance_groups": "frac_reward_zero_std",
    "response_length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "total_loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "grad_norm": "grad_norm",
    "seconds_per_step": "step_time",
}
"""Names by which TRL's GRPOTrainer logs what the lab measures."""

RLPROBE = {
    "reward_mean": "reward_mean",
    "reward_std": "group_reward_std_mean",
    "zero_variance_groups": "zero_variance_group_frac",
    "response_length": "completion_len_mean",
    "truncated": "truncation_rate",
    "total_loss": "loss",
    "kl": "kl_mean",
    "entropy": "entropy_mean",
    "grad_norm": "grad_norm",
    "seconds_per_step": "step_time_s",
}
"""Fields of an rlprobe `StepRecord` that the lab measures as they are."""


@dataclass(frozen=True)
class Seen:
    """What a tool said of a run: whether it alarms, and from which step on; NaN when it names none."""

    alarm: bool
    onset: float = math.nan


@dataclass(frozen=True)
class Tool:
    """One way to use a tool.

    Args:
        name: for readers.
        package: that must be installed.
        paired: whether it is given a healthy run of the same model beside the run.
        judge: returns what it says of a run, given the healthy run or None.
    """

    name: str
    package: str
    paired: bool
    judge: Callable[[Trace, Trace | None], Seen]


def trl_rows(trace: Trace) -> list[dict[str, float]]:
    """Return the run as TRL would have logged it, a dict a step; what was not measured is left out."""
    named = {theirs: trace.values(ours) for ours, theirs in TRL.items() if ours in trace.signals}
    if {"clip_ratio/low_mean", "clip_ratio/high_mean"} <= named.keys():
        named["clip_ratio/region_mean"] = named["clip_ratio/low_mean"] + named["clip_ratio/high_mean"]
    steps = trace.steps.index.tolist()
    rate = trace.provenance.config.get("learning_rate")
    given = {"learning_rate": float(rate)} if rate is not None else {}
    rows = [{name: float(values[place]) for name, values in named.items()} for place in range(len(steps))]
    return [{"step": step, **given, **row} for step, row in zip(steps, rows, strict=True)]


def probe_rows(trace: Trace) -> list[dict[str, float]]:
    """Return the run as rlprobe records it, a dict a step: scalars, and what the single responses tell.

    As its recorder does, values that are not finite are counted (`nan_count`, `inf_count`) and left out.
    """
    fields = {theirs: trace.values(ours) for ours, theirs in RLPROBE.items() if ours in trace.signals}
    for name in ("clip_fraction_low", "clip_fraction_high"):
        if name in trace.signals:
            fields["clip_fraction"] = fields.get("clip_fraction", 0.0) + trace.values(name)
    fields |= _of_responses(trace)
    rows = []
    for place, step in enumerate(trace.steps.index.tolist()):
        values = {name: float(column[place]) for name, column in fields.items()}
        nan, inf = (sum(test(value) for value in values.values()) for test in (math.isnan, math.isinf))
        kept = {name: value for name, value in values.items() if math.isfinite(value)}
        rows.append({"step": step, **kept, "nan_count": nan, "inf_count": inf})
    return rows


def _of_responses(trace: Trace) -> dict[str, np.ndarray]:
    if trace.trajectories is None:
        return {}
    groups = trace.trajectories.groupby("step")
    columns = {
        "adv_mean": groups["advantage"].mean(),
        "adv_std": groups["advantage"].std(ddof=0),
        "adv_zero_frac": groups["advantage"].agg(lambda values: float((values == 0).mean())),
        "reward_min": groups["reward"].min(),
        "reward_max": groups["reward"].max(),
        "completion_len_max": groups["length"].max(),
        "completion_len_p95": groups["length"].quantile(0.95),
        "repetition_rate": groups["repetition_ratio"].mean(),
    }
    return {name: column.reindex(trace.steps.index).to_numpy(float) for name, column in columns.items()}


def rl_doctor(trace: Trace, _healthy: Trace | None = None) -> Seen:
    """Return rl-doctor's verdict: an alarm is a finding that it calls a warning or worse; it names no step."""
    tool: Any = import_module("rl_doctor")
    config = trace.provenance.config
    facts = {"algorithm": "grpo", "num_generations": config.get("samples"), "beta": config.get("beta")}
    facts |= {"max_completion_length": config.get("max_new_tokens"), "learning_rate": config.get("learning_rate")}
    run = tool.run_from_records(trl_rows(trace), config=facts)
    return Seen(bool(tool.diagnose(run).worst >= tool.Severity.WARNING))


def rlprobe(trace: Trace, _healthy: Trace | None = None) -> Seen:
    """Return rlprobe's verdict: an alarm is a finding that it calls a warning or critical."""
    tool: Any = import_module("rlprobe.doctor")
    findings = [one for one in tool.diagnose_view(_view(trace)) if one.severity in ("warn", "critical")]
    steps = [one.first_step for one in findings if one.first_step is not None]
    return Seen(bool(findings), float(min(steps)) if steps else math.nan)


def rlprobe_diff(trace: Trace, healthy: Trace | None) -> Seen:
    """Return where rlprobe's comparison of two runs sees the run leave a healthy one.

    The tool compares recordings in folders; here its own measure is applied to the runs in memory.
    """
    if healthy is None:
        raise ComparisonError("rlprobe diff without a healthy run", expected="two runs")
    tool: Any = import_module("rlprobe.doctor.diff")
    ours, theirs = _view(trace), _view(healthy)
    common, mine, other = np.intersect1d(ours.step_ids, theirs.step_ids, return_indices=True)
    found = [
        tool._diverge(name, a[mine], b[other], common, z_thresh=4.0, sustain=5)
        for name, a, b in tool._metric_series(ours, theirs)
        if name != "step_time_s"  # clock time tells how busy the machine was
    ]
    steps = [one.divergence_step for one in found if one is not None and one.divergence_step is not None]
    return Seen(bool(steps), float(min(steps)) if steps else math.nan)


def rlwatch(trace: Trace, _healthy: Trace | None = None) -> Seen:
    """Return rlwatch's verdict, step by step as its TRL callback is fed: an alarm is any alert."""
    config: Any = import_module("rlwatch.config")
    detectors: Any = import_module("rlwatch.detectors")
    suite = detectors.DetectorSuite(config.RLWatchConfig())
    names = {"entropy": "entropy", "kl": "kl_divergence", "reward": "reward_mean", "reward_std": "reward_std"}
    names |= {"loss": "loss", "grad_norm": "grad_norm"}
    for row in trl_rows(trace):
        given = {theirs: row[ours] for ours, theirs in names.items() if ours in row}
        if suite.check_step(int(row["step"]), **given):
            return Seen(True, float(row["step"]))
    return Seen(False)


def _view(trace: Trace) -> Any:
    schemas: Any = import_module("rlprobe.schemas")
    view: Any = import_module("rlprobe.doctor.runview")
    manifest = schemas.RunManifest(run_id=str(trace.provenance), created_at="", algorithm="grpo")
    return view.RunView(manifest, [schemas.StepRecord(**row) for row in probe_rows(trace)])


TOOLS = (
    Tool("rl-doctor", "rldoctor", False, rl_doctor),
    Tool("rlprobe", "rlprobe", False, rlprobe),
    Tool("rlprobe diff", "rlprobe", True, rlprobe_diff),
    Tool("rlwatch", "rlwatch", False, rlwatch),
)


def judgements(tool: Tool, traces: Sequence[Trace]) -> pd.DataFrame:
    """Return one row a run with what the tool says of it.

    A tool that compares gets the first healthy reference of the model and settings, another one for that run itself;
    healthy runs at other settings than the reference's do not count for it.
    """
    rows = []
    for model in dict.fromkeys(trace.provenance.model for trace in traces):
        own = [trace for trace in traces if trace.provenance.model == model]
        good = [trace for trace in own if trace.provenance.healthy and trace.provenance.seed >= REFERENCE_FROM]
        settings = good[0].provenance.config if good else {}
        for trace in own:
            beside = next((one for one in good if one is not trace), None) if tool.paired else None
            usual = not tool.paired or trace.provenance.config == settings
            rows.append(_row(trace, tool.judge(trace, beside), usual))
    return pd.DataFrame(rows)


def _row(trace: Trace, seen: Seen, usual: bool) -> dict[str, Any]:
    run = trace.provenance
    return {
        "model": run.model,
        "fault": run.fault or "",
        "level": "" if run.fault is None else "clear" if run.strength == 1 else "subtle",
        "onset": run.onset if run.onset is not None else math.nan,
        "n_steps": len(trace.steps),
        "usual": usual,
        "alarm": seen.alarm,
        "found_onset": seen.onset,
    }


def scored(tools: Sequence[Tool], traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return the scores of every tool at each level."""
    rows = []
    for tool in tools:
        table = judgements(tool, traces)
        mode = "beside one healthy run" if tool.paired else "alone"
        about = {"mode": mode, "method": f"{tool.name} {version(tool.package)}", "model": "all"}
        known = set(table["level"])
        levels = [level for level in ("clear", "subtle") if level in known]
        rows += [{**about, "level": level, **detection_scores(table, level)} for level in levels]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: judge the runs of a benchmark by every tool."""
    parser = argparse.ArgumentParser(description="Score public tools on recorded runs.")
    parser.add_argument("--bench", type=Path, default=Path("data/bench"))
    parser.add_argument("--out", type=Path, default=Path("data/triage"))
    options = parser.parse_args(arguments)
    try:
        traces = [trace for trace in load_bench(options.bench) if trace.provenance.method in METHODS]
        rows: Mapping[str, Any] = {"runs": len(traces), "detection": scored(TOOLS, traces)}
        with atomic_file(options.out / FILE) as temporary:
            temporary.write_text(json.dumps(plain(rows), indent=1) + "\n", encoding="utf-8")
    except (MoeproxyError, ImportError) as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    sys.stdout.write(f"{options.out / FILE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
