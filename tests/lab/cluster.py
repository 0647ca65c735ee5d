"""One sweep that every executor must make alike; as a program, on a local Ray.

python -m tests.lab.cluster FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeproxy.lab import executor_ray
from moeproxy.lab.jobs import Executor
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.sweep import SweepProgress, result_path, try_sweep
from moeproxy.places import data_dir
from tests.tiny import write


def dying(*seeds: int) -> Callable[[dict[str, Any], Path], None]:
    """Return the `train` of a node on which runs of these seeds are killed."""

    def run_or_die(stored: dict[str, Any], path: Path) -> None:
        import os

        from moeproxy.lab.worker import train

        if stored["seed"] in seeds:
            os.kill(os.getpid(), 9)
        train(stored, path)

    return run_or_die


def check(model: Path, settings: GRPOSettings, folder: Path, executor: Executor) -> list[str]:
    """Sweep a run that works, one whose tokenizer lacks the tasks' characters, and one that is killed."""
    out, settings = folder / "out", replace(settings, steps=3)
    foreign = write(folder / "foreign", "qwen3_moe")
    specs = [
        RunSpec(model, seed=1, settings=settings),
        RunSpec(model, seed=2, settings=settings),
        RunSpec(foreign, seed=3, settings=settings),
    ]
    steps: list[tuple[int, int]] = []
    seen: list[SweepProgress] = []
    result = try_sweep(
        specs,
        out,
        executor=executor,
        progress=lambda spec, step, _: steps.append((spec.seed, step)),
        watch=seen.append,
    )
    (trace,) = result.traces
    assert trace.equals(run(specs[1]))
    assert [failure.spec for failure in result.failures] == [specs[0], specs[2]]
    assert steps == [(2, 1), (2, 2), (2, 3)]
    assert (seen[-1].runs_done, seen[-1].runs_failed, seen[-1].steps_done) == (3, 2, 3)
    # Any other executor takes up what this one left.
    assert try_sweep(specs, out) == result
    ends = [".failed.json", ".parquet", ".failed.json"]
    names = {result_path(spec, out).with_suffix(end).name for spec, end in zip(specs, ends, strict=True)}
    assert {path.name for path in out.iterdir()} == names
    return [failure.words for failure in result.failures]


def main() -> None:
    """Sweep on a Ray that is started for it, and write the last words of both failures."""
    import ray

    executor_ray.train = dying(1)  # pyright: ignore[reportAttributeAccessIssue]
    settings = GRPOSettings(prompts=4, samples=4, tasks=64)
    model = data_dir() / "models" / "qwen3-moe-tiny"
    words = check(model, settings, Path(sys.argv[1]), executor_ray.RayExecutor(workers=2))
    assert not ray.is_initialized()
    sys.stdout.write(json.dumps(words) + "\n")


if __name__ == "__main__":
    main()
