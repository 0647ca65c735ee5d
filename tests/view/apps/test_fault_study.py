"""Recorded runs are judged by the study that scored them, and only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.triage.study import study
from moeproxy.triage.study_result import RESULT, Study
from moeproxy.view.apps.fault_runs import Asked
from moeproxy.view.apps.fault_study import study_verdict
from moeproxy.view.apps.faults import FaultPanel
from moeproxy.view.apps.recordings import Recordings
from tests.triage import study_synthetic as made
from tests.view.apps.made_runs import recordings

FAULT = next(iter(made.FAULTS))


@pytest.fixture(scope="module")
def scored() -> Study:
    traces = [
        *made.runs("original", made.FAULTS, method="original"),
        *made.runs("cluster-16", made.FAULTS),
        *made.runs("random-16", made.permuted(made.FAULTS)),
        *made.runs("merge-16", {fault: {} for fault in made.FAULTS}),
    ]
    return study(traces, made.PROTOCOL)


def _onsets(scored: Study) -> Mapping[int, int]:
    cells = scored.cells
    ours = cells[(cells["model"] == "original") & (cells["fault"] == FAULT) & (cells["level"] == "clear")]
    return {int(seed): int(onset) for seed, onset in zip(ours["seed"], ours["onset"], strict=True)}


def _asked(scored: Study, *proxies: str) -> Asked:
    return Asked(FAULT, 1.0, _onsets(scored), ("original", *(proxies or ("cluster-16",))), 60)


def test_a_proxy_that_responds_alike_is_said_to_show_the_failure(scored: Study) -> None:
    verdict = study_verdict(scored, _asked(scored), "clear")
    assert verdict is not None
    n = len(_onsets(scored))
    told = verdict.sentences[0]
    assert told.startswith("cluster-16 shows the same failure: among 6 faults of the original")
    assert f"nearest in {n} of {n} seeds; 100% of the signals" in told
    assert f"random-16 0 of {n} seeds" in verdict.text
    assert scored.provenance["protocol_hash"][:8] in verdict.sentences[-1]
    table = verdict.rows.set_index("proxy")
    assert list(table.index) == ["original", "cluster-16", "random-16", "merge-16"]
    assert table.loc[["original", "random-16"], "role"].tolist() == ["ceiling", "control"]
    assert table.loc["cluster-16", "right fault, of 6"] == f"{n} of {n}"
    assert table.loc["merge-16", "nearest"] == "none"


def test_every_number_is_the_study_s_own(scored: Study) -> None:
    verdict = study_verdict(scored, _asked(scored), "clear")
    assert verdict is not None
    cells = scored.cells
    mine = cells[(cells["model"] == "cluster-16") & (cells["fault"] == FAULT) & (cells["level"] == "clear")]
    row = verdict.rows.set_index("proxy").loc["cluster-16"]
    assert row["rank correlation"] == f"{mine['rank'].mean():.2f}"
    assert row["with other faults"] == f"{mine['rank_other'].mean():.2f}"
    assert row["same way"] == f"{mine['direction'].mean():.0%}"
    assert f"rank correlation {mine['rank'].mean():.2f}, {mine['rank_other'].mean():.2f} with" in verdict.text


@pytest.mark.parametrize(
    ("proxy", "words"),
    [("random-16", "moves, but looks more like another fault"), ("merge-16", "does not respond")],
)
def test_a_proxy_that_does_not_show_it_is_said_to_do_what_it_does(scored: Study, proxy: str, words: str) -> None:
    verdict = study_verdict(scored, _asked(scored, proxy), "clear")
    assert verdict is not None
    assert verdict.sentences[0].startswith(f"{proxy} {words}")


def test_what_the_study_did_not_score_it_does_not_judge(scored: Study) -> None:
    asked = _asked(scored)
    moved = {seed: onset + 1 for seed, onset in asked.onsets.items()}
    assert study_verdict(scored, replace(asked, onsets=moved), "clear") is None
    assert study_verdict(scored, replace(asked, models=("original", "gate-16")), "clear") is None
    assert study_verdict(scored, replace(asked, fault="unknown"), "clear") is None
    assert study_verdict(scored, asked, "") is None


def test_what_is_missing_is_said_and_the_rest_is_judged(scored: Study) -> None:
    asked = _asked(scored)
    whole = study_verdict(scored, asked, "clear")
    more = study_verdict(scored, replace(asked, onsets={**asked.onsets, 99: 20}), "clear")
    assert whole is not None
    assert more is not None
    assert more.sentences == (*whole.sentences, "No verdict for seed 99: no recorded run from step 20.")
    strange = study_verdict(scored, replace(asked, models=(*asked.models, "gate-16")), "clear")
    assert strange is not None
    assert strange.sentences[-1] == "No verdict for gate-16: not recorded at this strength."
    assert strange.rows.equals(whole.rows)


def test_a_match_by_definition_alone_is_called_so(scored: Study) -> None:
    cells = scored.cells.copy()
    cells["direction"] = float("nan")
    verdict = study_verdict(replace(scored, cells=cells), _asked(scored), "clear")
    assert verdict is not None
    assert "what the fault sets by its definition, on any model" in verdict.sentences[0]


def test_one_seed_is_told_as_one(scored: Study) -> None:
    asked = _asked(scored)
    seed = asked.seeds[0]
    verdict = study_verdict(scored, replace(asked, onsets={seed: asked.onsets[seed]}), "clear")
    assert verdict is not None
    assert "nearest in 1 of 1 seed;" in verdict.sentences[0]


def test_a_failure_that_the_original_does_not_show_is_nothing_to_reproduce(scored: Study) -> None:
    cells = scored.cells.copy()
    cells.loc[cells["model"] == "original", "detected"] = 0.0
    verdict = study_verdict(replace(scored, cells=cells), _asked(scored), "clear")
    assert verdict is not None
    assert "nothing to reproduce" in verdict.sentences[0]


class _Known(Recordings):
    """Made runs beside a study of other ones."""

    def level(self, fault: str, strength: float) -> str:
        return "clear" if strength == 1 else ""


def test_the_panel_takes_the_study_s_verdict_and_compares_what_it_did_not_score(
    scored: Study, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = recordings()
    cells = scored.cells.copy()
    cells = cells[(cells["fault"] == FAULT) & (cells["level"] == "clear") & cells["seed"].isin([0, 1])]
    cells["fault"], cells["onset"] = "kl_sign", cells["seed"].map(plain.onsets("kl_sign", 1.0))
    monkeypatch.setattr(Recordings, "study", replace(scored, cells=pd.DataFrame(cells)))
    known = _Known(plain.index, [t.provenance for t in plain.traces("original", "")], plain._read, plain.where)
    panel = FaultPanel("kl_sign", out=tmp_path, recordings=known, proxies={})
    assert panel.settle()
    assert panel.verdict.sentences[-1].startswith("From the fidelity study")
    panel.controls.choose("update_freeze")
    assert panel.settle()
    assert "fidelity study" not in panel.verdict.text


def test_a_study_that_cannot_be_read_is_as_none(tmp_path) -> None:
    plain = recordings()
    known = Recordings(plain.index, [t.provenance for t in plain.traces("original", "")], plain._read, tmp_path)
    assert known.study is None
    (tmp_path / RESULT).write_bytes(b"PAR1")
    known = Recordings(plain.index, [t.provenance for t in plain.traces("original", "")], plain._read, tmp_path)
    assert known.study is None
    with pytest.raises(MoeproxyError):
        Study.load(tmp_path / RESULT)
