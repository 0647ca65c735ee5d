"""Hold emulated ranks against real ones, the planner's sum against emulations, and measure what emulations cost.

    python benchmarks/emulation.py [real] [replay] [size] [sum] [hottest] [--seed 0] [--cases 12]

real: gloo runs of 2 and 4 processes on this machine, every rank predicted alone from its exact routing: same meter, and
the allocator's own events (the smallest of five steps), without and with gloo's copy in the prediction. replay: a
recorded run of 2 processes, one rank alone; equal losses and weights, and the range of seconds beside the real ones.
size: slices and whole depth of published configs in worlds of thousands, with seconds and memory of the emulating
process. sum: drawn layouts that no coefficient was fitted to. hottest: drawn routings, the rank found against all ranks
emulated, without and with recomputation. All parts if none is named. Times depend on what else the
machine does; bytes do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.scale import (
    GRPOProgram,
    Layout,
    Routing,
    emulate,
    estimate,
    find_hottest,
    fullest_by_sum,
    rank_peaks,
    record,
    recorded_time,
    run_real,
)
from moeproxy.scale.emulation import gib
from moeproxy.scale.hottest import rank_loads

SMALL = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""9.6 million weights."""
PUBLISHED = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "DeepSeek-V3": DEEPSEEK_V3}


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


REAL = (
    (2, 128, 2, 2, 1, False),
    (2, 128, 4, 2, 1, False),
    (2, 128, 4, 4, 1, False),
    (8, 256, 4, 4, 1, False),
    (2, 128, 2, 1, 1, False),
    (2, 128, 4, 1, 1, False),
    (8, 128, 2, 2, 2, True),
)
"""Sequences of a micro-batch, tokens, world, ep, micro-batches, recomputation."""


def real() -> None:
    """Print prediction against measurement for every rank of real runs."""
    say("| batch | world | ep | rank | tensors, bytes | same meter | allocator | with gloo's copy, bytes | allocator |")
    for sequences, tokens, world, ep, batches, again in REAL:
        program = GRPOProgram(SMALL, sequences, tokens // 2, tokens // 2, micro_batches=batches, checkpointing=again)
        batch = f"{sequences} x {tokens}" + (f", {batches} micro-batches, recomputed" if again else "")
        for measured, routing in run_real(program, world, ep, repeats=5):
            found = emulate(program, world, ep, measured.rank, routing if ep > 1 else None)
            whole, least = found.whole_bytes["gloo"] or 0, measured.allocator_bytes[0]
            say(
                f"| {batch} | {world} | {ep} | {measured.rank} | {found.peak_bytes:,} | "
                f"{found.peak_bytes / measured.peak_bytes - 1:+.4%} | {found.peak_bytes / least - 1:+.2%} | "
                f"{whole:,} | {whole / least - 1:+.3%} |"
            )


def replay() -> None:
    """Print whether a recorded rank runs again alone, and the seconds put together beside the real ones."""
    program = GRPOProgram(SMALL, sequences=8, prompt=128, completion=128, learning_rate=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        recording = record(program, 2, 2, Path(folder) / "run", steps=8)
        for rank in range(2):
            alone = emulate(program, 2, 2, rank, level="replay", recording=recording)
            equal = alone.losses == recording.losses[rank] and alone.weights == recording.weights[rank]
            say(f"rank {rank}: bitwise equal {equal}; {recorded_time(recording, alone)!r}")
        say(f"{gib(recording.size())} on disk for {recording.steps} steps")
    fake, executed = (emulate(program, 1024, 16, level=level, repeats=1) for level in ("fake", "exec"))
    say(f"world 1024, ep 16: fake {fake.peak_bytes:,}, exec {executed.peak_bytes:,} bytes")
    say(f"allocator in exec: {executed.allocator_bytes[0]:,} bytes")


QWEN, DEEPSEEK = PUBLISHED
SIZE = (
    (QWEN, 4, 1024, 64, 1.0, False),
    (QWEN, 4, 1024, 64, 4.0, False),
    (QWEN, 4, 128, 1, 1.0, True),
    (QWEN, 4, 1024, 1, 1.0, True),
    (QWEN, 4, 8192, 64, 1.0, False),
    (DEEPSEEK, 4, 1024, 64, 1.0, False),
    (DEEPSEEK, 4, 8192, 64, 1.0, False),
    (QWEN, 48, 1024, 64, 1.0, False),
    (QWEN, 48, 1024, 64, 4.0, False),
    (QWEN, 48, 1024, 64, 1.0, True),
    (QWEN, 48, 8192, 64, 1.0, False),
    (QWEN, 48, 8192, 64, 1.0, True),
    (DEEPSEEK, 61, 1024, 64, 1.0, True),
    (DEEPSEEK, 61, 8192, 64, 1.0, False),
    (DEEPSEEK, 61, 8192, 64, 1.0, True),
)
"""Model, layers, world, ep, load of the rank over the mean, recomputation."""


def size() -> None:
    """Print peak, seconds and memory of emulations of published configs."""
    say("| model | layers | world | ep | load | recompute | peak of the rank | seconds | emulating process |")
    for name, layers, world, ep, load, again in SIZE:
        program = GRPOProgram(PUBLISHED[name], prompt=1024, completion=3072, checkpointing=again).sliced(layers)
        found = emulate(program, world, ep, 0, Routing.skewed(program.n_experts, load, ep=ep))
        say(
            f"| {name} | {layers} | {world:,} | {ep} | {load:g} x | {'yes' if again else 'no'} | "
            f"{gib(found.peak_bytes)} | {found.wall_seconds:.1f} | {gib(found.rss_bytes)} |"
        )


def summed(seed: int, cases: int) -> None:
    """Print the planner's sum against the emulation for drawn layouts."""
    draw, ratios = np.random.default_rng(seed), []
    for _ in range(cases):
        config = PUBLISHED[str(draw.choice(list(PUBLISHED)))]
        world, ep = int(2 ** draw.integers(3, 12)), int(2 ** draw.integers(0, 7))
        tokens, sequences = int(2 ** draw.integers(9, 13)), int(2 ** draw.integers(0, 3))
        prompt, again = tokens // 4, bool(draw.integers(2))
        program = GRPOProgram(config, sequences, prompt, tokens - prompt, checkpointing=again)
        program = program.sliced(int(draw.integers(2, 7)))
        ep, load = min(ep, world), float(draw.choice([1.0, 1.5, 3.0]))
        routing = Routing.skewed(program.n_experts, min(load, ep), ep=ep)
        rows = float(rank_loads(routing, ep, program.n_layers - program.n_dense, program.checkpointing)[0])
        found = emulate(program, world, ep, 0, routing)
        ratio = estimate(program, world, ep, rows).peak_bytes / found.peak_bytes
        ratios.append(ratio)
        layout = f"world {world}, ep {ep}, load {rows:.2f}, recompute {program.checkpointing}"
        say(f"{ratio:.3f} {program!r} {layout}: {gib(found.peak_bytes)} in {found.peak_phase}")
    say(f"sum / emulation: {min(ratios):.3f} to {max(ratios):.3f}, median {np.median(ratios):.3f}, of {cases}")


def hottest(seed: int, cases: int) -> None:
    """Print the rank found beside the peaks of all ranks, for routings drawn with seeds from `seed` on."""
    config = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 64}
    for number, again in itertools.product(range(seed, seed + cases), (False, True)):
        program = GRPOProgram(config, sequences=4, prompt=64, completion=64, checkpointing=again)
        share_LE = np.random.default_rng(number).dirichlet(np.ones(8), size=4).clip(max=0.4)
        routing = Routing("drawn", share_LE + (1 - share_LE.sum(axis=1, keepdims=True)) / 8)
        peaks = [emulate(program, 4, 4, rank, routing).peak_bytes for rank in range(4)]
        found, bounds = find_hottest(program, 4, 4, routing), rank_peaks(program, 4, 4, routing)
        said = fullest_by_sum(routing, Layout(4, 4), n_layers=4, checkpointing=again)
        say(
            f"seed {number}, recompute {again}: found {found.rank} of {peaks}; bounds equal: "
            f"{bounds.tolist() == peaks}; the sum says {said}, {peaks[said] / max(peaks) - 1:+.2%}"
        )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="real, replay, size, sum, hottest; all if none is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=12)
    given = parser.parse_args()
    parts = {"real": real, "replay": replay, "size": size, "sum": lambda: summed(given.seed, given.cases)}
    parts["hottest"] = lambda: hottest(given.seed, given.cases)
    for name in given.parts or parts:
        parts[name]()


if __name__ == "__main__":
    main()
