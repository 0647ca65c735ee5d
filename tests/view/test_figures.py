"""Figures: the data they draw, fixed colours, text alternatives and tables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.traces import Trace
from moeproxy.triage.compare import Comparison, compare_all
from moeproxy.view import figures
from moeproxy.view.style import METHOD_COLOURS, ORIGINAL, PROXY, method_colour, method_symbol, model_colours
from tests.triage.synthetic import CALIBRATION, ONSET, SCORED
from tests.view import shared


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return shared.traces()


@pytest.fixture(scope="module")
def comparisons(traces: list[Trace]) -> tuple[Comparison, ...]:
    recorded = [trace for trace in traces if trace.provenance.source == "recorded"]
    return compare_all(recorded, calibration_seeds=CALIBRATION, scored_seeds=SCORED)


def lines(figure: go.Figure) -> list[go.Scatter]:
    return [
        trace for trace in figure.data if isinstance(trace, go.Scatter) and trace.mode == "lines" and not trace.fill
    ]


def all_figures(traces: list[Trace], comparisons: tuple[Comparison, ...]) -> dict[str, go.Figure]:
    distance_EE = np.abs(np.subtract.outer(np.arange(8.0), np.arange(8.0)))
    return {
        "expert_load": figures.expert_load(shared.profile()),
        "similarity": figures.similarity_heatmap(distance_EE, shared.plan(), 1),
        "similarity without plan": figures.similarity_heatmap(distance_EE),
        "keep_map": figures.keep_map(shared.plan(), shared.profile()),
        "keep_map without profile": figures.keep_map(shared.plan()),
        "stability": figures.stability(shared.stability()),
        "fidelity": figures.fidelity(shared.fidelity()),
        "overlay": figures.overlay(traces, "quiet_update"),
        "response": figures.response_heatmap(comparisons[0]),
        "agreement": figures.agreement(comparisons),
        "methods": figures.method_comparison(shared.accuracy(), original=0.86, chance=0.1),
        "costs": figures.cost_bars(shared.costs()),
    }


def test_every_figure_says_what_it_shows(traces: list[Trace], comparisons: tuple[Comparison, ...]) -> None:
    for name, figure in all_figures(traces, comparisons).items():
        assert type(figure) is go.Figure, name
        assert len(figure.data) > 0, name
        said = figures.describe(figure)
        assert said.endswith("."), name
        assert any(char.isdigit() for char in said), name
        assert not figures.data_table(figure).empty, name
        figure.to_json()
    with pytest.raises(MoeproxyError, match="no text alternative"):
        figures.describe(go.Figure())


def test_inputs_are_not_changed(traces: list[Trace]) -> None:
    table, costs = shared.accuracy(), shared.costs()
    figures.method_comparison(table)
    figures.cost_bars(costs)
    pd.testing.assert_frame_equal(table, shared.accuracy())
    pd.testing.assert_frame_equal(costs, shared.costs())


def test_load_and_keep_map_show_the_known_answer() -> None:
    assert "busiest expert gets 2.0 times" in figures.describe(figures.expert_load(shared.profile()))
    assert "2 experts never used" in figures.describe(figures.expert_load(shared.profile()))
    table = figures.data_table(figures.keep_map(shared.plan(), shared.profile()))
    assert table[table["layer"] == 0]["kept"].tolist() == [True, False] * 4
    assert table["represented by"].tolist()[1] == 0
    assert "57% of the routed tokens" in figures.describe(figures.keep_map(shared.plan(), shared.profile()))


def test_similarity_puts_clusters_side_by_side_and_frames_them() -> None:
    distance_EE = np.random.default_rng(0).random((8, 8))
    figure = figures.similarity_heatmap(distance_EE, shared.plan(), 0)
    assert list(figure.data[0].x) == [str(e) for e in range(8)]
    assert len(figure.layout.shapes) == 4
    assert list(figure.data[1].x) == ["0", "2", "4", "6"]
    with pytest.raises(MoeproxyError, match="no layer 9"):
        figures.similarity_heatmap(distance_EE, shared.plan(), 9)


def test_overlay_keeps_colour_for_the_model_and_dash_for_the_fault(traces: list[Trace]) -> None:
    drawn = lines(figures.overlay(traces, "quiet_update"))
    assert len(drawn) == 8
    for line in drawn:
        assert line.line.color == (ORIGINAL if "original" in line.name else PROXY)
        assert line.line.dash == ("dash" if "broken" in line.name else "solid")
    shapes = figures.overlay(traces, "quiet_update").layout.shapes
    assert {shape.x0 for shape in shapes} == {ONSET}
    labels = [note.text for note in figures.overlay(traces, "quiet_update").layout.annotations]
    assert f"onset, step {ONSET}" in labels


def test_overlay_draws_live_runs_only_where_every_line_has_one(traces: list[Trace]) -> None:
    live = lines(figures.overlay(traces, "quiet_update"))
    assert all("live, band" in line.name for line in live)
    recorded = lines(figures.overlay(traces, "wrong_logp"))
    assert all("mean of 3 recorded" in line.name for line in recorded)
    # Same seeds healthy and broken: the means coincide before the onset.
    healthy, broken = (next(line for line in recorded if word in line.name) for word in ("healthy", "broken"))
    np.testing.assert_allclose(healthy.y[:ONSET], broken.y[:ONSET])
    assert not np.allclose(healthy.y[ONSET:], broken.y[ONSET:])


def test_overlay_uses_a_log_axis_for_norms_only(traces: list[Trace]) -> None:
    figure = figures.overlay(traces, "quiet_update", signals=("policy_loss", "grad_norm"))
    assert figure.layout.yaxis.type is None
    assert figure.layout.yaxis2.type == "log"
    assert "0.5" in figure.layout.yaxis2.ticktext


def test_overlay_marks_where_values_are_no_longer_finite(traces: list[Trace]) -> None:
    def dead(trace: Trace) -> Trace:
        gone = trace.provenance.fault == "quiet_update"
        values = trace.steps["grad_norm"].where(trace.steps.index < 30, np.nan) if gone else trace.steps["grad_norm"]
        return Trace(trace.steps.assign(grad_norm=values), None, trace.provenance)

    figure = figures.overlay([dead(trace) for trace in traces], "quiet_update")
    marks = [trace for trace in figure.data if trace.mode == "markers+text"]
    assert [mark.x[0] for mark in marks] == [29, 29]


def test_overlay_leaves_out_runs_of_several_faults(traces: list[Trace]) -> None:
    one = next(trace for trace in traces if trace.provenance.fault == "quiet_update")
    info = replace(one.provenance, seed=77, further=(("wrong_logp", 1.0, 3),))
    loud = Trace(one.steps * 1000, None, info)
    assert figures.overlay([*traces, loud], "quiet_update") == figures.overlay(traces, "quiet_update")


def test_overlay_refuses_what_it_cannot_draw(traces: list[Trace]) -> None:
    with pytest.raises(MoeproxyError, match="no trace of the fault 'typo'"):
        figures.overlay(traces, "typo")
    with pytest.raises(MoeproxyError, match="no trace of the model 'x'"):
        figures.overlay(traces, "quiet_update", models=["x"])


def test_response_heatmap_shows_the_numbers_of_the_comparison(comparisons: tuple[Comparison, ...]) -> None:
    comparison = comparisons[0]
    table = figures.data_table(figures.response_heatmap(comparison))
    strongest = comparison.significant[0]
    assert table["signal"].iloc[0] == strongest
    expected = comparison.response[comparison.signals.index(strongest)][0]
    assert table["original 20–29"].iloc[0] == pytest.approx(expected, abs=0.06)
    one = figures.response_heatmap(comparison, models=["cluster-16"])
    assert len(one.data) == 2


def test_agreement_has_one_legend_entry_a_name(comparisons: tuple[Comparison, ...]) -> None:
    names = [trace.name for trace in figures.agreement(comparisons).data if trace.showlegend]
    assert len(names) == len(set(names))
    assert {"cluster", "random"} <= set(names)
    with pytest.raises(MoeproxyError, match="no proxy"):
        figures.agreement([])


def test_method_comparison_sets_methods_side_by_side() -> None:
    figure = figures.method_comparison(shared.accuracy(), original=0.86)
    places = np.concatenate([trace.x for trace in figure.data])
    assert len(set(places.round(6))) == len(places)
    assert {trace.name: trace.marker.color for trace in figure.data}["cluster"] == METHOD_COLOURS["cluster"]
    np.testing.assert_allclose(figure.data[0].error_y.array, 0.03)
    assert "at 16 experts frequency is best with 0.75, random worst with 0.50" in figures.describe(figure)
    with pytest.raises(MoeproxyError, match="lacks accuracy"):
        figures.method_comparison(pd.DataFrame({"method": ["a"], "n_experts": [1]}))


def test_cost_bars_say_what_was_not_measured() -> None:
    figure = figures.cost_bars(shared.costs())
    assert list(figure.data[0].marker.color) == [ORIGINAL, PROXY, PROXY]
    assert figure.data[2].text[2] == "not measured"
    assert "cluster-8: parameters 37%, weights 37%" in figures.describe(figure)
    with pytest.raises(MoeproxyError, match="no measure"):
        figures.cost_bars(pd.DataFrame({"model": ["a"]}))


def test_colours_do_not_depend_on_order() -> None:
    assert model_colours(["cluster-16", "original"]) == {"original": ORIGINAL, "cluster-16": PROXY}
    assert len(set(model_colours(["original", "a", "b", "c", "d"]).values())) == 5


def test_figures_need_no_torch() -> None:
    code = "import sys, moeproxy.view.figures, moeproxy.view.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_variants_of_a_method_share_its_colour_and_differ_in_symbol() -> None:
    names = ["cluster", "cluster: router", "cluster: co-activation", "cluster: context"]
    assert {method_colour(name) for name in names} == {PROXY}
    assert len({method_symbol(name) for name in names}) == len(names)


def test_stability_bars_span_the_quantiles() -> None:
    stability = shared.stability()
    points = figures.stability(stability).data[0]
    np.testing.assert_allclose(np.asarray(points.y), stability.agreement_mean_L)
    np.testing.assert_allclose(points.y + points.error_y.array, stability.agreement_high_L)
    np.testing.assert_allclose(points.y - points.error_y.arrayminus, stability.agreement_low_L)


def test_fidelity_is_drawn_by_layer() -> None:
    fidelity = shared.fidelity()
    routed, cosine = figures.fidelity(fidelity).data
    assert tuple(routed.y) == fidelity.router_agreement
    assert tuple(cosine.y) == fidelity.hidden_cosine
    assert "90%" in figures.describe(figures.fidelity(fidelity))
