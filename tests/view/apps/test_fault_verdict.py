"""The verdict of the fault panel: one comparison for each onset, controls beside the proxies."""

from __future__ import annotations

from collections.abc import Iterator

from moeproxy.traces.trace import Trace
from moeproxy.view.apps.fault_runs import Asked
from moeproxy.view.apps.fault_verdict import judge
from tests.view.apps.made_runs import CALIBRATION, MODELS, ONSETS, run

HEALTHY = [run(model, seed) for model in MODELS for seed in (0, 1, *CALIBRATION)]


def _asked(fault: str, models: tuple[str, ...] = ("original", "cluster-16")) -> Asked:
    return Asked(fault, 1.0, ONSETS[fault], models, 40)


def _broken(fault: str, models: tuple[str, ...] = MODELS) -> list[Trace]:
    return [run(model, seed, fault, onset=ONSETS[fault][seed]) for model in models for seed in (0, 1)]


def test_seeds_of_one_onset_are_compared_together() -> None:
    found = judge(_asked("update_freeze"), HEALTHY, _broken("update_freeze"))
    assert len(found.comparisons) == 1
    assert found.comparisons[0].scored_seeds == (0, 1)
    assert found.rows["proxy"].tolist() == ["cluster-16", "random-16"]
    assert found.rows["role"].tolist() == ["proxy", "control"]
    assert "update_norm" not in found.comparisons[0].signals, "the fault sets it directly"
    assert not found.comparisons[0].visible
    assert "nothing to reproduce" in found.text


def test_seeds_of_different_onsets_are_compared_one_by_one() -> None:
    found = judge(_asked("kl_sign"), HEALTHY, _broken("kl_sign"))
    assert [one.onset for one in found.comparisons] == [12, 20]
    assert found.rows["seeds"].tolist() == ["0", "0", "1", "1"]
    assert found.rows["onset"].tolist() == ["12", "12", "20", "20"]
    assert all(one.significant == ("kl",) for one in found.comparisons)
    assert set(found.rows["same way"]) == {"100%"}
    assert found.text.count("cluster-16 (seed") == 2
    assert "Healthy against healthy" in found.text
    assert any(text.startswith("At 16 experts") for text in found.sentences), "controls are named"


def test_what_is_drawn_stands_first() -> None:
    found = judge(_asked("kl_sign", ("original", "random-16")), HEALTHY, _broken("kl_sign"))
    assert found.rows["proxy"].tolist()[:2] == ["random-16", "cluster-16"]


def test_a_group_without_runs_is_named_and_the_others_are_judged() -> None:
    broken = [trace for trace in _broken("kl_sign") if trace.provenance.seed == 0]
    found = judge(_asked("kl_sign"), HEALTHY, broken)
    assert len(found.comparisons) == 1
    assert len(found.missing) == 1
    assert found.missing[0].startswith("seed 1: ")
    assert "No verdict for seed 1: no finished run of original or cluster-16 with kl_sign from step 20." in found.text
    without = [t for t in _broken("kl_sign") if (t.provenance.model, t.provenance.seed) != ("cluster-16", 1)]
    partly = judge(_asked("kl_sign"), HEALTHY, without)
    assert partly.missing == ("seed 1: no finished run of cluster-16 with kl_sign from step 20",)
    assert len(partly.comparisons) == 2, "the controls of seed 1 are judged"
    none = judge(_asked("kl_sign"), HEALTHY, [])
    assert none.comparisons == ()
    assert none.rows.empty
    assert len(none.missing) == 2


def test_the_nearest_fault_is_sought_among_those_that_began_at_the_same_step() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def others(onset: int, seeds: tuple[int, ...]) -> Iterator[Trace]:
        asked.append((onset, seeds))
        return iter([run("original", seeds[0], "update_freeze", onset=onset)])

    found = judge(_asked("kl_sign"), HEALTHY, _broken("kl_sign"), others)
    assert asked == [(12, (0,)), (20, (1,))]
    assert all(set(one.known_faults) == {"kl_sign", "update_freeze"} for one in found.comparisons)
    assert set(found.rows["right fault"]) == {"1 of 1, among 2"}
