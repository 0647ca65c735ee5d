"""What a study of remedies keeps: results, runs, and a page whose numbers are those of the results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moeproxy.errors import ComparisonError, FaultError
from moeproxy.lab.bench import Model, injection_of
from moeproxy.lab.sweep import result_path
from moeproxy.places import data_dir
from moeproxy.triage import remedy_study as module
from moeproxy.triage.catalogue import load_catalogue
from moeproxy.triage.remedy import Case, Told, treated
from moeproxy.triage.remedy_page import page
from moeproxy.triage.remedy_recorded import PAGE, SCORES, STUDY, TABLE, RemedyStudy
from moeproxy.triage.remedy_result import Kind, Remedy, Trial
from moeproxy.triage.remedy_study import study, treated_runs
from moeproxy.triage.remedy_table import reversals, scores
from moeproxy.triage.severity import Severity
from tests.triage import study_synthetic as made

ILL, BETTER, HEALTHY = Severity(0.3, 0.9, 0.0), Severity(0.0, 0.3, 0.0), Severity(0.0, 0.0, 0.0)


def trial(name: str, kind: Kind, after: Severity | None, *, accepted: bool = False, harmful: bool = False) -> Trial:
    words = "kept" if accepted else "rolled back, no better: severity"
    return Trial(name, kind, ILL, after, 0.01, accepted, harmful, after == HEALTHY, words)


def found(cause: str, *trials: Trial, model: str = "cluster-16", before: Severity = ILL) -> Remedy:
    return Remedy(model, cause, 0, 12, before, 0.01, trials, ("tis",), 1.5, {"versions": {}})


KEPT = trial("lower_rate", "mitigation", BETTER, accepted=True)
MENDED = trial("rescore", "repair", HEALTHY, accepted=True)
WORSE = trial("stronger_kl", "mitigation", Severity(1.0, 1.0, 0.0), harmful=True)
STUDIED = RemedyStudy(
    (found("kl_sign", WORSE, KEPT, MENDED), found("kl_explosion", WORSE), found("delayed_credit", before=HEALTHY)),
    (found("kl_sign", replace(KEPT, accepted=False, harmful=True), MENDED, model="original"),),
)


def run(remedy: str, model: str = "cluster-16", fault: str = "kl_sign") -> made.Trace:
    trace = made.run(model, 0, fault=fault, effect={"kl": 9}, onset=12)
    return made.Trace(trace.steps, trace.trajectories, replace(trace.provenance, remedies=((remedy, 12),)))


def test_a_study_survives_its_folder(tmp_path: Path) -> None:
    runs = [run("lower_rate"), run("rescore"), run("lower_rate", "original")]
    loaded = RemedyStudy.load(STUDIED.save(tmp_path / "s", runs))
    assert loaded == STUDIED
    assert loaded.found("cluster-16", "kl_sign") == STUDIED.proxies[0]
    assert loaded.found("original", "kl_sign", 0) == STUDIED.originals[0]
    assert loaded.found("original", "kl_sign", 1) is loaded.found("original", "kl_explosion") is None
    assert loaded.faults == ("kl_sign", "kl_explosion", "delayed_credit")
    assert loaded.models == ("cluster-16", "original")
    kept = loaded.treated("original", "kl_sign", 0, "lower_rate")
    assert kept is not None
    pd.testing.assert_frame_equal(kept.steps, runs[2].steps)
    assert (kept.provenance.source, kept.provenance.remedies) == ("recorded", (("lower_rate", 12),))
    assert loaded.treated("original", "kl_sign", 0, "rescore") is None
    assert repr(loaded) == "RemedyStudy(3 failures treated on a proxy, 1 on the original)"


def test_its_tables_hold_its_trials(tmp_path: Path) -> None:
    STUDIED.save(tmp_path)
    assert len(pd.read_csv(tmp_path / TABLE)) == 3 + 1 + 1 + 2
    assert pd.read_csv(tmp_path / SCORES, index_col="kind").loc["any", "mitigated"] == 0.5
    assert (tmp_path / PAGE).read_text(encoding="utf-8").startswith("# Which remedies help")
    assert RemedyStudy.load(tmp_path).treated("cluster-16", "kl_sign", 0, "lower_rate") is None


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / STUDY).write_text('{"format": "other", "version": 1}')
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ComparisonError, match="no study of remedies"):
            RemedyStudy.load(folder)
    with pytest.raises(ComparisonError, match="0 remedies"):
        STUDIED.save(tmp_path, [made.run("cluster-16", 0)])


def test_the_page_says_what_the_results_say() -> None:
    text = page(STUDIED.proxies, STUDIED.originals, {"kl_sign": "FA"})
    front, _, back = text.partition("## Tried and rolled back")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in front.splitlines() if line[:1] == "|"]
    by_kind = {row[0]: row[1:] for row in rows}
    #                               ill      mitigated healthy bit   change trials harm kept  there helps harms
    assert by_kind["mitigation"] == ["2 of 3", "50%", "0%", "0%", "-38%", "3", "67%", "0%", "1", "0%", "100%"]
    assert by_kind["repair"] == ["2 of 3", "50%", "50%", "50%", "-50%", "1", "0%", "0%", "1", "100%", "0%"]
    assert "missed, 50% by any remedy and 50% without replacing the broken part" in text
    assert "46.25%" in text
    assert "Of the 1 ill runs with a kept mitigation 0 are then their healthy twin bit for bit" in text
    assert "50% of the 2 ill runs are mitigated and 0% are as healthy runs" in text
    by_fault = {row[1]: row for row in rows if row[1].startswith("`")}
    assert by_fault["`kl_sign`"][3:8] == ["0.400", "`lower_rate`", "0.100", "`rescore`", "**0.000**"]
    assert by_fault["`kl_sign`"][8:] == ["0.400", "0.100, harms", "**0.000**"]
    assert by_fault["`delayed_credit`"][3] == "0.000, not ill"
    assert re.findall(r"\| (\S+) \| `(\w+)` \| 0 \| `(\w+)`", back) == [
        ("cluster-16", "kl_sign", "stronger_kl"),
        ("cluster-16", "kl_explosion", "stronger_kl"),
        ("original", "kl_sign", "lower_rate"),
    ]


REVERSED = trial("lower_rate", "mitigation", HEALTHY, accepted=True)


@pytest.mark.parametrize("order", [1, -1])
def test_of_remedies_that_mend_alike_the_exact_one_is_the_best(order: int) -> None:
    guard = replace(REVERSED, exact=False)
    both = found("kl_sign", *(guard, MENDED)[::order])
    assert both.best() == MENDED
    assert both.best("mitigation") == guard
    assert scores([both]).loc["any", "restored"] == 1.0
    assert scores([both]).loc["mitigation", "restored"] == 0.0


def test_exact_reversals_are_counted_apart() -> None:
    mended = replace(REVERSED, remedy="tis", exact=False)
    studied = [
        *(found("a", REVERSED), found("b", KEPT, REVERSED), found("c", mended), found("d", WORSE, MENDED)),
        found("e", REVERSED, before=HEALTHY),
    ]
    told = reversals(studied, "mitigation")
    assert told == {"ill": 4, "kept": 3, "exact": 2, "mitigated": 0.5, "recovered": 0.25}
    assert reversals(studied, "repair") == {"ill": 4, "kept": 1, "exact": 1, "mitigated": 0.0, "recovered": 0.0}
    text = page(studied)
    assert "Of the 3 ill runs with a kept mitigation 2 are then their healthy twin bit for bit" in text
    assert "By mitigations that do not, 50% of the 4 ill runs are mitigated and 25% are as healthy runs" in text
    assert "No mitigation was kept." in page([found("d", WORSE)])


def test_the_shipped_page_is_that_of_the_shipped_results() -> None:
    folder = data_dir() / "remedy"
    study = RemedyStudy.load(folder)
    families = {fault: entry.family for fault, entry in load_catalogue().items()}
    assert (folder / PAGE).read_text(encoding="utf-8") == page(study.proxies, study.originals, families)


def test_a_page_of_nothing_has_no_number() -> None:
    assert "No run was ill." in page([])


def model(label: str) -> Model:
    return Model(data_dir() / "models" / "qwen3-moe-tools", label, "original")


def test_the_treated_runs_of_a_study_are_found_by_what_they_are(tmp_path: Path) -> None:
    original, proxy = model("original"), model("cluster-16")
    onset = injection_of("kl_sign", "clear", 0).onset
    placed = RemedyStudy(
        tuple(replace(one, onset=onset) for one in STUDIED.proxies[:1]),
        tuple(replace(one, onset=onset) for one in STUDIED.originals),
    )
    for name, of in (("lower_rate", proxy), ("rescore", proxy), ("rescore", original)):
        spec = treated(of.spec(0, injection_of("kl_sign", "clear", 0)), [name], onset)
        run(name, of.label).save(result_path(spec, tmp_path))
    made_runs = treated_runs(placed, (proxy, original), tmp_path)
    assert [(t.provenance.model, t.provenance.remedies[0][0]) for t in made_runs] == [
        *(("cluster-16", "lower_rate"), ("cluster-16", "rescore"), ("original", "rescore"))
    ]


def test_the_original_is_given_what_was_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []
    results = {"found": [STUDIED.proxies[1]]}
    monkeypatch.setattr(module, "cases", lambda of, faults, seeds, *_, **__: [(of.label, fault) for fault in faults])
    monkeypatch.setattr(module, "try_many", lambda *_, **__: results["found"])
    monkeypatch.setattr(module, "try_on", lambda found, cases, *_, **__: asked.append((cases[0][0], len(found))) or [])
    models = (model("cluster-16"), model("original"))
    assert study(*models, tmp_path, faults=["kl_explosion"]).proxies == (STUDIED.proxies[1],)
    assert asked == [], "nothing was kept"
    results["found"] = [STUDIED.proxies[0]]
    study(*models, tmp_path, faults=["kl_sign"])
    assert asked == [("original", 1)]
    with pytest.raises(FaultError, match="typo"):
        study(*models, tmp_path, faults=["typo"])


def test_the_command_says_every_trial_and_writes_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stand_in(proxy: Model, *_: Any, told: Told, faults: list[str], seeds: list[int], **__: Any) -> RemedyStudy:
        assert (faults, seeds) == (["kl_sign"], [0, 1])
        case = object.__new__(Case)  # without the healthy runs that it is judged by: nobody asks for them here
        for name, value in (("spec", proxy.spec(1)), ("cause", "kl_sign")):
            object.__setattr__(case, name, value)
        told(case, KEPT)
        return STUDIED

    monkeypatch.setattr(module, "study", stand_in)
    monkeypatch.setattr(module, "treated_runs", lambda *_: [run("lower_rate")])
    monkeypatch.setattr(module, "take_packed", lambda *_: 0)
    proxy = str(data_dir() / "models" / "qwen3-moe-tools")
    places = ["--proxy", proxy, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert module.main([*places, "--faults", "kl_sign", "--seeds", "0", "1"]) == 0
    out, err = capsys.readouterr()
    assert "qwen3-moe-tools, kl_sign, seed 1: lower_rate kept" in err
    assert "any: 50% of 2 ill runs mitigated (of 3)" in out
    assert RemedyStudy.load(tmp_path / "out") == STUDIED
