"""Prepare a folder in which notebook 00 can run, as the tests of two folders need it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("out/start_here")


def copy_of(notebooks: Path, root: Path) -> Path:
    """Copy `notebooks` below `root`, with the recorded twins of the runs that notebook 00 trains.

    Training them takes two minutes, and `tests/lab` does that already. Where this machine rounds otherwise than
    the recording one, so that another proxy comes out, the notebook finds no twin and trains.
    """
    shutil.copytree(notebooks, root / "notebooks", ignore=shutil.ignore_patterns(".*", "out"))
    runs = root / OUT / "runs"
    runs.mkdir(parents=True)
    for model in ("original", "cluster-16"):
        for run in ("healthy", "*-1-at20"):
            for file in (ROOT / "data" / "runs").glob(f"{model}--{run}--s0--*.parquet"):
                shutil.copy(file, runs)
    return root / "notebooks"
