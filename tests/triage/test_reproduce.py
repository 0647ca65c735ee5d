"""A failure is laid over the proxy's responses: the fault that was injected comes first, and the budget is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import ComparisonError, LabError
from moeproxy.lab import budget
from moeproxy.lab.bench import SETTINGS
from moeproxy.lab.jobs import Failure
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.sweep import SweepResult
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.places import data_dir
from moeproxy.traces import Trace
from moeproxy.traces.pack import load_bench
from moeproxy.triage import reproduce as module
from moeproxy.triage.aligned import BROKEN, WINDOWS, Aligned
from moeproxy.triage.detect import BESIDE
from moeproxy.triage.diagnose import diagnose
from moeproxy.triage.evaluate_reproduce import reproduction_scores
from moeproxy.triage.learn import Run, learn_beside
from moeproxy.triage.learned import load_library
from moeproxy.triage.reproduce import Live, ProxyRuns, Reproduction, reproduce, score

FAULTS = ("stale_rollout", "router_frozen", "nan_poison")
SPEC = RunSpec(Path("data/models/x"), "cluster-16", "cluster", settings=SETTINGS)


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[str, str], list[Trace]]:
    traces = load_bench(data_dir() / "bench", models=["original", "cluster-16"], faults=[*FAULTS, None])
    found: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        run = trace.provenance
        usual = run.config["learning_rate"] == 1.5e-4 and run.config["temperature"] == 1.0
        if run.strength == 1 or (run.fault is None and usual and run.seed >= 100 and run.seed < 112):
            found.setdefault((run.model, run.fault or ""), []).append(trace)
    return found


@pytest.fixture(scope="module")
def proxy(recorded) -> ProxyRuns:
    return ProxyRuns([trace for (model, _), some in recorded.items() if model == "cluster-16" for trace in some])


@pytest.mark.parametrize("fault", FAULTS)
def test_the_injected_fault_matches_best(recorded, proxy: ProxyRuns, fault: str) -> None:
    library = load_library(BESIDE)
    trace = recorded["original", fault][0]
    others = library.only((library.seed_N != trace.provenance.seed) & (library.model_N != "original"))
    found = reproduce(trace, proxy, recorded["original", ""], library=others)
    first = found.candidates[0]
    assert first.fault == fault
    assert (first.strength, first.n_recorded, first.n_live) == (1.0, 3, 0)
    assert 0 <= found.onset - trace.provenance.onset <= 5  # weights grow stale slowly
    assert first.agree
    assert fault in found.sentences[0]
    assert [one.score for one in found.candidates] == sorted((one.score for one in found.candidates), reverse=True)


def test_results_are_kept(recorded, proxy: ProxyRuns, tmp_path: Path) -> None:
    found = reproduce(recorded["original", "stale_rollout"][0], proxy, recorded["original", ""])
    loaded = Reproduction.load(found.save(tmp_path / "r.json"))
    assert loaded.sentences == found.sentences
    assert loaded._repr_html_() == found._repr_html_()
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ComparisonError, match="no reproduction"):
        Reproduction.load(tmp_path / "r.json")


def test_what_cannot_be_reproduced_is_said(recorded, proxy: ProxyRuns) -> None:
    healthy = recorded["original", ""]
    with pytest.raises(ComparisonError, match="nothing to reproduce: No alarm"):
        reproduce(healthy[0], proxy, healthy[1:])
    with pytest.raises(ComparisonError, match="0 healthy runs of the proxy"):
        reproduce(recorded["original", "nan_poison"][0], ProxyRuns([]), healthy)
    with pytest.raises(ComparisonError, match="runs of cluster-16, original"):
        ProxyRuns([healthy[0], recorded["cluster-16", ""][0]])


def test_the_match_is_a_cosine_over_what_both_have() -> None:
    def of(names: str, *rows: Sequence[float]) -> Aligned:
        response = np.full((len(rows), len(WINDOWS)), np.nan)
        for place, row in enumerate(rows):
            response[place, : len(row)] = row
        return Aligned(tuple(names), response)

    ours = of("ab", [3, 4], [1, 1])
    assert ours.match(of("ba", [1, 1], [3, 4])) == pytest.approx(1)
    assert ours.match(of("a", [-3, -4])) == pytest.approx(-1)
    assert ours.match(of("a", [4, -3])) == pytest.approx(0)
    assert ours.match(of("ac", [3, 4, 7], [9, 9])) == pytest.approx(1)
    assert np.isnan(ours.match(of("c", [1, 2])))


def test_a_signal_that_broke_counts_as_much(recorded, proxy: ProxyRuns) -> None:
    (first, *_) = proxy.of("nan_poison")
    assert BROKEN in first.course.response_XW[first.course.names.index("policy_loss")]


def test_candidates_that_were_not_run_keep_their_place() -> None:
    assert score(0.5, float("nan")) == score(0.5, 0.0) < score(0.5, 0.2) < score(0.5, 0.4)
    assert score(0.9, 0.3) > score(0.1, 0.3)


class Sweeps:
    """Stands in for runs: gives recorded traces, and lets the clock run."""

    def __init__(
        self, recorded, monkeypatch: pytest.MonkeyPatch, seconds: float, failing: str = "", watched: bool = False
    ) -> None:
        self.recorded, self.seconds, self.failing, self.now = recorded, seconds, failing, 0.0
        self.watched = watched
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "sweep", self.sweep)
        monkeypatch.setattr(module, "try_sweep", self.try_sweep)

    def tell(self, watch: Watch, runs: int) -> None:
        if self.watched:
            watch(SweepProgress(runs=runs))

    def sweep(self, specs: Sequence[RunSpec], *_, watch: Watch, **__) -> list[Trace]:
        self.now += self.seconds
        self.tell(watch, len(specs))
        return self.recorded["cluster-16", ""][: len(specs)]

    def try_sweep(self, specs: Sequence[RunSpec], *_, watch: Watch, **__) -> SweepResult:
        self.now += self.seconds
        self.asked += [(spec.fault_name, spec.injection.onset) for spec in specs if spec.injection]
        self.tell(watch, len(specs))
        (fault,) = {spec.injection.fault for spec in specs if spec.injection}
        if fault == self.failing:
            return SweepResult((), tuple(Failure(spec, "out of memory") for spec in specs))
        return _Made(self.recorded.get(("cluster-16", fault), [])[:1])


class _Made:
    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces, self.failures = traces, ()


def test_new_runs_are_made_where_none_is_recorded(recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sweeps = Sweeps(recorded, monkeypatch, seconds=20)
    trace = recorded["original", "stale_rollout"][0]
    found = reproduce(trace, ProxyRuns([]), recorded["original", ""], live=Live(SPEC, tmp_path, minutes=10))
    assert found.model == "cluster-16"
    assert (found.candidates[0].fault, found.candidates[0].n_live) == ("stale_rollout", 1)
    assert len(sweeps.asked) == 5
    assert {onset for _, onset in sweeps.asked} == {min(max(found.onset, 10), 30)}
    assert found.minutes == pytest.approx(6 * 20 / 60)
    assert "not reproduced" in found.candidates[-1].sentence or found.candidates[-1].n_live


def test_recorded_runs_wait_for_enough_healthy_ones(recorded, proxy: ProxyRuns) -> None:
    """A proxy that starts with too few healthy runs keeps its broken ones until they can be judged."""
    healthy, broken = recorded["cluster-16", ""], recorded["cluster-16", "stale_rollout"]
    few = ProxyRuns([*healthy[:5], *broken])
    assert few.runs == []
    few.add_healthy(healthy[5:])
    assert [(run.fault, run.live) for run in few.runs] == [("stale_rollout", False)] * len(broken)
    alike = [run.course.response_XW for run in proxy.of("stale_rollout")]
    for ours, theirs in zip(few.runs, alike, strict=True):
        np.testing.assert_allclose(ours.course.response_XW, theirs)
    few.add_healthy([])
    assert len(few.runs) == len(broken)


def test_known_faults_can_be_run_anew(recorded, proxy: ProxyRuns) -> None:
    fewer = proxy.without(["stale_rollout"])
    assert (len(fewer.of("stale_rollout")), len(fewer.of("nan_poison"))) == (0, len(proxy.of("nan_poison")))
    fewer.add(recorded["cluster-16", "stale_rollout"][:1], live=True)
    assert [run.live for run in fewer.of("stale_rollout")] == [True]
    assert not any(run.live for run in proxy.runs), "the proxy itself is as it was"


def test_a_strength_without_a_match_hides_no_other(proxy: ProxyRuns) -> None:
    (first, *_) = proxy.of("stale_rollout")
    blind = replace(first, strength=0.3, course=Aligned(("other",), np.ones((1, len(WINDOWS)))))
    known = ProxyRuns([])
    for order in ([blind, first], [first, blind]):
        known.runs = order
        found = module._candidate("stale_rollout", 0.5, known, first.course)
        assert (found.strength, found.match) == (first.strength, pytest.approx(1))


def test_the_background_is_that_of_the_best_of_as_many_candidates(proxy: ProxyRuns) -> None:
    """By chance alone the best of five exceeds the level in one case of twenty, as one run does its own."""
    (first, *_) = proxy.of("stale_rollout")
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, np.pi, 4000)

    def turned(angle: float) -> Aligned:
        response = np.zeros((2, len(WINDOWS)))
        response[:, 0] = np.cos(angle), np.sin(angle)
        return Aligned(("a", "b"), response)

    known = ProxyRuns([])
    known.runs = [replace(first, fault="other", course=turned(angle)) for angle in angles]
    course = turned(0.0)
    matches = np.cos(rng.uniform(0, np.pi, (4000, 5)))
    for n in (1, 5):
        level = module._background(known, course, set(), n)
        assert (matches[:, :n].max(1) > level).mean() == pytest.approx(0.05, abs=0.015)


def test_what_the_trace_does_not_know_the_proxy_does_not(recorded, proxy: ProxyRuns) -> None:
    library = load_library(BESIDE)
    trace = recorded["original", "stale_rollout"][0]
    strange = replace(library, farthest=0.0)
    found = reproduce(trace, proxy, recorded["original", ""], library=strange)
    said = diagnose(trace, recorded["original", ""], library=strange).sentences[-1]
    assert found.unknown == said
    assert found.sentences[0].startswith(said)
    assert found.choices == sum(one.match == one.match for one in found.candidates)
    assert reproduce(trace, proxy, recorded["original", ""]).unknown == ""


def test_the_budget_is_kept(recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sweeps = Sweeps(recorded, monkeypatch, seconds=60)
    trace = recorded["original", "stale_rollout"][0]
    found = reproduce(trace, ProxyRuns([]), recorded["original", ""], live=Live(SPEC, tmp_path, minutes=3.5))
    assert len(sweeps.asked) == 2
    assert found.minutes <= 3.5
    assert len(found.left) == 3
    assert any("No time was left" in sentence for sentence in found.sentences)


def test_healthy_runs_count_and_are_said(recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace, healthy = recorded["original", "stale_rollout"][0], recorded["original", ""]
    sweeps = Sweeps(recorded, monkeypatch, seconds=60)
    found = reproduce(trace, ProxyRuns([]), healthy, live=Live(SPEC, tmp_path, minutes=1.5))
    assert sweeps.asked == []
    assert found.minutes == pytest.approx(1.0)
    assert len(found.left) == 5
    (note,) = found.notes
    assert "6 took 1.0 of the 1.5 minutes, and nothing was left for the faults" in note
    found = reproduce(trace, ProxyRuns([]), healthy, live=Live(SPEC, tmp_path, minutes=2.5))
    assert len(sweeps.asked) == 1
    assert found.notes == ("The proxy had too few healthy runs: 6 took 1.0 of the 2.5 minutes.",)


def test_what_overruns_is_ended(recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace, healthy = recorded["original", "stale_rollout"][0], recorded["original", ""]
    known = recorded["cluster-16", ""]
    sweeps = Sweeps(recorded, monkeypatch, seconds=60, watched=True)
    first = tmp_path / "first.parquet"
    monkeypatch.setattr(module, "result_path", lambda spec, out: first if spec.injection or spec.seed == 100 else out)
    recorded["cluster-16", "stale_rollout"][0].save(first)
    with pytest.raises(LabError, match=r"0.5 minutes were spent when 1 of the 6 healthy runs.*give more minutes"):
        reproduce(trace, ProxyRuns([]), healthy, live=Live(SPEC, tmp_path, minutes=0.5))
    found = reproduce(trace, ProxyRuns(known), healthy, live=Live(SPEC, tmp_path, minutes=0.5))
    assert len(sweeps.asked) == 1
    assert len(found.left) == 5
    assert "was ended when the 0.5 minutes were spent" in found.notes[0]
    assert sum(one.n_live for one in found.candidates) == 1, "a run of the round that had ended counts"


def test_what_is_no_proxy_is_refused() -> None:
    with pytest.raises(ComparisonError, match=r"a list in place of the proxy's runs.*ProxyRuns\(traces\)"):
        module._check_proxy([])


def test_a_run_that_fails_is_said(recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Sweeps(recorded, monkeypatch, seconds=1, failing="stale_rollout")
    trace = recorded["original", "stale_rollout"][0]
    found = reproduce(trace, ProxyRuns([]), recorded["original", ""], live=Live(SPEC, tmp_path, minutes=9))
    assert any("stale_rollout on the proxy did not end" in sentence for sentence in found.sentences)


def test_scores_are_shares_of_runs(recorded) -> None:
    runs = [Run.of(trace) for some in recorded.values() for trace in some]
    rows = reproduction_scores(runs, learn_beside(runs))
    assert {(row["tested"], row["proxy"], row["level"], row["runs"]) for row in rows} == {
        ("original", "cluster-16", "clear", 9),
        ("cluster-16", "original", "clear", 9),
    }
    for row in rows:
        assert row["reproduced_top1"] == row["alone_top1"] == 1.0  # three faults that nobody would confuse
