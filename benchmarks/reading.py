"""Measure how logs are read: JSON lines beside json.loads, a large console log in flat memory, a growing log.

    python benchmarks/reading.py [--rows 1000000] [--gigabytes 0.2 1] [--rounds 3] [--folder DIR]

Times are of the processor, both sides alternating in one run. Console logs are written to a temporary folder, one after
the other, and deleted; each is read by a process of its own whose peak of resident memory is measured. `--gigabytes
0.2 1 5` is the run that the README quotes. No test depends on these numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moeproxy.traces import LogFollower, read

READER = """
import sys, time
from moeproxy.traces import read
started = time.process_time()
(log,) = read(sys.argv[1])
taken = time.process_time() - started
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak, taken, log.info.lines, len(log.trace.steps), log.info.framework)
"""
CHATTER = [
    "(vLLMHttpServer pid=311) INFO 01-01 00:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 81.2 tokens/s\n",
    "(WorkerDict pid=312) [rank3] gathering 128 tensors of [4096, 4096] for the next update of the rollout engine\n",
    "Generating:  41%|####1     | 52/128 [00:31<00:46,  1.6it/s]\r",
    "(RewardManager pid=313) [prompt] How many eggs are left? [response] She eats three, so there are 16 - 3 = 13.\n",
]
"""What stands between two steps of a real console log, most of the bytes."""


def write(text: str) -> None:
    """Show a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def rows_file(path: Path, n_rows: int) -> None:
    """Write JSON lines of eight numbers, as trainers log them."""
    dice = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for step in range(n_rows):
            row = {"step": step, "loss": dice.gauss(0, 1), "grad_norm": dice.random(), "learning_rate": 1e-6}
            row |= {"reward": dice.random(), "kl": dice.random() / 1e3, "entropy": dice.random(), "epoch": step / 1e3}
            stream.write(json.dumps(row) + "\n")


def parse(path: Path) -> None:
    """What reading cannot be quicker than: every line through json.loads, nothing kept."""
    with path.open("rb") as stream:
        for line in stream:
            json.loads(line)


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of `work`."""
    started = time.process_time()
    work()
    return time.process_time() - started


def json_lines(folder: Path, n_rows: int, rounds: int) -> None:
    """Compare `read` with json.loads over the same lines."""
    path = folder / "rows.jsonl"
    rows_file(path, n_rows)
    pairs = [(seconds(lambda: read(path)), seconds(lambda: parse(path))) for _ in range(rounds)]
    ratios = [ours / theirs for ours, theirs in pairs]
    middle = statistics.median(ratios)
    said = "holds" if middle <= 2 else "MISSED"
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    write(f"{n_rows:,} JSON lines ({path.stat().st_size / 1e6:.0f} MB): read {ours:.1f} s, json.loads {theirs:.1f} s")
    write(f"  ratio {middle:.2f} x ({min(ratios):.2f}-{max(ratios):.2f}), budget 2 x: {said}")
    path.unlink()


def console_file(path: Path, size: int, steps: int = 2000) -> None:
    """Write a console log of `size` bytes with so many steps: however long, it holds equally many numbers."""
    between = "".join(CHATTER).encode()
    share = max(1, size // steps // len(between))
    with path.open("wb") as stream:
        for step in range(1, steps + 1):
            said = f"step:{step} - actor/grad_norm:{step / 7} - actor/pg_loss:np.float64(-0.01) - actor/lr:1e-06"
            stream.write(f"\x1b[36m(TaskRunner pid=309)\x1b[0m {said}\n".encode())
            stream.write(between * share)


def console(folder: Path, gigabytes: list[float]) -> None:
    """Measure the peak memory of reading console logs of several sizes, each in its own process."""
    for number in gigabytes:
        path = folder / "train.log"
        console_file(path, int(number * 1e9))
        size = path.stat().st_size
        done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True)
        peak, taken, lines, steps, framework = done.stdout.split()
        speed = size / 1e6 / float(taken)
        write(f"console log of {size / 1e9:.2f} GB, {int(lines):,} lines, {steps} steps of {framework}:")
        write(f"  {float(taken):.0f} s ({speed:.0f} MB/s), peak memory {int(peak) / 1024:.0f} MiB")
        path.unlink()


def following(folder: Path, megabytes: tuple[int, ...] = (1, 10, 100, 400)) -> None:
    """Measure a look at a log that has grown by one step, and one at a log that has not, at several sizes."""
    for size in megabytes:
        path = folder / "grows.log"
        console_file(path, size * 1_000_000)
        follower = LogFollower(path)
        follower.poll()
        grown = []
        for step in range(2001, 2021):
            with path.open("a", encoding="utf-8") as stream:
                stream.write(f"step:{step} - actor/grad_norm:0.5 - actor/lr:1e-06\n")
            grown.append(seconds(follower.poll))
        idle = [seconds(follower.poll) for _ in range(20)]
        shown = [seconds(follower.logs) for _ in range(5)]
        middle = [statistics.median(values) * 1e3 for values in (grown, idle, shown)]
        write(f"growing log of {size} MB: look at one new step {middle[0]:.2f} ms, at nothing new {middle[1]:.2f} ms")
        write(f"  traces of all that was read so far {middle[2]:.1f} ms")
        path.unlink()


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[0.2, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary logs go (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.rows:
            json_lines(folder, options.rows, options.rounds)
        following(folder)
        console(folder, options.gigabytes)


if __name__ == "__main__":
    main()
