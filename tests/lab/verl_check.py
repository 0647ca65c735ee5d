"""Check that verl accepts what `moeproxy.lab.handover` writes, and that its log means what `log_keys.json` says.

    python3 -m venv verl && verl/bin/pip install verl==0.9.1 TransferQueue torch     # a CPU build of torch is enough
    python -m tests.lab.verl_check --verl-python verl/bin/python [--write]

Not part of `make test`, since verl needs an environment of its own (it pins an older transformers). It needs no GPU and
trains nothing. Configs for an original and a proxy, with every switch both ways, go through verl's own entry point with
the arguments of run.sh: hydra composes them over verl's defaults, `validate_config` judges them, and verl is stopped
where it would start Ray. Then its config classes and its trainer are built from each, every written key is looked up in
the defaults and its value in the result, and verl itself computes the metrics of one made-up step, which must
equal what the lab's probes say. `--write` renews `verl_keys.json`, the facts that `make test` compares with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
KEYS = Path(__file__).parent / "verl_keys.json"
TOLERANCE = 1e-5
BETA = 0.02
EXPERTS, CHOSEN, LAYERS = 32, 4, 2
N_FILES = 24


def main() -> int:
    """Write configs here, have verl judge them, compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl-python", required=True, help="interpreter of the environment with verl")
    parser.add_argument("--write", action="store_true", help=f"renew {KEYS.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = dict(write_configs(folder))
        batch = made_up_step()
        np.savez(folder / "batch.npz", **batch)
        # By its path: verl's wheel installs a package `tests` of its own.
        command = [options.verl_python, str(Path(__file__).with_name("verl_worker.py")), str(folder)]
        environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        results = json.loads((folder / "results.json").read_text("utf-8"))
        wrong = list(_faults(jobs, batch, results))
    for line in (*_report(results), *wrong):
        sys.stdout.write(f"{line}\n")
    if options.write and not wrong:
        KEYS.write_text(json.dumps(_facts(jobs, results), indent=1) + "\n", "utf-8")
    return int(bool(wrong))


def write_configs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Write the configs of an original and a proxy with every switch both ways; yield name -> job."""
    from moeproxy.lab.handover import read_job, write_pair
    from moeproxy.lab.settings import GRPOSettings
    from moeproxy.lab.verl_job import VerlJob

    models = [ROOT / "data" / "models" / "qwen3-moe-tiny", _proxy(folder)]
    data, reward = write_data(folder / "train.parquet"), folder / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    settings = GRPOSettings(prompts=16, samples=4, beta=BETA, max_new_tokens=32, rollout_dtype="bfloat16")
    base = VerlJob(models[0], (data,), settings=settings, max_prompt_tokens=64, gpus_per_node=1, tensor_parallel=1)
    variants = {
        "rollout": base,
        "trainer": replace(base, old_log_probs="trainer", seed=3),
        "no-kl": replace(base, settings=replace(settings, beta=0.0), offload=False, router_load=False, reward=reward),
    }
    for variant, job in variants.items():
        for path in write_pair(job, models, folder / "configs" / variant):
            yield f"{variant}/{path.name}", read_job(path)
    # A device of this size makes even the tiny model need several: two nodes of eight, and half a node.
    for path in write_pair(base, models, folder / "configs" / "nodes", device_gib=0.0026, tensor_parallel=4):
        yield f"nodes/{path.name}", read_job(path)


def _proxy(folder: Path) -> Path:
    from moeproxy.experts.checkpoint import Checkpoint
    from moeproxy.proxy.build import build
    from tests.proxy.made_up import plan_for

    original = Checkpoint.open(ROOT / "data" / "models" / "qwen3-moe-tiny")
    return build(original, plan_for(original, 8), folder / "proxy-8").path


def write_data(path: Path) -> Path:
    """Write a small Parquet file in verl's layout."""
    import pandas as pd

    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "data_source": "made-up",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(N_FILES)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


def made_up_step(seed: int = 0) -> dict[str, np.ndarray]:
    """Return one step of 8 responses of unequal length: log-probs of both engines, rewards, choices of experts."""
    draw = np.random.default_rng(seed)
    n, longest = 8, 7
    lengths = draw.integers(2, longest + 1, n)
    lengths[0] = longest
    rollout = -draw.exponential(1.0, (n, longest))
    step = {
        "lengths": lengths,
        "mask": (np.arange(longest) < lengths[:, None]).astype(np.int64),
        "tokens": draw.integers(3, 30, (n, longest)),
        "rollout": rollout,
        "trained": rollout + draw.normal(0, 0.15, (n, longest)),
        "reference": rollout + draw.normal(0, 0.3, (n, longest)),
        "entropy": draw.exponential(1.0, (n, longest)),
        "advantages": np.repeat(draw.normal(0, 1, (n, 1)), longest, axis=1),
        "rewards": draw.integers(0, 2, n).astype(float),
    }
    choices = draw.integers(0, 8, (n, longest + 2, LAYERS, CHOSEN))  # a proxy of 8 experts has these too
    return {name: _narrow(value) for name, value in step.items()} | {"choices": choices}


def _narrow(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32) if value.dtype == np.float64 else value


def expected(batch: dict[str, np.ndarray], n_experts: int, *, bypass: bool, beta: float) -> dict[str, float]:
    """Return the canonical signals of the made-up step, from the lab's probes and the formulas of GRPO."""
    from moeproxy.lab import probes

    t = {name: torch.from_numpy(value) for name, value in batch.items()}
    keep = t["mask"].bool()
    old = t["rollout"] if bypass else t["trained"]
    ratio = (t["trained"] - old).exp()
    gain = torch.minimum(t["advantages"] * ratio, t["advantages"] * ratio.clamp(0.8, 1.2))
    away = t["reference"] - t["trained"]
    policy, kl = -gain[keep].mean().item(), (away.exp() - away - 1)[keep].mean().item()
    return {
        "policy_loss": policy,
        "kl": kl,
        "total_loss": policy + beta * kl,
        "grad_norm": 0.5,
        "entropy": t["entropy"][keep].mean().item(),
        "response_length": t["lengths"].float().mean().item(),
        "seconds_per_step": 2.5,
        "reward_mean": probes.group_signals(batch["rewards"].tolist(), 4)["reward_mean"],
        **probes.mismatch(t["trained"], t["rollout"], t["mask"]),
        **probes.mismatch_details(t["trained"], t["rollout"], t["mask"]),
        **_load(batch, n_experts),
    }


def _load(batch: dict[str, np.ndarray], n_experts: int) -> dict[str, float]:
    """The lab's load signals over the response tokens whose routing exists: all but each response's last."""
    from moeproxy.lab import probes

    counter = probes.RouterLoad(torch.nn.Module())
    read = np.arange(batch["mask"].shape[1]) < batch["lengths"][:, None] - 1
    chosen = batch["choices"][:, -read.shape[1] :][read]
    for layer in range(LAYERS):
        counter._load[layer] = torch.bincount(torch.from_numpy(chosen[:, layer].flatten()), minlength=n_experts)
    return counter.signals()


def _faults(jobs: dict[str, Any], batch: dict[str, np.ndarray], results: dict[str, Any]) -> Iterator[str]:
    for name, job in jobs.items():
        found = results["configs"][name]
        if "refused" in found:
            yield f"WRONG {name}: refused, {found['refused']}"
            continue
        for problem in ("unknown", "lost"):
            if found[problem]:
                yield f"WRONG {name}: {problem} keys {found[problem]}"
        yield from _differences(name, job, batch, results["metrics"][name])
    for name, refusal in results["bad"].items():
        if not refusal:
            yield f"WRONG verl accepted a config that it should not: {name}"


def _differences(name: str, job: Any, batch: dict[str, np.ndarray], logged: dict[str, float]) -> Iterator[str]:
    from moeproxy.experts.checkpoint import Checkpoint
    from moeproxy.lab.verl_log import verl_signals

    bypass = job.old_log_probs == "rollout"
    n_experts = Checkpoint.open(job.model).n_experts
    right = expected(batch, n_experts, bypass=bypass, beta=job.settings.beta)
    for signal, (key, _) in verl_signals(job).items():
        layers = range(LAYERS) if "{layer}" in key else [None]
        for layer in layers:
            column = signal if layer is None else f"{signal}/{layer}"
            value = logged.get(key.format(layer=layer), float("nan"))
            if not abs(value - right[column]) <= TOLERANCE * max(1.0, abs(right[column])):
                yield f"WRONG {name}: {key} is {value}, but {column} is {right[column]}"


def _report(results: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    for name, found in results["configs"].items():
        built = ", ".join(found.get("built", []))
        yield f"{name:<28} {len(found.get('keys', []))} keys, {len(results['metrics'].get(name, {}))} metrics; {built}"
    for name, refusal in results["bad"].items():
        yield f"refused as it should be: {name:<20} {refusal[:100]}"


def _facts(jobs: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The names that `make test` relies on: config keys that verl knows, metrics that its functions returned."""
    from moeproxy.lab.verl_log import verl_signals

    keys = {key for found in results["configs"].values() for key in found["keys"]}
    metrics = {key for job in jobs.values() for key, _ in verl_signals(job).values()}
    return {"verl": results["versions"]["verl"], "config": sorted(keys), "metrics": sorted(metrics)}


if __name__ == "__main__":
    raise SystemExit(main())
