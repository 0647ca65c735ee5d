"""What a user is told is scored strictly: no alarm is no cause, unknown is no cause, what is cut is not seen."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from moeproxy.places import data_dir
from moeproxy.traces.pack import load_bench
from moeproxy.traces.trace import Trace
from moeproxy.triage import evaluate_logged
from moeproxy.triage.alone import Priors
from moeproxy.triage.detect import ALONE, BESIDE
from moeproxy.triage.evaluate_logged import as_logged
from moeproxy.triage.learn import learn_alone, learn_beside, learn_priors, references, runs_of
from moeproxy.triage.library import Library
from moeproxy.triage.signal_sets import EVERYTHING, nearest_set, signal_sets

pytestmark = pytest.mark.slow

FAULTS = ("gradient_overflow", "kl_explosion", "tool_call_error", "router_frozen")


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    models = ["original", "cluster-16", "cluster-8"]
    """Clear faults, and healthy runs of the usual settings: those of others add time and nothing to what is asked."""
    found = load_bench(data_dir() / "bench", models=models, faults=[None, *FAULTS], trajectories=False)
    runs = runs_of(found)
    usual = [members[0].info.config for members in references(runs).values()]
    kept = [run.level == "clear" or (run.info.healthy and run.info.config in usual) for run in runs]
    return [trace for trace, keep in zip(found, kept, strict=True) if keep]


@pytest.fixture(scope="module")
def libraries(traces: list[Trace]) -> dict[str, Library]:
    runs = runs_of(traces)
    return {BESIDE: learn_beside(runs), ALONE: learn_alone(runs, learn_priors(runs))}


@pytest.fixture(scope="module")
def scores(traces: list[Trace], libraries: dict[str, Library]) -> pd.DataFrame:
    """Of the largest set of signals and the smallest: the others differ in their names alone."""
    sets = list(signal_sets().items())
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(evaluate_logged, "signal_sets", lambda: dict([sets[0], sets[-1]]))
        return pd.DataFrame(as_logged(traces, libraries))


def test_fewer_signals_tell_less(scores: pd.DataFrame) -> None:
    at = scores[(scores["model"] == "all") & (scores["level"] == "clear") & (scores["mode"] == BESIDE)]
    recall = at.set_index("signals")["recall"]
    assert recall[EVERYTHING] >= 0.9
    assert recall.iloc[-1] < recall[EVERYTHING], "a frozen router is not seen in loss, reward and length"
    assert set(at["runs"]) == {3 * 3 * len(FAULTS)}


def test_a_cause_is_given_only_with_an_alarm(scores: pd.DataFrame) -> None:
    assert (scores["first"] <= scores["among_3"]).all()
    assert (scores["among_3"] <= scores["recall"] + 1e-9).all()
    assert (scores["first"] > 0.5).any()


def test_unknown_is_no_cause(
    traces: list[Trace], libraries: dict[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_logged, "signal_sets", lambda: {EVERYTHING: None})
    whole = Library.calibrated
    monkeypatch.setattr(Library, "calibrated", lambda self: replace(whole(self), farthest=0.0))
    found = pd.DataFrame(as_logged(traces, libraries))
    assert found["recall"].max() > 0.9
    assert found[["first", "among_3", "other_models"]].max().max() == 0


def test_logs_hold_what_their_keys_name() -> None:
    sets = signal_sets()
    assert sets[EVERYTHING] is None
    for name in ("the keys of trl", "the keys of verl"):
        assert {"grad_norm", "kl", "reward_mean"} <= (sets[name] or set())
        assert "router_load_entropy" not in (sets[name] or set())


def test_a_log_has_the_scores_of_the_set_that_it_is_nearest_to() -> None:
    everything = set(Priors.load().contrast)
    for name, signals in signal_sets().items():
        held = everything if signals is None else signals
        assert nearest_set(held) == name
        assert nearest_set(sorted(held)[1:]) == name, "one signal less, or more, makes no other log"
        assert nearest_set([*held, "somebody's own"]) == name
