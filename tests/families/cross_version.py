"""Check that proxies load with the same logits in transformers 4.57 as in the version in use here.

    python3 -m venv old && old/bin/pip install transformers==4.57.6 torch==2.13.0
    python -m tests.families.cross_version --old-python old/bin/python

Not part of `make test`, since it needs an environment of its own. The old version makes a tiny random checkpoint of
every family that it knows and saves it in shards; here a proxy is built from it, with other experts in each layer;
both versions load original and proxy. Prints one line a family; exit status 1 if the logits of a proxy differ by more
than 1e-5 of the largest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5


def main() -> int:
    """Make with the old version, prune here, load with both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old-python", required=True, help="interpreter of the environment with transformers 4.57")
    parser.add_argument("--families", nargs="*", help="model types (default: the whole table)")
    parser.add_argument("--worker", help=argparse.SUPPRESS, choices=("make", "load"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _worker(options.worker, options.folder, options.families)
    with tempfile.TemporaryDirectory() as name:
        return _compare(options.old_python, Path(name), options.families or _table())


def _table() -> list[str]:
    from moeproxy.experts.families import FAMILIES

    return sorted(FAMILIES)


def _compare(python: str, folder: Path, families: list[str]) -> int:
    _run_old(python, "make", folder, families)
    made = [family for family in families if (folder / family / "original").is_dir()]
    for family in made:
        _guarded(_prune, folder / family, "prune")
    _run_old(python, "load", folder, made)
    rows = [(family, *(_difference(folder / family, name) for name in ("original", "proxy"))) for family in made]
    for family, original, proxy in rows:
        note = "" if original <= TOLERANCE else f"  the versions differ on the original too: {_reason(folder / family)}"
        sys.stdout.write(f"{family:<20} original {original:8.1e}  proxy {proxy:8.1e}{note}\n")
    for family in families:
        if family not in made:
            sys.stdout.write(f"{family:<20} not made by the old version: {_reason(folder / family)}\n")
    # Where the versions disagree about the checkpoint itself, a proxy cannot do better.
    sound = [row for row in rows if row[1] <= TOLERANCE]
    bad = [family for family, _, proxy in sound if not proxy <= TOLERANCE]
    sys.stdout.write(f"{len(sound) - len(bad)} of {len(sound)} proxies agree; differing: {', '.join(bad) or 'none'}\n")
    return int(bool(bad) or not sound)


def _run_old(python: str, worker: str, folder: Path, families: list[str]) -> None:
    command = [python, "-m", "tests.families.cross_version", "--old-python", python, "--worker", worker]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--folder", str(folder), "--families", *families], check=True, cwd=ROOT, env=environment)


def _prune(folder: Path) -> None:
    """Build a proxy of `original` and keep the logits that this version computes for both."""
    from moeproxy.experts.checkpoint import Checkpoint
    from moeproxy.experts.load import load_model
    from moeproxy.proxy.build import build
    from tests.families import configs
    from tests.families.saved import logits
    from tests.proxy.made_up import plan_for

    original = Checkpoint.open(folder / "original")
    plan = plan_for(original, configs.KEEP)
    build(original, plan, folder / "proxy")
    for name in ("original", "proxy"):
        found = logits(load_model(Checkpoint.open(folder / name)))
        np.save(folder / f"{name}-new.npy", found.numpy())


def _worker(what: str, folder: Path, families: list[str]) -> int:
    """What the old version does, for every family; its failures are results, not crashes."""
    for family in families:
        (folder / family).mkdir(exist_ok=True)
        _guarded(_make if what == "make" else _load, folder / family, what)
    return 0


def _guarded(work: Callable[[Path], None], folder: Path, what: str) -> None:
    try:
        work(folder)
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        (folder / f"{what}-failed.txt").write_text(f"{type(error).__name__}: {reason[0][:160]}", "utf-8")


def _make(folder: Path) -> None:
    from transformers import CONFIG_MAPPING

    from tests.families import configs

    if folder.name not in CONFIG_MAPPING:
        raise KeyError("unknown model type")
    model = configs.model(folder.name)
    _lift_biases(model)
    model.save_pretrained(folder / "original", max_shard_size="40KB")


def _lift_biases(model: Any) -> None:
    """Make every correction bias positive; only differences between them decide.

    The old version gives experts of groups that were not chosen the score 0, not minus infinity, and so chooses
    them where score plus bias of all others is negative: a difference between the versions, not of the proxy.
    """
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.add_(2.0)


def _load(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.families.saved import logits

    for name in ("original", "proxy"):
        model, info = AutoModelForCausalLM.from_pretrained(folder / name, output_loading_info=True)
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ValueError(f"{name} lacks {sorted(info['missing_keys'])[:2]}")
        np.save(folder / f"{name}-old.npy", logits(model.float().eval()).numpy())


def _difference(folder: Path, name: str) -> float:
    """Largest difference of logits over the largest logit; NaN where a version cannot load the checkpoint."""
    new, old = folder / f"{name}-new.npy", folder / f"{name}-old.npy"
    if not (old.exists() and new.exists()):
        return float("nan")
    expected, found = np.load(new), np.load(old)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _reason(folder: Path) -> str:
    files = sorted(folder.glob("*-failed.txt"))
    return files[-1].read_text("utf-8") if files else "the logits differ"


if __name__ == "__main__":
    raise SystemExit(main())
