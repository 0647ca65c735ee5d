"""Record the benchmark and put it into packs, one for each model and family.

python -m moeproxy.lab.bench_record record --runs out/bench-runs     # hours of CPU; finished runs are not repeated
python -m moeproxy.lab.bench_record pack --runs out/bench-runs --out data/bench

Finished runs are not repeated, neither those in the folder of runs nor those in the packs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moeproxy.errors import LabError
from moeproxy.files import atomic_file
from moeproxy.lab.bench import Model, grid, models_of
from moeproxy.lab.faults import FAULTS
from moeproxy.lab.identity import identify
from moeproxy.lab.jobs import Failure
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import SweepProgress, try_sweep
from moeproxy.traces.pack import REGISTRY, load_pack, load_registry, save_pack
from moeproxy.traces.trace import RunInfo, Trace

COLUMNS = (
    "model",
    "method",
    "n_experts",
    "fault",
    "family",
    "level",
    "strength",
    "onset",
    "seed",
    "learning_rate",
    "temperature",
    "config_hash",
    "key",
    "pack",
    "failed",
)


def pack(runs: Path, out: Path, *, progress: Callable[[str], None] | None = None) -> pd.DataFrame:
    """Put every run file of `runs` into packs below `out`, write the registry, and return it.

    A run that failed has a row too, without a pack but with its last words: a crash is a result. Packs that the
    registry no longer names are left alone; a pack is replaced only when it is complete.

    Raises:
        LabError: there is no run.
    """
    files = sorted(path for path in Path(runs).glob("*.parquet") if not path.name.startswith("."))
    if not files:
        raise LabError("no recorded runs", where=runs, remedy="record some first (bench_record record)")
    groups: dict[str, list[tuple[str, Trace]]] = defaultdict(list)
    for path in files:
        trace = Trace.load(path)
        groups[_pack_name(trace)].append((path.stem.rpartition("--")[2], trace))
    rows = []
    for name, members in sorted(groups.items()):
        save_pack([trace for _, trace in members], out / name)
        rows += [_row(trace.provenance, key, name) for key, trace in members]
        if progress:
            progress(f"{name}: {len(members)} runs")
    rows += [_failed_row(path) for path in sorted(Path(runs).glob("*.failed.json"))]
    registry = pd.DataFrame(rows, columns=list(COLUMNS))
    with atomic_file(out / REGISTRY) as temporary:
        registry.to_csv(temporary, index=False)
    return registry


def unpack(bench: Path, runs: Path) -> int:
    """Write the runs of the packs in `bench` as single files below `runs`, where they are missing; return how many.

    So a recording goes on from what has been packed, on another machine too.
    """
    written = 0
    for name, rows in load_registry(bench).groupby("pack", sort=False):
        # The registry lists the runs of a pack in the order in which they lie in it.
        paths = [
            runs / f"{row['model']}--{_fault_name(row)}--s{row['seed']}--{row['key']}.parquet"
            for _, row in rows.iterrows()
        ]
        if all(path.exists() for path in paths):
            continue
        for trace, path in zip(load_pack(bench / str(name)), paths, strict=True):
            if not path.exists():
                trace.save(path)
                written += 1
    return written


def _fault_name(row: Any) -> str:
    return f"{row['fault']}-{row['strength']:g}-at{row['onset']}" if row["fault"] else "healthy"


def _pack_name(trace: Trace) -> str:
    run = trace.provenance
    return f"{run.model}/{FAULTS[run.fault].family if run.fault else 'healthy'}.parquet"


def _failed_row(path: Path) -> dict[str, object]:
    failure = Failure.load(path)
    spec = failure.spec
    shape = identify(spec.model, spec.method)
    first = spec.injection
    info = RunInfo(
        spec.label,
        spec.method,
        shape.n_experts,
        spec.seed,
        first.fault if first else None,
        first.strength if first else 0.0,
        first.onset if first else None,
        config=spec.settings.to_dict(),
    )
    key = path.name.removesuffix(".failed.json").rpartition("--")[2]
    return {**_row(info, key, ""), "failed": str(failure)}


def _row(run: RunInfo, key: str, name: str) -> dict[str, object]:
    config = json.dumps(run.config, sort_keys=True).encode()
    return {
        "model": run.model,
        "method": run.method,
        "n_experts": run.n_experts,
        "fault": run.fault or "",
        "family": FAULTS[run.fault].family if run.fault else "",
        "level": "" if run.fault is None else "clear" if run.strength == 1 else "subtle",
        "strength": run.strength,
        "onset": run.onset if run.fault else "",
        "seed": run.seed,
        "learning_rate": run.config["learning_rate"],
        "temperature": run.config["temperature"],
        "config_hash": hashlib.sha256(config).hexdigest()[:12],
        "key": key,
        "pack": name,
        "failed": "",
    }


def chosen(models: Sequence[Model], only: Sequence[str]) -> list[RunSpec]:
    """Return the runs of the grid, or of the models named in `only`.

    Raises:
        LabError: a name is no model of the benchmark.
    """
    labels = [model.label for model in models]
    for name in only:
        if name not in labels:
            raise LabError(f"no model {name!r} in the benchmark", expected=f"one of {', '.join(labels)}")
    return [spec for spec in grid(models) if not only or spec.label in only]


def main() -> None:
    """Command line: record what is missing, or pack what is there."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="Record the benchmark of data/bench, or put its runs into packs.")
    parser.add_argument("what", choices=("record", "pack"))
    parser.add_argument("--models", type=Path, default=Path("data/models"), help="directory of the testbed models")
    parser.add_argument("--proxies", type=Path, default=Path("out/bench-proxies"))
    parser.add_argument("--runs", type=Path, default=Path("out/bench-runs"))
    parser.add_argument("--out", type=Path, default=Path("data/bench"))
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=[], help="labels of models; default: all")
    options = parser.parse_args()
    if options.what == "pack":
        tqdm.write(f"{len(pack(options.runs, options.out, progress=tqdm.write))} runs")
        return
    if (options.out / REGISTRY).is_file():
        tqdm.write(f"{unpack(options.out, options.runs)} runs taken from {options.out}")
    specs = chosen(models_of(options.models, options.proxies), options.only)
    with tqdm(desc="recording", unit="step") as bar:

        def show(now: SweepProgress) -> None:
            bar.total = now.steps
            bar.update(now.steps_done - bar.n)
            bar.set_postfix_str(str(now), refresh=False)

        ended = try_sweep(specs, options.runs, workers=options.workers, watch=show)
    for failure in ended.failures:
        tqdm.write(f"failed: {failure.spec.label} {failure.spec.fault_name} seed {failure.spec.seed}: {failure}")


if __name__ == "__main__":
    main()
