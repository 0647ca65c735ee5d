"""Profile and prune a checkpoint of real shape in 2 GiB of memory, beside the usual way without a limit.

    python benchmarks/scale.py [--layers 8] [--texts 16] [--keep-experts 64] [--limit 2] [--rounds 1]
        [--folder DIR] [--keep]

Writes a made-up Qwen3-MoE checkpoint (128 experts, width 2048, 1.25 GB a layer in bfloat16), then, in turn:
ours, `moeproxy.profile` and `build` in processes under an enforced memory limit; the usual way, the same texts through
a model loaded with transformers, experts cut in memory by use, `save_pretrained`, without a limit.
Then the writer's peak for two sizes of checkpoint, and the streamed pass against loading and a plain forward pass.
Prints times, peaks and ratios. Needs about 2.5 times the checkpoint's size on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from limited import Usage, run_limited  # noqa: E402 - found by the line above

GIB, MIB = 1 << 30, 1 << 20


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def texts(number: int) -> list[str]:
    """Arithmetic of about 32 characters (tokens) a text."""
    lines = (" ".join(f"{(7 * n + k) % 90 + 10}+{(13 * n + k) % 90 + 10}=" for k in range(6)) for n in range(number))
    return [line[:32] for line in lines]


# Workers: each runs in a process of its own and prints a JSON object.


def worker_profile(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate; whether to stream is left to moeproxy."""
    import moeproxy

    stream = {"auto": None, "yes": True}[options.stream]
    result = moeproxy.profile(
        options.source, texts(options.texts), batch_size=8, dtype="auto", stream=stream, scratch=options.folder
    )
    result.save(options.folder / "profile.npz")
    return {"streamed": result.provenance["stream"], "tokens": result.n_tokens}


def worker_prune(options: argparse.Namespace) -> dict[str, Any]:
    """Choose and write a proxy from the saved profile."""
    import moeproxy
    from moeproxy.experts.statistics import ExpertProfile

    checkpoint = moeproxy.Checkpoint.open(options.source)
    plan = moeproxy.select(ExpertProfile.load(options.folder / "profile.npz"), options.keep_experts)
    before = _anonymous()
    proxy = moeproxy.build(checkpoint, plan, options.out)
    return {"bytes": proxy.nbytes, "before": before, "largest": max(t.nbytes for t in checkpoint.tensors.values())}


def worker_usual(options: argparse.Namespace) -> dict[str, Any]:
    """Load everything, count the routed tokens in a forward pass, cut the experts in memory, save."""
    started = time.perf_counter()
    model, batches = _loaded(options)
    loaded = time.perf_counter()
    counts = _forward(model, batches)
    passed = time.perf_counter()
    _cut(model, counts, options.keep_experts)
    model.save_pretrained(options.out, max_shard_size="4GB")
    saved = time.perf_counter()
    return {"load": loaded - started, "forward": passed - loaded, "cut and save": saved - passed}


def worker_plain(options: argparse.Namespace) -> dict[str, Any]:
    """Load everything and run a plain forward pass."""
    started = time.perf_counter()
    model, batches = _loaded(options)
    loaded = time.perf_counter()
    _forward(model, batches, count=False)
    return {"load": loaded - started, "forward": time.perf_counter() - loaded}


def _loaded(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind = {"dtype": torch.bfloat16, "experts_implementation": "grouped_mm"}
    model: Any = AutoModelForCausalLM.from_pretrained(options.source, local_files_only=True, **kind).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.source, local_files_only=True)
    lines = texts(options.texts)
    # All texts are equally long: nothing to pad.
    pieces = [tokenizer(lines[n : n + 8], return_tensors="pt")["input_ids"] for n in range(0, len(lines), 8)]
    return model, pieces


def _forward(model: Any, batches: list[Any], count: bool = True) -> list[Any]:
    import torch

    counts = [torch.zeros(layer.mlp.experts.num_experts) for layer in model.model.layers]

    def counting(total: Any) -> Any:
        def hook(module: Any, args: Any) -> None:  # what a hook returns would become the arguments
            total.add_(torch.bincount(args[1].flatten(), minlength=len(total)))

        return hook

    layers = zip(model.model.layers, counts, strict=True) if count else ()
    hooks = [layer.mlp.experts.register_forward_pre_hook(counting(total)) for layer, total in layers]
    with torch.inference_mode():
        for ids in batches:
            model.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return counts


def _cut(model: Any, counts: list[Any], n_keep: int) -> None:
    import torch

    for layer, count in zip(model.model.layers, counts, strict=True):
        keep = count.topk(n_keep).indices.sort().values
        for module, name in (
            (layer.mlp.gate, "weight"),
            (layer.mlp.experts, "gate_up_proj"),
            (layer.mlp.experts, "down_proj"),
        ):
            setattr(module, name, torch.nn.Parameter(getattr(module, name).data[keep].clone(), requires_grad=False))
        layer.mlp.experts.num_experts = n_keep
    model.config.num_experts = n_keep


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# The comparison.


class Bench:
    """The measurements of one run of this program."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.limit = int(options.limit * GIB)

    def call(self, worker: str, source: Path, limit: int | None, **more: str) -> tuple[Usage, dict[str, Any]]:
        """Run a worker in a process and return what it took and said."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        chosen = {"worker": worker, "source": source, "folder": self.folder, "out": out, **more}
        chosen |= {"texts": self.options.texts, "keep-experts": self.options.keep_experts}
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in chosen.items())]
        usage, how = run_limited(command, limit)
        if usage.code:
            raise SystemExit(f"{worker} failed with code {usage.code} ({how}){usage.output}")
        facts = json.loads(usage.output.splitlines()[-1])
        shown = ", ".join(
            f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()
        )
        peaks = f"anonymous {usage.anonymous / MIB:7,.0f} MiB, resident {usage.resident / MIB:7,.0f} MiB"
        say(f"  {worker:<8} {usage.seconds:7.1f} s   peak {peaks}   {how}; {shown}")
        return usage, facts

    def both_ways(self, source: Path) -> None:
        """Ours and the usual way in turn; ratios of time and peak memory."""
        pairs = []
        for _ in range(self.options.rounds):
            ours = [self.call("profile", source, self.limit)[0], self.written(source)]
            usual, _ = self.call("usual", source, None)
            peak = max(use.anonymous for use in ours)
            pairs.append((sum(use.seconds for use in ours) / usual.seconds, peak / usual.anonymous))
        times, peaks = (_spread([pair[n] for pair in pairs]) for n in (0, 1))
        say(f"ours / usual: time {times}, peak anonymous memory {peaks}")

    def written(self, source: Path) -> Usage:
        """Prune, and compare the writer's peak, above what the process held before, with its budget."""
        use, facts = self.call("prune", source, self.limit)
        grown, most = use.anonymous - facts["before"], facts["largest"] + 300 * MIB
        verdict = "holds" if grown <= most else "MISSED"
        say(f"  writing {source.name}: {grown / MIB:,.0f} MiB more, budget {most / MIB:,.0f} MiB: {verdict}")
        return use

    def streamed_against_plain(self, source: Path) -> None:
        """The streamed pass against loading and a plain forward pass, when the model fits."""
        ratios = []
        for _ in range(self.options.rounds):
            streamed, _ = self.call("profile", source, None, stream="yes")
            plain, _ = self.call("plain", source, None)
            ratios.append(streamed.seconds / plain.seconds)
        verdict = "holds" if statistics.median(ratios) <= 1.3 else "MISSED"
        say(f"streamed profile / load and plain forward: {_spread(ratios)}, budget 1.3: {verdict}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main(options: argparse.Namespace) -> None:
    """Make the checkpoints and compare."""
    from synthetic import write_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="moeproxy-scale-", dir=options.folder))
    try:
        bench = Bench(options, folder)
        started = time.perf_counter()
        large = write_checkpoint(folder / "large", options.layers)
        small = write_checkpoint(folder / "small", 2, seed=1)
        size = sum(file.stat().st_size for file in large.iterdir())
        say(
            f"checkpoint of {size / 1e9:.2f} GB ({options.layers} layers) made in {time.perf_counter() - started:.0f} s"
        )
        bench.both_ways(large)
        bench.call("profile", small, bench.limit)
        bench.written(small)
        bench.streamed_against_plain(small)
    finally:
        if options.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--keep-experts", type=int, default=64)
    parser.add_argument("--limit", type=float, default=2.0, help="GiB")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints on the disk")
    parser.add_argument("--worker", choices=("profile", "prune", "usual", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stream", choices=("auto", "yes"), default="auto", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        say(json.dumps(globals()[f"worker_{given.worker}"](given)))
    else:
        main(given)
