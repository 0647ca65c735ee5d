"""The figure of the remedy panel: which lines, where they end, which bars, and the words and tables beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeproxy.traces.trace import Trace
from moeproxy.triage.remedy_result import Kind, Trial
from moeproxy.triage.severity import Severity
from moeproxy.view.apps.remedy_figure import (
    LINES,
    PANELS,
    RemedyState,
    describe,
    layout_values,
    remedy_figure,
    titles,
    trial_table,
    values,
    verdict_of,
)
from tests.view.apps.made_runs import run

ILL, BETTER = Severity(0.3, 0.9, 0.0), Severity(0.0, 0.3, 0.0)


def trial(name: str, after: Severity | None, *, accepted: bool = False, harmful: bool = False) -> Trial:
    kind: Kind = "mitigation"
    return Trial(name, kind, ILL, after, 0.01, accepted, harmful, False, f"words of {name}")


KEPT, WORSE = trial("lower_rate", BETTER, accepted=True), trial("stronger_kl", Severity(1, 1, 0), harmful=True)
SAME, LOST = trial("kl_off", ILL), trial("clip_gradients", None)


def dead(trace: Trace, from_step: int) -> Trace:
    steps = trace.steps.copy()
    steps.loc[from_step:, "reward_mean"] = np.nan
    return Trace(steps, None, trace.provenance)


def state(**changes: object) -> RemedyState:
    broken = dead(run("cluster-16", 0, "kl_sign", onset=12), 20)
    made = RemedyState("cluster-16", "kl_sign", 0, 12, run("cluster-16", 0), broken, before=ILL, margin=0.01)
    return replace(made, **changes)


def test_three_runs_are_drawn_and_where_one_stops_being_finite_is_marked() -> None:
    shown = state(treated=run("cluster-16", 0, steps=25), shown="lower_rate", trials=(KEPT,))
    assert shown.signals == ("reward_mean", "grad_norm", "kl", "entropy", "policy_loss")
    twin, broken, treated, end = values(shown)[:LINES]
    assert twin["x"] == list(range(1, 41))
    assert broken["y"][18:21] == [pytest.approx(broken["y"][18]), None, None]
    assert (len(treated["x"]), treated["name"]) == (25, "with lower_rate")
    assert (end["x"], end["showlegend"]) == ([19], True)
    assert [line["showlegend"] for line in values(shown)[LINES : 2 * LINES]] == [False] * LINES
    assert twin["line"]["color"] == broken["line"]["color"] != treated["line"]["color"]
    other = values(replace(shown, model="original"))[0]
    assert other["line"]["color"] != twin["line"]["color"], "original and proxy keep their colours"


def test_bars_hold_severities_and_verdicts() -> None:
    bars = values(state(trials=(KEPT, WORSE, SAME, LOST)))[-1]
    assert bars["y"] == ["none", "lower_rate", "stronger_kl", "kl_off", "clip_gradients"]
    assert bars["x"] == pytest.approx([0.4, 0.1, 2 / 3, 0.4, 0.0])
    assert bars["text"] == ["0.400", "0.100, kept", "0.667, rolled back, worse", "0.400, rolled back", "failed"]
    assert len(set(bars["marker"]["pattern"]["shape"])) == 4, "told without colours too"
    assert values(state(before=None))[-1]["y"] == []
    assert [verdict_of(one) for one in (KEPT, WORSE, SAME, LOST)] == [
        *("kept", "rolled back, worse", "rolled back", "failed")
    ]


def test_the_layout_marks_onset_and_margin() -> None:
    layout = layout_values(state(trials=(WORSE,), margin=0.02))
    assert [shape["x0"] for shape in layout["shapes"]] == [12] * PANELS + [0.02]
    assert layout["xaxis6"]["range"] == [0, pytest.approx(1.6 * 2 / 3)]
    assert layout["yaxis2"]["type"] == "log"
    assert layout["yaxis"]["type"] == "linear"
    assert "no remedy is shown" in layout["title"]["text"]
    assert "with tis (run not kept)" in layout_values(state(shown="tis"))["title"]["text"]
    growing = state(shown="tis", treated=run(steps=3), growing=True)
    assert "with tis (growing)" in layout_values(growing)["title"]["text"]


def test_a_whole_figure_has_every_trace_of_any_state() -> None:
    figure = remedy_figure(state())
    assert len(figure.data) == PANELS * LINES + 1 == len(values(state(trials=(KEPT, WORSE), treated=run())))
    assert [note.text for note in figure.layout.annotations] == titles(state())
    assert titles(state())[-1].startswith("severity")


def test_words_say_what_is_drawn() -> None:
    assert describe(state(before=None)).endswith("Nothing was tried yet: press Try live.")
    assert "healthy runs stay below 0.010. 1 remedies were tried." in describe(state(trials=(KEPT,)))
    told = describe(state(trials=(KEPT,), shown="lower_rate"))
    assert "Severity without a remedy 0.400" in told
    assert told.endswith("not finite 0.00): words of lower_rate.")
    assert "the run did not end" in describe(state(trials=(LOST,), shown="clip_gradients"))
    assert "not ill" in describe(state(before=Severity(0, 0, 0)))


def test_the_table_holds_both_models() -> None:
    rows = trial_table((KEPT, LOST), (replace(KEPT, accepted=False),), "original").set_index("remedy")
    assert rows.loc["lower_rate", "departure"] == "0.90 → 0.30"
    assert rows.loc["lower_rate", "on original"] == "0.400 → 0.100, rolled back"
    assert rows.loc["clip_gradients", ["after", "on original"]].tolist() == ["–", "not tried"]
    assert "on original" not in trial_table((KEPT,))
