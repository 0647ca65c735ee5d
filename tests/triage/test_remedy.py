"""What is kept and what is rolled back, on runs of known answer; and the closed loop itself, on a short real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import ComparisonError, LabError
from moeproxy.lab import budget
from moeproxy.lab.bench import Model
from moeproxy.lab.run import run
from moeproxy.lab.settings import Application, GRPOSettings, Injection, RunSpec
from moeproxy.lab.sweep import result_path
from moeproxy.lab.sweep_progress import SweepProgress, Watch
from moeproxy.places import data_dir
from moeproxy.traces import Trace
from moeproxy.traces.pack import load_bench
from moeproxy.triage import remedy as module
from moeproxy.triage.remedy import Case, _Log, prepare_snapshots, treated, try_on, try_remedies
from moeproxy.triage.remedy_result import Remedy, Transfer, Trial, judge, not_ended, transfers
from moeproxy.triage.remedy_study import main, take, take_packed
from moeproxy.triage.remedy_table import scores, table, words
from moeproxy.triage.severity import Calibrated, Healthy, Severity
from moeproxy.triage.study_protocol import Protocol
from tests.triage import study_synthetic as made

ONSET = 20
ILL, BETTER, HEALTHY = Severity(0.3, 0.9, 0.0), Severity(0.0, 0.3, 0.0), Severity(0.0, 0.0, 0.0)
MODEL = data_dir() / "models" / "qwen3-moe-tools"
SHORT = GRPOSettings(steps=6, prompts=4, samples=4, tasks=64, environment="calculator", max_new_tokens=8)


@pytest.fixture(scope="module")
def healthy() -> Healthy:
    calibration = [made.run("original", seed) for seed in made.CALIBRATION]
    return Healthy(made.run("original", 0), Calibrated.of(calibration, made.PROTOCOL))


def broken(effect: dict[str, float], *, reward: float = 1.0) -> Trace:
    trace = made.run("original", 0, fault="x", effect=effect, onset=ONSET)
    steps = trace.steps.copy()
    steps.loc[ONSET:, "reward_mean"] *= reward
    return Trace(steps, trace.trajectories, trace.provenance)


def judged(before: Trace, after: Trace, healthy: Healthy) -> Trial:
    return judge("tis", "mitigation", before, after, healthy, ONSET)


def test_what_helps_is_kept(healthy: Healthy) -> None:
    ill = broken({"kl": 30, "grad_norm": 30, "entropy": -30})
    trial = judged(ill, broken({"kl": 30}), healthy)
    assert trial.accepted
    assert not trial.recovered
    assert not trial.harmful
    assert trial.change is not None
    assert -0.9 < trial.change < -0.2
    assert trial.words.startswith("kept: severity")


def test_the_twin_is_a_recovery_bit_for_bit(healthy: Healthy) -> None:
    trial = judged(broken({"kl": 30}), healthy.twin, healthy)
    assert trial.accepted
    assert trial.recovered
    assert trial.exact
    assert trial.change == -1


def test_what_changes_nothing_or_harms_is_rolled_back(healthy: Healthy) -> None:
    ill = broken({"kl": 30})
    same, worse = judged(ill, ill, healthy), judged(ill, broken({"kl": 30, "grad_norm": 30}), healthy)
    assert (same.accepted, same.harmful, same.change) == (False, False, 0)
    assert "no better" in same.words
    assert (worse.accepted, worse.harmful) == (False, True)
    assert "worse" in worse.words


def test_a_little_better_is_no_better(healthy: Healthy) -> None:
    """Two runs that are equally ill differ by more than healthy ones do: a tenth of the severity is the least."""
    effect = {"kl": 30.0, "grad_norm": 30.0, "response_length": 30.0}
    trial = judged(broken(effect), broken({**effect, "kl": 24.0}), healthy)
    assert trial.after is not None
    assert 0 < trial.before.value - trial.after.value < 0.1 * trial.before.value
    assert not trial.accepted


def test_a_remedy_that_costs_reward_is_rolled_back_though_severity_falls(healthy: Healthy) -> None:
    ill = broken({"kl": 40, "grad_norm": 40, "entropy": -40, "response_length": 40, "logprob_diff_mean": 40})
    trial = judged(ill, broken({}, reward=0.6), healthy)
    assert trial.after is not None
    assert trial.after.value < trial.before.value
    assert not trial.accepted
    assert "costs reward" in trial.words


def test_a_remedy_that_makes_steps_not_finite_is_rolled_back(healthy: Healthy) -> None:
    ill = broken({"kl": 40, "grad_norm": 40, "entropy": -40, "response_length": 40, "logprob_diff_mean": 40})
    steps = broken({}).steps.copy()
    steps.loc[ONSET + 28 :, "router_max_violation/0"] = np.nan
    trial = judged(ill, Trace(steps, ill.trajectories, ill.provenance), healthy)
    assert not trial.accepted
    assert "not finite" in trial.words


def test_a_run_that_failed_is_not_kept(healthy: Healthy) -> None:
    trial = not_ended("tis", "mitigation", broken({"kl": 30}), healthy, ONSET, "exit code 1")
    assert (trial.accepted, trial.recovered, trial.harmful, trial.change) == (False, False, False, None)
    assert trial.words == "failed: exit code 1"


def trial(name: str, kind: str, after: Severity | None, *, accepted: bool = False, harmful: bool = False) -> Trial:
    return Trial(name, kind, ILL, after, 0.01, accepted, harmful, after == HEALTHY, "words")  # pyright: ignore


def found(cause: str, *trials: Trial, model: str = "cluster-16", before: Severity = ILL) -> Remedy:
    return Remedy(model, cause, 0, 12, before, 0.01, trials, ("tis",), 1.5, {"versions": {}})


KEPT = trial("lower_rate", "mitigation", BETTER, accepted=True)
MENDED = trial("rescore", "repair", HEALTHY, accepted=True)
WORSE = trial("stronger_kl", "mitigation", Severity(1.0, 1.0, 0.0), harmful=True)


def test_a_remedy_survives_its_file_and_shows_itself(tmp_path: Path) -> None:
    one = found("kl_sign", WORSE, KEPT, trial("tis", "mitigation", None), MENDED)
    assert Remedy.load(one.save(tmp_path / "a.json")) == one
    assert (one.best(), one.best("mitigation"), one.best("repair")) == (MENDED, KEPT, MENDED)
    assert repr(one) == "Remedy(kl_sign on cluster-16: rescore, severity 0.400 to 0.000 (kept); 4 tried, 1 not)"
    page = one._repr_html_()
    assert page.count("<tr>") == 5
    assert "&lt;b&gt;" in found("<b>", KEPT)._repr_html_()
    assert "nothing helped" in repr(found("kl_sign", WORSE))
    assert "nothing to mend" in repr(found("kl_sign", before=HEALTHY))


def test_what_is_no_remedy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "other"}')
    for name in ("a.json", "none.json"):
        with pytest.raises(ComparisonError, match=r"what Remedy\.save wrote"):
            Remedy.load(tmp_path / name)


def test_transfer_to_the_original() -> None:
    proxy = found("kl_sign", WORSE, KEPT, MENDED)
    original = found("kl_sign", replace(KEPT, harmful=True, accepted=False), MENDED, model="original")
    first, second = transfers(proxy, original)
    assert first == Transfer("kl_sign", 0, KEPT, original.trials[0])
    assert (first.helps, second.helps) == (False, True)
    well = found("kl_sign", model="original", before=HEALTHY)
    assert [pair.original for pair in transfers(proxy, well)] == [None, None]
    with pytest.raises(ComparisonError, match="lower_rate was not tried on original"):
        transfers(proxy, found("kl_sign", MENDED, model="original"))
    with pytest.raises(ComparisonError, match="the same failure"):
        transfers(proxy, found("kl_explosion", KEPT, MENDED, model="original"))


def test_scores_of_known_counts() -> None:
    """Four runs: one mitigated and repaired, one repaired, one not helped, one not ill."""
    proxies = [
        found("a", WORSE, KEPT, MENDED),
        found("b", WORSE, MENDED),
        found("c", WORSE, trial("tis", "mitigation", None)),
        found("d", before=HEALTHY),
    ]
    originals = [
        found("a", replace(KEPT, accepted=False, harmful=True), MENDED, model="original"),
        found("b", model="original", before=HEALTHY),
    ]
    rows = scores(proxies, originals)
    assert rows["ill"].tolist() == [3, 3, 3]
    assert rows["mitigated"].tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert rows["recovered"].tolist() == pytest.approx([0, 2 / 3, 2 / 3])
    assert rows["restored"].tolist() == pytest.approx([0, 2 / 3, 2 / 3])
    assert rows["change"].tolist() == pytest.approx([0, -1, -1])
    assert rows["trials"].tolist() == [5, 2, 7]
    assert rows["harm_tried"].tolist() == pytest.approx([3 / 5, 0, 3 / 7])
    assert rows["harm_kept"].tolist() == [0, 0, 0]
    assert rows["moved"].tolist() == [1, 2, 3]
    assert rows["not_ill_there"].tolist() == [0, 1, 1]
    assert rows["helps"].tolist() == [0, 1, 0.5]
    assert rows["harms"].tolist() == [1, 0, 0.5]
    said = words(rows).splitlines()
    assert said[0].startswith("mitigation: 33% of 3 ill runs mitigated (of 4), 0% as healthy runs are, 0% bit for bit")
    assert said[0].endswith("on the original 0% of 1 help, 100% harm")
    frame = table(proxies, originals, {"a": "OD"})
    assert len(frame) == 11
    assert frame["stage"].value_counts().to_dict() == {"proxy": 8, "original": 3}
    assert frame.loc[frame["fault"] == "a", "family"].unique().tolist() == ["OD"]
    assert not frame.loc[frame["fault"] == "d", "ill"].any()


def test_nothing_was_run_gives_no_number() -> None:
    assert words(scores([])).startswith("mitigation: – of 0 ill runs mitigated (of 0)")


def test_cases_know_their_remedies(healthy: Healthy) -> None:
    spec = RunSpec(Path("m"), injection=Injection("kl_sign", 1.0, 20))
    assert (Case(spec, healthy).start, Case(spec, healthy).queue[0]) == (20, "kl_off")
    guess = Case(spec, healthy, cause="routing_mismatch", onset=18)
    assert (guess.start, guess.queue[0]) == (18, "routing_replay")
    dense = Healthy(Trace(healthy.twin.steps, None, replace(healthy.twin.provenance, n_experts=0)), healthy.calibrated)
    assert replace(guess, healthy=dense).queue[0] == "tis"
    with pytest.raises(LabError, match="no remedy is known"):
        _ = Case(RunSpec(Path("m")), healthy, cause="typo").queue


def test_recorded_runs_are_taken_not_made(tmp_path: Path) -> None:
    (trace, *_) = load_bench(data_dir() / "bench", models=["original"], faults=[None], trajectories=False)
    seed = trace.provenance.seed
    spec = Model(MODEL, "original", "original").spec(seed)
    assert take_packed([spec], data_dir() / "bench", tmp_path / "one") == 1
    assert Trace.load(result_path(spec, tmp_path / "one")).provenance.seed == seed
    assert take_packed([spec], data_dir() / "bench", tmp_path / "one") == 0
    assert take([spec, replace(spec, seed=9)], tmp_path / "one", tmp_path / "two") == 1
    assert take([spec], tmp_path / "one", tmp_path / "two") == 0
    assert result_path(spec, tmp_path / "two").read_bytes() == result_path(spec, tmp_path / "one").read_bytes()


def test_the_study_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--proxy", str(tmp_path / "none"), "--runs", str(tmp_path / "runs")]) == 1
    assert "no proxy" in capsys.readouterr().err


def test_of_each_kind_the_next_is_tried_until_the_run_has_recovered(healthy: Healthy) -> None:
    spec = RunSpec(Path("m"), injection=Injection("kl_sign", 1.0, ONSET))
    case = Case(spec, healthy, remedies=("tis", "fp32_head", "icepop", "reconvert"))
    log = _Log(case, spec, broken({"kl": 30}))
    assert [name for _, name, _ in log.due()] == ["tis", "fp32_head"]
    log.trials = [trial("tis", "mitigation", BETTER, accepted=True), trial("fp32_head", "repair", HEALTHY)]
    assert [name for _, name, _ in log.due()] == ["icepop", "reconvert"]
    log.trials = [trial("tis", "mitigation", HEALTHY, accepted=True), trial("fp32_head", "repair", None)]
    assert [(name, run.remedies) for _, name, run in log.due()] == [("reconvert", (Application("reconvert", ONSET),))]
    assert log.result(1.0).not_tried == ("icepop", "reconvert")
    assert list(_Log(case, spec, healthy.twin).due()) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"remedies": ("tis", "nope")}, "nope"),
        ({"cause": "nope"}, "no remedy is known for 'nope'"),
        ({"onset": 999}, "it starts at step 999"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_run(
    asked: dict[str, object], said: str, healthy: Healthy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[object] = []
    for name in ("sweep", "try_sweep", "prepare_snapshots"):
        monkeypatch.setattr(module, name, lambda specs, *_, **__: ran.append(specs))
    case = replace(Case(RunSpec(MODEL, injection=Injection("kl_sign", 1.0, 3), settings=SHORT), healthy), **asked)
    with pytest.raises(LabError, match=said):
        try_remedies(case, tmp_path / "runs", snapshots=tmp_path)
    assert ran == []


def test_a_round_over_time_leaves_its_remedies_untried(
    healthy: Healthy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run of a round that had ended is judged; the other, which the budget ended, counts as not tried."""
    now, said = [0.0], list[str]()
    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])

    def try_sweep(specs: list[RunSpec], *_: object, watch: Watch, **__: object) -> None:
        now[0] += 61
        watch(SweepProgress(runs=len(specs), runs_done=1))

    spec = RunSpec(MODEL, injection=Injection("kl_sign", 1.0, ONSET), settings=replace(SHORT, steps=60))
    case = Case(spec, healthy, remedies=("tis", "fp32_head", "icepop"))
    ended = tmp_path / "ended.parquet"
    healthy.twin.save(ended)
    monkeypatch.setattr(module, "sweep", lambda *_, **__: [broken({"kl": 30})])
    monkeypatch.setattr(module, "try_sweep", try_sweep)
    monkeypatch.setattr(module, "result_path", lambda run, out: ended if run.remedies[0].remedy == "tis" else out)
    found = try_remedies(case, tmp_path, minutes=1.0, told=lambda _, one: said.append(one.remedy))
    assert said == [one.remedy for one in found.trials] == ["tis"]
    assert found.not_tried == ("fp32_head", "icepop")


@pytest.mark.slow
def test_the_closed_loop_keeps_what_mends_and_rolls_back_what_does_not(tmp_path: Path) -> None:
    protocol = replace(Protocol(), windows=((0, 2), (2, 4)), spread_onsets=(2, 3))
    recorded = load_bench(data_dir() / "bench", models=["original"], faults=[None], trajectories=False)
    calibration = [trace for trace in recorded if trace.provenance.seed >= 100][:8]
    spec = RunSpec(MODEL, seed=1, settings=SHORT, injection=Injection("update_freeze", 1.0, 3))
    twin = run(replace(spec, injection=None))
    case = Case(spec, Healthy(twin, Calibrated.of(calibration, protocol)), remedies=("restart", "verified_update"))
    out, kept = tmp_path / "runs", tmp_path / "snapshots"
    with pytest.raises(LabError, match="spent before the broken run had ended"):
        try_remedies(case, out, minutes=1e-6, workers=1)
    said: list[str] = []
    made_now = try_remedies(case, out, snapshots=kept, workers=1, told=lambda _, trial: said.append(trial.remedy))
    assert sorted(said) == ["restart", "verified_update"]
    by_name = {one.remedy: one for one in made_now.trials}
    assert (by_name["restart"].accepted, by_name["restart"].change) == (False, 0)  # the same run, bit for bit
    assert by_name["verified_update"].exact
    assert made_now.best() == by_name["verified_update"]
    assert try_remedies(case, out, minutes=1e-6, workers=1).trials == (), "the broken run is there, time is not"
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert try_remedies(case, out, snapshots=kept, workers=1).trials == made_now.trials
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")} == before
    (there,) = try_on([made_now], [case], out, workers=1)
    assert [pair.helps for pair in transfers(made_now, there)] == [True]
    assert result_path(treated(spec, ["verified_update"], 3), out).is_file()


def test_one_healthy_run_leaves_the_snapshots_of_a_seed(tmp_path: Path) -> None:
    spec = RunSpec(MODEL, seed=1, settings=replace(SHORT, steps=12), injection=Injection("update_freeze", 1.0, 7))
    files = prepare_snapshots([spec, replace(spec, injection=Injection("kl_sign", 1.0, 3))], tmp_path, workers=1)
    assert [file.name.rpartition("after")[2] for file in files] == ["00005.pt"]
    stamp = files[0].stat().st_mtime_ns
    assert prepare_snapshots([spec], tmp_path, workers=1) == files
    assert files[0].stat().st_mtime_ns == stamp
