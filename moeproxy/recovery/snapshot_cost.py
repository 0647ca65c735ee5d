"""What a snapshot beside training costs a step, from pairs of neighbouring steps, so that a busy machine hits both.

    python -m moeproxy.recovery.snapshot_cost --out out/snapshots --runs 6

With `snapshot_every=2` every second step has a snapshot copied and pushed beside it. Each is compared with the two
steps around it, which have none; many such ratios give a median, and a bootstrap over blocks of neighbours how sure it
is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeproxy.recovery import events as ev
from moeproxy.recovery.events import Event, read_events

if TYPE_CHECKING:
    from moeproxy.recovery.swap_plan import SwapPlan

_FIRST = 3
"""Steps before it are warming up."""

_BLOCK, _DRAWS = 4, 4000


@dataclass(frozen=True)
class SnapshotCost:
    """By what share steps beside which a snapshot was copied took longer than those around them.

    Args:
        share: median of the ratios, less one.
        low, high: of a 95 % interval, from a bootstrap over blocks of neighbouring ratios.
        steps: number of ratios.
    """

    share: float
    low: float
    high: float
    steps: int

    def __repr__(self) -> str:
        return f"SnapshotCost({self.share:+.1%}, 95 % {self.low:+.1%} to {self.high:+.1%}, {self.steps} steps)"


def ratios(events: Sequence[Event]) -> list[float]:
    """Return for every step with a snapshot beside it its time over the mean of its two neighbours', which have none.

    Ranks wait for one another in every step, so a step's time is the mean over ranks.

    Args:
        events: of a job with hot swap.
    """
    commits = [event for event in events if event.event == ev.STEP_COMMIT and "beside" in event.info and event.step]
    members = {event.member for event in commits}
    times: dict[int, dict[str, Mapping[str, Any]]] = {}
    for event in commits:
        times.setdefault(int(event.step or 0), {})[event.member] = event.info
    whole = {step: by for step, by in times.items() if by.keys() == members and step >= _FIRST}
    beside = {step: {bool(info["beside"]) for info in by.values()} for step, by in whole.items()}
    seconds = {step: float(np.mean([info["seconds"] for info in by.values()])) for step, by in whole.items()}
    return [
        2 * seconds[step] / (seconds[step - 1] + seconds[step + 1])
        for step in sorted(seconds)
        if (beside[step], beside.get(step - 1), beside.get(step + 1)) == ({True}, {False}, {False})
    ]


def snapshot_cost(found: Sequence[float], seed: int = 0) -> SnapshotCost | None:
    """Return the cost that ratios of one or more jobs show; None for none.

    Args:
        found: as `ratios` returns them, of one job after the other.
        seed: of the bootstrap.
    """
    if not found:
        return None
    values, rng = np.asarray(found), np.random.default_rng(seed)
    starts = rng.integers(len(values), size=(_DRAWS, -(-len(values) // _BLOCK)))
    places = (starts[:, :, None] + np.arange(_BLOCK)).reshape(_DRAWS, -1)[:, : len(values)] % len(values)
    low, high = np.quantile(np.median(values[places], axis=1), [0.025, 0.975])
    return SnapshotCost(float(np.median(values)) - 1, float(low) - 1, float(high) - 1, len(values))


def measured(plan: SwapPlan, out: Path, runs: int, limit: float = 300.0) -> list[list[float]]:
    """Make the job `runs` times, with batches of other seeds, and return the ratios of each.

    Args:
        plan: with `snapshot_every` 2, and no mishaps.
        out: takes a folder for each run; those that are there are read, not made again.
        runs: how many.
        limit: seconds for one.
    """
    from dataclasses import replace

    from moeproxy.recovery.hotswap import hot_swap

    found = []
    for seed in range(runs):
        folder = out / f"seed-{seed}"
        if not folder.exists():
            hot_swap(replace(plan, seed=seed), folder, limit=limit)
        found.append(ratios(read_events(folder)))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the jobs, print each one's cost and that of all together; return the exit status."""
    from tqdm.auto import tqdm

    from moeproxy.places import data_dir
    from moeproxy.recovery.swap_plan import SwapPlan

    parser = argparse.ArgumentParser(description="Measure what snapshots of sharded state cost a step.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the jobs")
    parser.add_argument("--model", type=Path, default=data_dir() / "models" / "qwen3-moe-tiny")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args(arguments)
    plan = SwapPlan(
        options.model, "sharded", steps=options.steps, spares=0, batch=options.batch, timeout=30.0,
        checkpoint_every=10 * options.steps, snapshot_every=2, digests=False,
    )  # fmt: skip
    found = measured(plan, options.out, options.runs)
    for each in (*found, [ratio for one in found for ratio in one]):
        tqdm.write(f"{snapshot_cost(each)}, load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
