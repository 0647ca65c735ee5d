"""The study of remedies: every fault at its clear level is treated on a proxy, and what is kept on the original.

    python -m moeproxy.triage.remedy_study --recorded out/bench-runs --runs out/remedy-runs --out data/remedy

Runs of the benchmark that are recorded are not made again, and neither are those of an earlier call that was stopped.
What it writes is what notebook 05 shows (`moeproxy.triage.remedy_recorded`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from moeproxy.errors import LabError, MoeproxyError
from moeproxy.files import atomic_file
from moeproxy.lab.bench import CALIBRATION, Model, injection_of
from moeproxy.lab.faults import FAULTS, fault
from moeproxy.lab.identity import model_hash
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import result_path, sweep
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.traces.pack import REGISTRY, load_pack, load_registry
from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy import Case, Told, Trial, treated, try_many, try_on
from moeproxy.triage.remedy_recorded import PAGE, RemedyStudy
from moeproxy.triage.remedy_table import words
from moeproxy.triage.severity import Calibrated, Healthy

FEWEST = 12
"""Healthy runs of a model that are made when fewer are recorded."""


def cases(
    model: Model,
    faults: Sequence[str],
    seeds: Sequence[int],
    runs: Path,
    *,
    workers: int | None = None,
    watch: Watch | None = None,
) -> list[Case]:
    """Return the clear runs of the benchmark with their healthy twins; healthy runs that `runs` lacks are made.

    Args:
        model: whose runs.
        faults, seeds: which runs.
        runs: folder of the traces.
        workers, watch: as for `moeproxy.lab.sweep.sweep`.
    """
    known = [path for seed in CALIBRATION if (path := result_path(model.spec(seed), runs)).is_file()]
    if len(known) >= FEWEST:
        healthy = [Trace.load(path) for path in known]
    else:
        healthy = sweep([model.spec(seed) for seed in CALIBRATION[:FEWEST]], runs, workers=workers, watch=watch)
    calibrated = Calibrated.of(healthy)
    twins = sweep([model.spec(seed) for seed in seeds], runs, workers=workers, watch=watch)
    return [
        Case(model.spec(seed, injection_of(name, "clear", seed)), Healthy(twin, calibrated))
        for seed, twin in zip(seeds, twins, strict=True)
        for name in faults
    ]


def take_packed(specs: Sequence[RunSpec], bench: Path, runs: Path) -> int:
    """Write the traces of these runs that lie in the packs of `bench` to `runs`, where they are missing.

    Returns:
        how many.
    """
    missing = {
        spec.key(model_hash(spec.model)): path for spec in specs if not (path := result_path(spec, runs)).exists()
    }
    taken = 0
    for name, rows in load_registry(bench).groupby("pack", sort=False):
        keys = rows["key"].tolist()  # in the order in which the runs lie in the pack
        if not missing.keys() & set(keys):
            continue
        for key, trace in zip(keys, load_pack(bench / str(name)), strict=True):
            if key in missing:
                trace.save(missing[key])
                taken += 1
    return taken


def take(specs: Sequence[RunSpec], recorded: Path, runs: Path) -> int:
    """Copy the recorded traces of these runs to `runs` where they are missing, and return how many."""
    taken = 0
    for spec in specs:
        source, target = result_path(spec, recorded), result_path(spec, runs)
        if source.is_file() and not target.exists():
            with atomic_file(target) as temporary:
                shutil.copyfile(source, temporary)
            taken += 1
    return taken


def study(
    proxy: Model,
    original: Model,
    runs: Path,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    seeds: Sequence[int] = (0,),
    minutes: float | None = None,
    workers: int | None = None,
    watch: Watch | None = None,
    told: Told | None = None,
) -> RemedyStudy:
    """Treat the clear runs of the proxy, then the original with what was kept.

    Args:
        proxy, original: the models.
        runs: folder of the traces; snapshots lie in `snapshots` below it.
        faults, seeds: which runs.
        minutes: budget of the proxy's part.
        workers, watch: as for `moeproxy.lab.sweep.sweep`.
        told: told of every trial when it is judged.
    """
    for name in faults:
        fault(name)
    options = {"workers": workers, "watch": watch}
    more = {**options, "told": told, "snapshots": runs / "snapshots"}
    mine = cases(proxy, faults, seeds, runs, **options)
    found = try_many(mine, runs, minutes=minutes, **more)
    if not any(one.best() for one in found):
        return RemedyStudy(tuple(found), ())
    moved = try_on(found, cases(original, faults, seeds, runs, **options), runs, **more)
    return RemedyStudy(tuple(found), tuple(moved))


def treated_runs(study: RemedyStudy, models: Sequence[Model], runs: Path) -> list[Trace]:
    """Return the treated runs of a study that lie in a folder; those that failed left none."""
    by_label = {model.label: model for model in models}
    found = []
    for one in (*study.proxies, *study.originals):
        spec = by_label[one.model].spec(one.seed, injection_of(one.cause, "clear", one.seed))
        paths = [result_path(treated(spec, [trial.remedy], one.onset), runs) for trial in one.trials]
        found += [Trace.load(path) for path in paths if path.is_file()]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: run what is missing, write the table, say what it shows."""
    from tqdm.auto import tqdm

    options = _parser().parse_args(arguments)
    proxy = Model(options.proxy, options.proxy.name, "cluster")
    original = Model(options.models / "qwen3-moe-tools", "original", "original")
    try:
        if not options.proxy.is_dir():
            raise LabError("no proxy", where=options.proxy, remedy="build one (moeproxy.lab.bench_record record does)")
        wanted = [
            spec
            for model in (proxy, original)
            for seed in options.seeds
            for spec in (model.spec(seed), *(model.spec(seed, injection_of(f, "clear", seed)) for f in options.faults))
        ] + [model.spec(seed) for model in (proxy, original) for seed in CALIBRATION]
        options.runs.mkdir(parents=True, exist_ok=True)
        take(wanted, options.recorded, options.runs)
        if (options.bench / REGISTRY).is_file():
            take_packed(wanted, options.bench, options.runs)
        # A file of progress must not take a line a step.
        with tqdm(desc="remedies", unit="step", mininterval=0.5 if sys.stderr.isatty() else 30) as bar:

            def show(now: SweepProgress) -> None:
                bar.total = now.steps
                bar.update(now.steps_done - bar.n)
                bar.set_postfix_str(str(now), refresh=False)

            def tell(case: Case, trial: Trial) -> None:
                name = f"{case.spec.label}, {case.treated_for}, seed {case.spec.seed}"
                bar.write(f"{name}: {trial.remedy} {trial.words}", file=sys.stderr)

            found = study(
                proxy,
                original,
                options.runs,
                faults=options.faults,
                seeds=options.seeds,
                minutes=options.minutes,
                workers=options.workers,
                watch=show,
                told=tell,
            )
        found.save(options.out, treated_runs(found, (proxy, original), options.runs))
    except MoeproxyError as error:
        sys.stderr.write(f"moeproxy: {error}\n")
        return 1
    sys.stdout.write(f"{words(found.scores)}\n{options.out / PAGE}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Try the remedies of every fault on a proxy, then on the original.")
    parser.add_argument("--models", type=Path, default=Path("data/models"), help="directory of the testbed models")
    parser.add_argument("--proxy", type=Path, default=Path("out/bench-proxies/cluster-16"))
    parser.add_argument("--bench", type=Path, default=Path("data/bench"), help="packs of recorded runs")
    parser.add_argument("--recorded", type=Path, default=Path("out/bench-runs"), help="recorded runs; only read")
    parser.add_argument("--runs", type=Path, default=Path("out/remedy-runs"), help="runs that are made")
    parser.add_argument("--out", type=Path, default=Path("data/remedy"), help="where results, runs and page go")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), help="default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="of the benchmark: 0, 1, 2")
    parser.add_argument("--minutes", type=float, default=None, help="budget of the proxy's part")
    parser.add_argument("--workers", type=int, default=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
