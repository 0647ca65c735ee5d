"""Write the example logs of `data/logs`: recorded runs of the lab in the formats of other programs.

    python -m moeproxy.lab.example_logs [--bench data/bench] [--out data/logs]

Every number is one that a run of the lab logged, but for what the formats add (line prefixes, process ids, progress
bars). The formats are written by this file; none of the programs named wrote these logs.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeproxy.errors import LabError
from moeproxy.files import atomic_file
from moeproxy.traces.pack import load_bench
from moeproxy.traces.trace import Trace

KILLED_AFTER, RESUMED_AT = 35, 11
"""Last step of the first attempt in the console log, and first step of the second."""

_STEPS = 60
_VERL = {
    "policy_loss": "actor/pg_loss",
    "total_loss": "actor/loss",
    "kl": "actor/kl_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "reward_mean": "critic/score/mean",
    "response_length": "response_length/mean",
    "logprob_diff_k1": "rollout_corr/kl",
    "logprob_diff_k3": "rollout_corr/k3_kl",
    "prob_pearson": "training/rollout_actor_probs_pearson_corr",
    "seconds_per_step": "timing_s/step",
}
_TRL = {
    "total_loss": "loss",
    "grad_norm": "grad_norm",
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "zero_variance_groups": "frac_reward_zero_std",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "response_length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "logprob_diff_max": "sampling/sampling_logp_difference/max",
    "aux_loss": "aux_loss",
}
_OWN = {
    "policy_loss": "pg_objective",
    "grad_norm": "gnorm",
    "reward_mean": "avg_reward",
    "entropy": "policy_entropy",
    "kl": "kl_to_ref",
    "response_length": "mean_resp_len",
    "router_load_entropy/0": "moe0_load",
}
_ROW_TAG = "\x1b[36m(TaskRunner pid=4171)\x1b[0m "
_CRASH = f"""\
{_ROW_TAG}Checkpoint tracker file does not exist
Training Progress:   0%|          | 0/58 [?]
Traceback (most recent call last):
  File "train.py", line 61, in <module>
    main()
  File "rewards/format.py", line 18, in score
    return float(answers[index])
IndexError: list index out of range
Training Progress:   0%|          | 0/58 [?]
"""


def write(bench: str | Path, out: str | Path) -> list[Path]:
    """Write all example logs and return their paths.

    Args:
        bench: folder of recorded runs, with those of the original named in `data/logs/README.md`.
        out: folder of the logs; those that are there are replaced.

    Raises:
        LabError: a run is not recorded.
        TraceError: the folder holds no recorded runs.
    """
    overflow, healthy, poisoned, explosion = (
        _run(bench, fault) for fault in ("gradient_overflow", None, "nan_poison", "kl_explosion")
    )
    texts = {
        "verl_console.log": verl_console(overflow, healthy),
        "trainer_state.json": trainer_state(poisoned),
        "own_columns.csv": own_columns(explosion),
        "crashed_before_step_1.log": _CRASH,
    }
    return [_written(Path(out) / name, text) for name, text in texts.items()]


def verl_console(first: Trace, second: Trace) -> str:
    """Return a console log in verl's layout: `first` up to step 35, killed, then `second` from step 11 on."""
    lines = [f"{_ROW_TAG}Using checkpoint: none, training from scratch", *_console(first, 1, KILLED_AFTER)]
    lines += [f"{_ROW_TAG}received SIGTERM", f"{_ROW_TAG}Resuming from global_step_{RESUMED_AT - 1}"]
    return "\n".join([*lines, *_console(second, RESUMED_AT, _STEPS), ""])


def trainer_state(trace: Trace) -> str:
    """Return a trainer_state.json in TRL's layout; as there, a loss that is not finite stands as 0."""
    history = []
    for row in _rows(trace, _TRL):
        if not np.isfinite(row["loss"]):
            row["loss"] = 0.0  # what transformers' logging_nan_inf_filter makes of it
        history.append({"epoch": row["step"] / _STEPS, **row})
    state = {"epoch": 1.0, "global_step": _STEPS, "log_history": history, "logging_steps": 1, "max_steps": _STEPS}
    return json.dumps(state, indent=1) + "\n"


def own_columns(trace: Trace) -> str:
    """Return a CSV file with column names that no framework uses."""
    text = io.StringIO()
    names = ["update", *_OWN.values()]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"update": row.pop("step"), **row} for row in _rows(trace, _OWN))
    return text.getvalue()


def _console(trace: Trace, first: int, last: int) -> Iterator[str]:
    for row in _rows(trace, _VERL):
        step = row.pop("step")
        if first <= step <= last:
            cells = [f"{key}:{_printed(key, value)}" for key, value in row.items()]
            yield f"{_ROW_TAG}{' - '.join([f'step:{step}', *cells])}"
            share = step / _STEPS
            yield f"Training Progress: {share:4.0%}|{'#' * round(10 * share):<10}| {step}/{_STEPS} [?]"


def _printed(key: str, value: float) -> str:
    return f"np.float64({value!r})" if key.startswith("critic/") else repr(value)


def _rows(trace: Trace, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield one row a step: step and the signals that were logged, by their names in the format."""
    columns = {key: (trace.values(name), trace.missing(name)) for name, key in names.items() if name in trace.signals}
    for place, step in enumerate(trace.steps.index):
        cells = {key: float(values[place]) for key, (values, missing) in columns.items() if not missing[place]}
        yield {"step": int(step), **cells}


def _run(bench: str | Path, fault: str | None) -> Trace:
    """Return the original's run of seed 0 with a fault at strength 1, or its healthy twin."""
    found = load_bench(bench, models=["original"], faults=[fault], trajectories=False)
    for trace in found:
        run = trace.provenance
        if run.seed == 0 and (fault is None or run.strength == 1):
            return trace
    raise LabError(f"no run of the original with {fault or 'no fault'} and seed 0", where=bench)


def _written(path: Path, text: str) -> Path:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def main() -> None:
    """Write them from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=Path("data/bench"))
    parser.add_argument("--out", type=Path, default=Path("data/logs"))
    options = parser.parse_args()
    write(options.bench, options.out)


if __name__ == "__main__":
    main()
