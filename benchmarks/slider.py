"""Measure how long a slider move takes to reach the figure, on a made-up profile of 48 layers x 128 experts.

    python benchmarks/slider.py [--layers 48] [--experts 128] [--moves 15]

From the change of the control's value to the last message of the figure's update, without the wait that lets a
burst of moves settle; then the sentence and the tables. Prints median, smallest and largest in milliseconds for
each control of the two panels, against the budget of 150 ms. Machines are noisy, and no test depends on these
numbers. On a busy machine the processor's time says more than the clock's.
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from jupyter_client.session import json_packer

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.view.apps.experts import ExpertPanel
from moeproxy.view.apps.proxy import ProxyPanel
from moeproxy.view.apps.ui import LiveFigure
from tests.proxy.made_up import planted

BUDGET_MS = 150.0
TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "models" / "qwen3-moe-tiny"
TOKENS, TOP_K, FAR = 20_000, 8, 1e6


def made_up_profile(n_layers: int, n_experts: int) -> ExpertProfile:
    """Return a profile of planted, noisy clusters with a router width of 512 and the choices of 20,000 tokens."""
    rng = np.random.default_rng(0)
    profile, _ = planted(n_experts // 4, 4, n_layers=n_layers, noise=0.8)
    shape = (n_layers, n_experts, 512)
    wide = {f"{name}_LED": rng.standard_normal(shape, dtype=np.float32) for name in ("router", "context", "output")}
    choices_TLK = rng.integers(0, n_experts, (TOKENS, n_layers, TOP_K)).astype(np.int16)
    return replace(
        profile,
        **wide,
        moe_layers=tuple(range(n_layers)),
        top_k=TOP_K,
        n_tokens=TOKENS,
        choices_TLK=choices_TLK,
        tokens_T=rng.integers(0, 30_000, TOKENS).astype(np.int32),
    )


def sparse_checkpoint(folder: Path, n_layers: int, n_experts: int) -> Checkpoint:
    """Return a Qwen3-MoE checkpoint of that many layers and experts whose weights are holes in a file."""
    config = {"model_type": "qwen3_moe", "num_experts": n_experts, "num_experts_per_tok": TOP_K}
    config |= {"num_hidden_layers": n_layers, "hidden_size": 64, "moe_intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for layer in range(n_layers):
        block = f"model.layers.{layer}.mlp"
        shapes = {f"{block}.gate.weight": [n_experts, 64]}
        for expert in range(n_experts):
            shapes |= {f"{block}.experts.{expert}.{name}_proj.weight": [32, 64] for name in ("gate", "up")}
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = [64, 32]
        for name, shape in shapes.items():
            start, end = end, end + 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return Checkpoint.open(folder)


class Clock:
    """Packs a figure's messages as a kernel does, and notes when the last one is packed."""

    def __init__(self, figure: LiveFigure) -> None:
        self.sent_s, self.sent_cpu_s = 0.0, 0.0
        figure.widget.comm.publish_msg = lambda *_, **message: json_packer(message["data"])  # no kernel listens here
        renew = figure._renew

        def noted() -> None:
            renew()
            self.sent_s, self.sent_cpu_s = time.perf_counter(), time.process_time()

        figure._renew = noted


Move = Callable[[], None]


def measure(panel: ExpertPanel | ProxyPanel, moves: Iterator[Move], count: int) -> list[tuple[float, float, float]]:
    """Return milliseconds to the figure, of the processor to the figure, and to all, for each of `count` moves."""
    clock, taken = Clock(panel.figure), []
    panel._redraw._wait_s = FAR  # the timer never fires: the benchmark draws at once instead
    for _ in range(count):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        next(moves)()
        panel._draw()
        spent = clock.sent_s - start_s, clock.sent_cpu_s - start_cpu_s, time.perf_counter() - start_s
        taken.append((1000 * spent[0], 1000 * spent[1], 1000 * spent[2]))
    return taken


def report(name: str, taken: list[tuple[float, float, float]]) -> bool:
    """Print one line; return whether the budget holds."""
    figure, processor, whole = zip(*taken[1:], strict=True)  # the first move fills caches
    middle = statistics.median(figure)
    spread = f"{middle:4.0f} ms ({min(figure):.0f} to {max(figure):.0f})"
    verdict = "holds" if middle < BUDGET_MS else "TOO SLOW"
    rest = f"processor {statistics.median(processor):4.0f} ms, with tables {statistics.median(whole):4.0f} ms"
    sys.stdout.write(f"{name:40} figure {spread:24} {rest}  {verdict}\n")
    return middle < BUDGET_MS


def toggled(set_to: Callable[[int], None], values: list[int]) -> Iterator[Move]:
    """Yield moves of one control through `values`, again and again."""
    while True:
        for value in values:
            yield lambda value=value: set_to(value)


def weighed(panel: ExpertPanel) -> Iterator[Move]:
    """Yield moves to weights that were not shown before, whose layout is not remembered."""
    for first in range(1, 11):
        for second in (7, 3):
            panel.weight_sliders[1].value = second
            yield lambda first=first: setattr(panel.weight_sliders[0], "value", first)
            panel.weight_sliders[0].value = 0


def main() -> None:
    """Measure both panels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--moves", type=int, default=15)
    options = parser.parse_args()
    held = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = sparse_checkpoint(Path(folder), options.layers, options.experts)
        for file in TOKENIZER.glob("tokenizer*"):
            shutil.copy(file, checkpoint.path)
        made = made_up_profile(options.layers, options.experts)
        profile = replace(made, checkpoint_fingerprint=checkpoint.fingerprint)
        half = options.experts // 2
        for everywhere in (False, True):
            panel = ExpertPanel(checkpoint, profile)
            scope = "all layers" if everywhere else "one layer"
            panel._redraw._wait_s = FAR
            panel.scope.value = everywhere
            controls = {
                "experts kept": toggled(panel.choose, [half - 8, half, half + 8, half // 2]),
                "layer": toggled(lambda v, p=panel: setattr(p.layer, "value", v), list(range(options.layers))),
                "weight": weighed(panel),
            }
            for name, moves in controls.items():
                held.append(report(f"expert panel, {scope}, {name}", measure(panel, moves, options.moves)))
        proxy = ProxyPanel(checkpoint, profile, out="unused")
        # A choice made before is remembered, so every move goes to a count that was not shown yet.
        moves = toggled(proxy.choose, list(range(half - options.moves, half + options.moves)))
        held.append(report("proxy panel, experts kept", measure(proxy, moves, options.moves)))
    raise SystemExit(not all(held))


if __name__ == "__main__":
    main()
