"""The main job: profile, choose, build, check, train healthy and broken, compare, report.

Every stage is a function of its own, so that notebook 00 and the command line walk the same road.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from moeproxy.errors import MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.lab.pruning_study import calibration_texts
from moeproxy.lab.record import CALIBRATION_SEEDS, CLEAR, MAIN_PROXY, SCORED_SEEDS, Choice, specs_of
from moeproxy.lab.scoring import accuracy
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import sweep
from moeproxy.lab.tasks import RL_SKILLS
from moeproxy.mainreport import main_report
from moeproxy.places import data_dir
from moeproxy.proxy.build import KEEP_MAP, Proxy, build, check
from moeproxy.proxy.cluster import select
from moeproxy.proxy.plan import KeepPlan
from moeproxy.traces.trace import Trace, load_dir
from moeproxy.triage.compare import Comparison, compare

MODEL = "qwen3-moe-tiny"
LIVE_SEED = SCORED_SEEDS[0]
STAGES = (
    ("profile", 0.05),
    ("choose experts", 0.01),
    ("build proxy", 0.02),
    ("check proxy", 0.05),
    ("measure accuracy", 0.05),
    ("train healthy and broken", 0.72),
    ("compare", 0.05),
    ("report", 0.05),
)
"""The stages of the main job and their rough share of its time (for the progress bar only)."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class MainResult:
    """What the main job made.

    Args:
        checkpoint, profile, plan, proxy: the original, how it uses its experts, what the proxy keeps, the proxy.
        live: traces trained just now.
        comparisons: one for each fault.
        report: path of the HTML page.
        seconds: (stage, seconds) in order.
    """

    checkpoint: Checkpoint
    profile: ExpertProfile
    plan: KeepPlan
    proxy: Proxy
    live: tuple[Trace, ...]
    comparisons: tuple[Comparison, ...]
    report: Path
    seconds: tuple[tuple[str, float], ...] = field(repr=False)


class _Clock:
    """Reports the stage under way and keeps how long each took."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress or (lambda stage, share: None)
        self._started = time.monotonic()
        self.seconds: list[tuple[str, float]] = []

    def within(self, stage: str) -> Callable[[float], None]:
        """Return a function that reports a share of `stage`, 0 to 1, as a share of the whole job."""
        names = [name for name, _ in STAGES]
        before = sum(weight for _, weight in STAGES[: names.index(stage)])
        weight = STAGES[names.index(stage)][1]
        self._progress(stage, before)
        return lambda share: self._progress(stage, before + weight * min(share, 1.0))

    def done(self, stage: str) -> None:
        """Note that `stage` has ended."""
        now = time.monotonic()
        self.seconds.append((stage, round(now - self._started, 1)))
        self._started = now


def run_main_job(
    out: str | Path = "out",
    *,
    choice: Choice = MAIN_PROXY,
    settings: GRPOSettings | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MainResult:
    """Do the whole main job on the shipped Qwen3-layout model and write `out/report/index.html`.

    Args:
        out: directory for the proxy and the report; both replace those of an earlier main job there.
        choice: the proxy: how experts are chosen and how many are kept.
        settings: of the GRPO loop; recorded runs are used only where they had the same.
        workers: training processes at a time, by default one a core.
        progress: called with (stage, share of the job done, 0 to 1).

    Raises:
        MoeproxyError: data are missing, or `out` holds something else under the proxy's name.
    """
    clock, settings, target = _Clock(progress), settings or GRPOSettings(), Path(out)
    checkpoint = Checkpoint.open(data_dir() / "models" / MODEL)
    # What would fail after minutes of training fails now.
    recorded = recorded_runs(settings, choice)
    _check_folders(target)
    within = clock.within("profile")
    statistics = profile(
        checkpoint, calibration_texts(0), batch_size=200, progress=lambda done, total: within(done / total)
    )
    clock.done("profile")
    clock.within("choose experts")
    plan = select(statistics, choice.n_keep, method=choice.method)
    clock.done("choose experts")
    clock.within("build proxy")
    proxy = build_afresh(checkpoint, plan, target / "proxies" / choice.label)
    clock.done("build proxy")
    clock.within("check proxy")
    proxy = check(proxy)
    clock.done("check proxy")
    clock.within("measure accuracy")
    scores = measure_accuracy(checkpoint, proxy, choice.label)
    clock.done("measure accuracy")
    live = train_live(proxy, choice, settings=settings, workers=workers, progress=clock.within(_TRAIN))
    clock.done(_TRAIN)
    clock.within("compare")
    keep(live, target / "runs")
    traces = joined(live, recorded)
    comparisons = compare_faults(traces)
    clock.done("compare")
    clock.within("report")
    page = main_report(
        checkpoint, statistics, plan, proxy, traces, comparisons, scores, clock.seconds, target, twins(live, recorded)
    )
    clock.done("report")
    if progress:
        progress("done", 1.0)
    return MainResult(checkpoint, statistics, plan, proxy, live, comparisons, page, tuple(clock.seconds))


_TRAIN = "train healthy and broken"


def build_afresh(checkpoint: Checkpoint, plan: KeepPlan, path: Path) -> Proxy:
    """Build the proxy at `path`, replacing a proxy that is there already, and nothing else.

    Raises:
        MoeproxyError: `path` exists and is no proxy.
    """
    if not path.exists():
        return build(checkpoint, plan, path)
    if not (path / KEEP_MAP).is_file():
        raise MoeproxyError(
            "exists and is no proxy", where=path, remedy="move it away or choose another output directory"
        )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        proxy = build(checkpoint, plan, Path(scratch) / "new")
        path.rename(Path(scratch) / "old")
        proxy.path.rename(path)
    return replace(proxy, path=path)


def _check_folders(out: Path) -> None:
    """Refuse an output directory that the end of the job could not write to."""
    for folder in (out, out / "report", out / "runs", out / "proxies"):
        if folder.exists() and not folder.is_dir():
            raise MoeproxyError("is a file", where=folder, expected="a directory", remedy="choose another --out")


def keep(live: Sequence[Trace], folder: Path) -> None:
    """Save the live runs, so that they outlive the job; those of an earlier job are replaced."""
    for trace in live:
        run = trace.provenance
        trace.save(folder / f"{run.model}--{run.fault or 'healthy'}--s{run.seed}.parquet")


def measure_accuracy(checkpoint: Checkpoint, proxy: Proxy, label: str) -> pd.DataFrame:
    """Return greedy accuracy on the test split of original and proxy: columns model, accuracy, chance, n."""
    rows = []
    for name, opened in (("original", checkpoint), (label, Checkpoint.open(proxy.path))):
        score = accuracy(load_model(opened).eval(), RL_SKILLS, n=280, split="test")
        rows.append({"model": name, "accuracy": score.mean, "chance": score.chance, "n": score.n})
    return pd.DataFrame(rows)


def live_specs(original: Path, proxy: Path, choice: Choice, settings: GRPOSettings) -> list[RunSpec]:
    """Return the runs that the main job trains: both models, healthy and with each fault, one seed."""
    options = {"scored": (LIVE_SEED,), "calibration": (), "settings": settings}
    return [
        *specs_of(original, "original", "original", **options),
        *specs_of(proxy, choice.label, choice.method, **options),
    ]


def train_live(
    proxy: Proxy,
    choice: Choice = MAIN_PROXY,
    *,
    settings: GRPOSettings | None = None,
    workers: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Trace, ...]:
    """Train original and proxy, healthy and broken, in fresh processes.

    Args:
        proxy: the proxy; its source is the original.
        choice: names the proxy in the traces.
        settings: of the loop.
        workers: processes at a time.
        progress: called with the share of all steps that are done, 0 to 1.
    """
    settings = settings or GRPOSettings()
    specs = live_specs(proxy.source, proxy.path, choice, settings)
    done = iter(range(1, len(specs) * settings.steps + 1))
    total = len(specs) * settings.steps

    def step(_spec: RunSpec, _step: int, _steps: int) -> None:
        if progress:
            progress(next(done) / total)

    with tempfile.TemporaryDirectory() as scratch:
        return tuple(sweep(specs, Path(scratch), workers=workers, progress=step))


def recorded_runs(settings: GRPOSettings | None = None, choice: Choice | None = None) -> tuple[Trace, ...]:
    """Return the shipped runs that were recorded with these settings, marked as recorded.

    With `choice`, runs of that proxy must be among them.

    A run of fewer steps is the beginning of a longer one, since the learning rate is constant: recorded runs are cut
    to `settings.steps`.

    Raises:
        MoeproxyError: no run of the proxy of `choice` was recorded with these settings.
    """
    settings = settings or GRPOSettings()
    found = [_cut(trace, settings.steps) for trace in load_dir(data_dir() / "runs") if _same_loop(trace, settings)]
    labels = {trace.provenance.model for trace in found}
    if choice and choice.label not in labels:
        raise MoeproxyError(
            f"no runs of {choice.label!r} were recorded with these settings, so its healthy spread is unknown",
            where=data_dir() / "runs",
            expected=f"one of {', '.join(sorted(labels - {'original'})) or 'none: other settings were recorded'}",
            remedy="choose one of these, or record runs of it (python -m moeproxy.lab.record)",
        )
    return tuple(found)


def joined(live: Sequence[Trace], recorded: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return the live runs and those recorded ones that were not trained live again."""
    trained = {_place(trace) for trace in live}
    return (*live, *(trace for trace in recorded if _place(trace) not in trained))


def twins(live: Sequence[Trace], recorded: Sequence[Trace]) -> str:
    """Say in one sentence how many live runs equal their recorded twin bit for bit."""
    by_place = {_place(trace): trace for trace in recorded}
    pairs = [(trace, by_place[_place(trace)]) for trace in live if _place(trace) in by_place]
    equal = sum(ours.equals(theirs) for ours, theirs in pairs)
    return (
        f"{equal} of {len(pairs)} live runs equal their recorded twin bit for bit (they do where processor and library "
        "versions round alike)."
    )


def _place(trace: Trace) -> tuple[str, str | None, float, int]:
    run = trace.provenance
    return run.model, run.fault, run.strength, run.seed


def _same_loop(trace: Trace, settings: GRPOSettings) -> bool:
    recorded = dict(trace.provenance.config)
    return recorded == {**settings.to_dict(), "steps": recorded["steps"]} and recorded["steps"] >= settings.steps


def _cut(trace: Trace, steps: int) -> Trace:
    table, rows = trace.steps, trace.trajectories
    info = replace(trace.provenance, source="recorded", config={**trace.provenance.config, "steps": steps})
    return Trace(table.loc[:steps], None if rows is None else rows.loc[rows["step"] <= steps], info)


def compare_faults(traces: Sequence[Trace], injections: Sequence[Injection] = CLEAR) -> tuple[Comparison, ...]:
    """Compare every fault of `injections`; a signal that the fault changes by definition is left out."""
    return tuple(
        compare(
            traces,
            item.fault,
            strength=item.strength,
            calibration_seeds=CALIBRATION_SEEDS,
            scored_seeds=SCORED_SEEDS,
            exclude=BY_DEFINITION.get(item.fault, ()),
        )
        for item in injections
    )


BY_DEFINITION = {"update_freeze": ("update_norm",)}
"""Signals that a fault sets directly: they would count as agreement on any model."""
