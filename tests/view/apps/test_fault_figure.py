"""What the fault panel draws: which runs, as which lines, in a figure whose traces never change in number."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from moeproxy.lab.faults import FAULTS
from moeproxy.traces.trace import Trace
from moeproxy.view.apps import fault_figure
from moeproxy.view.apps.fault_figure import (
    SLOTS,
    FaultState,
    describe,
    layout_values,
    panel_titles,
    signal_table,
    values,
)
from moeproxy.view.apps.fault_lines import lines, signal
from moeproxy.view.apps.fault_runs import Asked, ModelRuns, gather
from moeproxy.view.apps.fault_text import family_options, fault_html, fault_options, verdict_html
from tests.view.apps.made_runs import run

ASKED = Asked("update_freeze", 1.0, {0: 10}, ("original", "cluster-16"), 40)
TWO = Asked("kl_sign", 1.0, {0: 12, 1: 20}, ("original",), 40)


def _state(asked: Asked = ASKED, **fixed: float) -> FaultState:
    runs = []
    for model in asked.models:
        broken = {s: run(model, s, asked.fault, onset=o, **fixed) for s, o in asked.onsets.items()}
        healthy = {s: run(model, s, **fixed) for s in asked.seeds}
        runs.append(ModelRuns(model, broken, healthy, [*healthy.values(), run(model, 100, **fixed)]))
    return FaultState(asked, tuple(runs))


def test_live_runs_come_first_and_a_growing_one_is_counted() -> None:
    recorded = [run(), run(seed=5), run(fault="update_freeze")]
    finished, growing = [run(source="live")], [run(fault="update_freeze", steps=12, source="live")]
    found = gather(ASKED, "original", recorded, finished, growing)
    assert [len(trace.steps) for trace in found.broken.values()] == [12]
    assert (found.source, found.n_growing) == ("live", 1)
    assert found.healthy[0] is finished[0]
    assert [trace.provenance.seed for trace in found.band] == [0, 5]
    twin = run(steps=3, source="live")
    assert gather(ASKED, "original", recorded, [], [twin]).healthy[0] is twin
    assert gather(ASKED, "original", recorded, [], [twin]).band[0] is recorded[0], "a beginning is no band"
    only = Asked("update_freeze", 1.0, {0: 10}, ("original",), 40, live=False)
    found = gather(only, "original", recorded, finished, growing)
    assert (found.broken[0], found.source, found.n_growing) == (recorded[2], "recorded", 0)


@pytest.mark.parametrize(
    "other",
    [
        run(fault="update_freeze", onset=11),
        run(fault="kl_sign"),
        run(seed=1, fault="update_freeze"),
        run("cluster-16", fault="update_freeze"),
    ],
    ids=["another onset", "another fault", "another seed", "another model"],
)
def test_what_was_not_asked_for_is_passed_over(other: object) -> None:
    assert gather(ASKED, "original", [run(), other], [], []).broken == {}  # pyright: ignore[reportArgumentType]


def test_runs_of_different_onsets_are_laid_over_each_other_by_the_onset() -> None:
    found = lines(TWO, _state(TWO, kl=0.0).runs[0], "kl")
    assert TWO.aligned
    assert TWO.by_onset == {12: (0,), 20: (1,)}
    assert found.steps_S.tolist() == list(range(-19, 29))
    assert np.allclose(found.broken_S[found.steps_S < 0], 0.0)
    assert np.allclose(found.broken_S[found.steps_S >= 0], 0.4)
    assert np.allclose(found.healthy_S, 0.0)


def test_the_band_is_the_range_of_all_healthy_runs() -> None:
    runs = [run(seed=seed, kl=value) for seed, value in enumerate((0.1, 0.3, 0.2))]
    found = lines(ASKED, ModelRuns("original", {}, {0: runs[0]}, runs), "kl")
    assert set(found.low_S) == {0.1}
    assert set(found.high_S) == {0.3}
    assert set(found.healthy_S) == {0.1}, "without broken runs the twins are drawn all the same"
    assert np.isnan(found.broken_S).all()
    assert lines(ASKED, ModelRuns("original"), "kl").steps_S.size == 0


def test_a_per_layer_signal_is_its_mean_and_an_absent_one_is_none() -> None:
    found = signal(run(**{"router_load_entropy/0": 0.8, "router_load_entropy/1": 0.6}), "router_load_entropy")
    assert found is not None
    assert np.allclose(found, 0.7)
    assert signal(run(), "grad_norm_router") is None


def test_a_cross_stands_where_values_stop_being_finite_but_not_where_a_run_is_short() -> None:
    poisoned = run(fault="nan_poison")
    poisoned.steps.loc[31:, "kl"] = np.nan
    healthy = {0: run()}
    found = lines(ASKED, ModelRuns("original", {0: poisoned}, healthy, [run()]), "kl")
    assert found.ends is not None
    assert found.steps_S[found.ends] == 30
    short = run(fault="nan_poison", steps=12)
    assert lines(ASKED, ModelRuns("original", {0: short}, healthy, [run()]), "kl").ends is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_of_traces_never_changes_and_no_nan_reaches_the_page(count: int) -> None:
    models = ("original", "cluster-16", "random-16")[:count]
    state = _state(Asked("update_freeze", 1.0, {0: 10}, models, 40))
    figure = fault_figure.fault_figure(state)
    assert len(figure.data) == len(values(state)) == 6 * SLOTS * 4
    assert "NaN" not in figure.to_json()
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert named == [f"{model}, {kind}" for model in models for kind in ("healthy", "broken")]
    dashes = {trace.name: trace.line.dash for trace in figure.data if trace.showlegend}
    assert dashes["original, healthy"] is None
    assert dashes["original, broken"] == "dash"


def test_axes_onset_and_titles_follow_the_state() -> None:
    layout = layout_values(_state())
    assert layout["yaxis2"]["type"] == "log"
    assert layout["yaxis"]["type"] == "linear"
    assert {shape["x0"] for shape in layout["shapes"]} == {10}
    assert layout["xaxis5"]["title"]["text"] == "step"
    assert "update_freeze, strength 1, from step 10, seed 0" in layout["title"]["text"]
    frozen = layout_values(_state(grad_norm=0.0))
    assert frozen["yaxis2"]["type"] == "linear", "a zero has no logarithm"
    aligned = layout_values(_state(TWO))
    assert {shape["x0"] for shape in aligned["shapes"]} == {0}
    assert aligned["xaxis5"]["title"]["text"] == "steps since the onset"
    assert "from steps 12, 20, seeds 0, 1" in aligned["title"]["text"]
    json.dumps(aligned)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_shows_a_tell_tale(fault: str) -> None:
    state = FaultState(Asked(fault, 1.0, {0: 10}, ("original",), 40), (ModelRuns("original"),))
    assert len(set(state.signals)) == 6
    assert state.signals[:4] == fault_figure.FIXED
    assert any("should" in title or "becomes" in title for title in panel_titles(state))
    assert len(values(state)) == 6 * SLOTS * 4


def test_the_table_says_what_the_lines_show() -> None:
    table = signal_table(_state(update_norm=1.0)).set_index("signal")
    assert table.columns.tolist() == [f"{m}, {k}" for m in ("original", "cluster-16") for k in ("healthy", "broken")]
    assert table.loc["update norm"].tolist() == ["1", "0.5", "1", "0.5"]
    empty = signal_table(FaultState(ASKED, (ModelRuns("original"),)))
    assert set(empty["original, broken"]) == {"–"}


def _told(broken: Trace | None) -> str:
    """What the table says of the broken run's reward."""
    runs = ModelRuns("original", {0: broken} if broken else {}, {0: run()}, [run()])
    return str(signal_table(FaultState(ASKED, (runs,))).set_index("signal").loc["reward mean", "original, broken"])


def test_what_was_not_run_is_not_called_not_finite() -> None:
    assert _told(None) == _told(run(fault="update_freeze", onset=10, steps=9)) == "–"
    assert float(_told(run(fault="update_freeze", onset=10, steps=12))) > 0
    assert _told(run(fault="update_freeze", onset=10, reward_mean=math.nan)) == "not finite"


def test_words_say_what_is_drawn() -> None:
    assert describe(_state()) == (
        "original: 1 run broken (recorded), band of 2; cluster-16: 1 run broken (recorded), band of 2."
    )
    assert "laid over each other by the onset" in describe(_state(TWO))
    assert "no run with this fault" in describe(FaultState(ASKED, (ModelRuns("original"),)))


def test_every_fault_is_offered_once_and_told_in_full() -> None:
    offered = [fault for _, code in family_options() for _, fault in fault_options(code, ("update_freeze",))]
    assert sorted(offered) == sorted(FAULTS)
    shown = dict(fault_options("OD", ("update_freeze",)))
    assert "update_freeze" in shown.values()
    assert [text for text in shown if "(not recorded)" not in text] == [
        f"update_freeze: {FAULTS['update_freeze'].title}"
    ]
    for item in FAULTS.values():
        text = fault_html(item)
        assert text.count("<dd") == 6
        assert item.seam in text
    assert "<li>a &lt; b</li>" in verdict_html(("a < b",))
