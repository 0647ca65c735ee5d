"""Record the runs that data/runs ships: original and proxies, healthy and broken, several seeds.

    python -m moeproxy.lab.record --out data/runs

A run that is recorded already is not repeated. The report takes bands, spreads, thresholds and the control proxies
from these runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import SweepProgress, sweep
from moeproxy.proxy.build import build
from moeproxy.proxy.cluster import Method, select

ONSET = 20
CLEAR = (Injection("rollout_logp_precision", 1.0, ONSET), Injection("update_freeze", 1.0, ONSET))
SUBTLE = (Injection("rollout_logp_precision", 0.75, ONSET), Injection("update_freeze", 0.5, ONSET))
CALIBRATION_SEEDS = (100, 101, 102, 103)
SCORED_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Choice:
    """One proxy of the comparison: how its experts are chosen and how many are kept."""

    method: Method
    n_keep: int

    @property
    def label(self) -> str:
        """Label of the model in traces and reports."""
        return f"{self.method}-{self.n_keep}"


MAIN_PROXY = Choice("cluster", 16)
PROXIES = tuple(Choice(method, n) for n in (16, 8) for method in ("cluster", "frequency", "random", "first"))


def specs_of(
    model: Path,
    label: str,
    method: str,
    *,
    injections: Sequence[Injection] = CLEAR,
    scored: Sequence[int] = SCORED_SEEDS,
    calibration: Sequence[int] = CALIBRATION_SEEDS,
    settings: GRPOSettings | None = None,
) -> list[RunSpec]:
    """Return the runs of one model: healthy on all seeds, each fault on the scored ones."""
    settings = settings or GRPOSettings()
    base = {"model": model, "label": label, "method": method, "settings": settings}
    healthy = [RunSpec(**base, seed=seed) for seed in (*scored, *calibration)]
    broken = [RunSpec(**base, seed=seed, injection=item) for item in injections for seed in scored]
    return healthy + broken


def build_proxies(model: Path, statistics: ExpertProfile, choices: Sequence[Choice], out: Path) -> dict[Choice, Path]:
    """Write the proxies of `choices` that are not in `out` yet and return where they lie."""
    checkpoint = Checkpoint.open(model)
    paths = {choice: out / choice.label for choice in choices}
    for choice, path in paths.items():
        if not path.exists():
            build(checkpoint, select(statistics, choice.n_keep, method=choice.method), path)
    return paths


def main() -> None:
    """Command line: record every run that is missing."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="Record the runs that the report's bands and controls come from.")
    parser.add_argument("--model", type=Path, default=Path("data/models/qwen3-moe-tiny"))
    parser.add_argument("--out", type=Path, default=Path("data/runs"))
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        statistics = profile(options.model, calibration_texts(0), batch_size=200)
        paths = build_proxies(options.model, statistics, PROXIES, Path(scratch))
        specs = specs_of(options.model, "original", "original", injections=CLEAR + SUBTLE)
        for choice, path in paths.items():
            # The subtle strengths are asked of the main proxy only; controls answer for the clear ones.
            injections = CLEAR + SUBTLE if choice == MAIN_PROXY else CLEAR
            specs += specs_of(path, choice.label, choice.method, injections=injections)
        with tqdm(desc="recording", unit="step") as bar:

            def show(now: SweepProgress) -> None:
                bar.total = now.steps
                bar.update(now.steps_done - bar.n)
                bar.set_postfix_str(str(now), refresh=False)

            sweep(specs, options.out, workers=options.workers, watch=show)


if __name__ == "__main__":
    main()
