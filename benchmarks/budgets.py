"""Measure the budgets of the main path as ratios, both sides alternating in one run.

    python benchmarks/budgets.py [--model data/models/qwen3-moe-tiny] [--rounds 5]

Prints one line a budget: what, median ratio or seconds with the smallest and largest, the budget, and whether it holds.
Machines are noisy: read the ratios, not the seconds. No test depends on these numbers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from moeproxy.experts.batches import pad, zeros
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.profile import FOLDS, profile, tokenise
from moeproxy.experts.profile import run as run_profile
from moeproxy.lab import probes
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.proxy.build import build
from moeproxy.proxy.cluster import select


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long `work` takes."""
    started = clock()
    work()
    return clock() - started


def alternating(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[float]:
    """Return the ratio ours / theirs of processor time of each round, after one round that is not counted.

    Processor time, since both compute in one thread and the machine does other things too.
    """
    pairs = [(seconds(ours, time.process_time), seconds(theirs, time.process_time)) for _ in range(rounds + 1)][1:]
    return [a / b for a, b in pairs]


def show(what: str, values: list[float], budget: float, *, least: bool = False, unit: str = "x") -> None:
    """Print one budget."""
    middle = statistics.median(values)
    holds = middle >= budget if least else middle <= budget
    sign = ">=" if least else "<="
    sys.stdout.write(
        f"{what:<44} {middle:6.2f} {unit} ({min(values):.2f}-{max(values):.2f})  budget {sign} {budget:g} {unit}  "
        f"{'holds' if holds else 'MISSED'}\n"
    )
    sys.stdout.flush()


def profiling(model: Path, rounds: int) -> None:
    """Compare the observed calibration pass with the plain forward pass over the same batches."""
    checkpoint = Checkpoint.open(model)
    loaded = load_model(checkpoint).eval()
    texts = tokenise(checkpoint, calibration_texts(0))
    batches = [pad(texts[start : start + 200]) for start in range(0, len(texts), 200)]

    def plain() -> None:
        with torch.inference_mode():
            for ids, mask in batches:
                loaded.model(input_ids=ids, attention_mask=mask, use_cache=False)

    def observed() -> None:
        totals = {layer: zeros(loaded, checkpoint, True, FOLDS) for layer in checkpoint.moe_layers}
        run_profile(loaded, checkpoint, totals, texts, 200)

    show("profile / plain forward pass", alternating(observed, plain, rounds), 1.3)


def writing(rounds: int) -> None:
    """Compare writing a proxy with copying as many bytes (a made-up checkpoint of about 1.2 GB, same disk)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        _large_checkpoint(source)
        checkpoint = Checkpoint.open(source)
        plan = select(profile(checkpoint, ["12+34=46", "Rabc=cba"]), 64, method="first")
        kept = folder / "kept"
        build(checkpoint, plan, kept)

        def write() -> None:
            build(checkpoint, plan, folder / "proxy")

        def copy() -> None:
            shutil.copytree(kept, folder / "copy")
            for file in (folder / "copy").iterdir():
                handle = os.open(file, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)

        speeds = []
        for _ in range(rounds + 1):
            ours, theirs = seconds(write), seconds(copy)
            speeds.append(theirs / ours)
            shutil.rmtree(folder / "proxy")
            shutil.rmtree(folder / "copy")
        show("proxy writing speed / copying speed", speeds[1:], 0.7, least=True)


def _large_checkpoint(path: Path) -> None:
    """Write a random Qwen3-MoE checkpoint: 4 layers x 128 experts, width 512, 0.8 MB a tensor (3 MB in real ones)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from moeproxy.lab.tokens import build_tokenizer, vocabulary_size

    config = Qwen3MoeConfig(
        vocab_size=vocabulary_size(),
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        moe_intermediate_size=384,
        num_experts=128,
        num_experts_per_tok=8,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path, max_shard_size="400MB")
    build_tokenizer().save_pretrained(path)


def clustering() -> None:
    """Time distances and clustering of 61 layers x 256 experts (random statistics)."""
    from moeproxy.experts.statistics import ExpertProfile

    rng = np.random.default_rng(0)
    n_layers, n_experts, width = 61, 256, 512
    load_LE = rng.integers(1, 1000, (n_layers, n_experts))
    cooccur_LEE = rng.integers(0, 50, (n_layers, n_experts, n_experts))
    small = profile(Path(OPTIONS.model), ["12+34=46"])
    made_up: ExpertProfile = replace(
        small,
        moe_layers=tuple(range(n_layers)),
        top_k=8,
        load_LE=load_LE,
        gate_LE=load_LE.astype(float),
        cooccur_LEE=cooccur_LEE + cooccur_LEE.transpose(0, 2, 1),
        context_LED=rng.normal(size=(n_layers, n_experts, width)).astype(np.float32),
        output_norm_LE=np.ones((n_layers, n_experts), np.float32),
        peak_LE=np.ones((n_layers, n_experts), np.float32),
        saliency_LE=load_LE.astype(float),
        router_LED=rng.normal(size=(n_layers, n_experts, width)).astype(np.float32),
        output_LED=np.zeros((n_layers, n_experts, width), np.float32),
        choices_TLK=np.zeros((0, n_layers, 8), np.int16),
        weights_TLK=np.zeros((0, n_layers, 8), np.float16),
        fold_cooccur_FLEE=np.zeros((0, n_layers, n_experts, n_experts), np.int32),
        fold_gate_FLE=np.zeros((0, n_layers, n_experts)),
        fold_context_FLEP=np.zeros((0, n_layers, n_experts, 256), np.float32),
    )
    times = [seconds(lambda: select(made_up, 64)) for _ in range(3)]
    show("cluster 61 layers x 256 experts, 64 kept", times, 2, unit="s")


def probing(model: Path, rounds: int) -> None:
    """Compare the loop with probes and the loop whose probes do nothing."""
    spec = RunSpec(model, settings=GRPOSettings(steps=10))

    def step_seconds() -> float:
        return float(np.median(run(spec).values("seconds_per_step")[2:]))

    def bare() -> float:
        nothing = {"logprob_diff_mean": 0.0, "grad_norm": 0.0}
        with (
            mock.patch.object(probes, "gradient_norms", return_value=nothing),
            mock.patch.object(probes, "mismatch", return_value=nothing),
            mock.patch.object(probes.WeightChange, "measure", return_value=0.0),
            mock.patch.object(probes.RouterLoad, "watch", return_value=None),
        ):
            return step_seconds()

    step_seconds()
    show("step with probes / without", [step_seconds() / bare() for _ in range(rounds)], 1.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/models/qwen3-moe-tiny"))
    parser.add_argument("--rounds", type=int, default=5)
    OPTIONS = parser.parse_args()
    torch.set_num_threads(1)
    profiling(OPTIONS.model, OPTIONS.rounds)
    clustering()
    writing(OPTIONS.rounds)
    probing(OPTIONS.model, OPTIONS.rounds)
