"""Figures and report section of the fidelity study: the numbers they draw are those of the study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.triage.study import Study, study
from moeproxy.view import figures
from moeproxy.view.document import Figure, Table
from moeproxy.view.report import ReportInput, write_report
from moeproxy.view.sections_study import study_lead, study_sections
from moeproxy.view.style import ORIGINAL, PROXY
from tests.triage import study_synthetic as made


@pytest.fixture(scope="module")
def result() -> Study:
    return study(
        [
            *made.runs("original", made.FAULTS, method="original", strengths=(1.0, 0.3)),
            *made.runs("cluster-16", made.FAULTS),
            *made.runs("first-16", made.permuted(made.FAULTS)),
        ],
        made.PROTOCOL,
    )


def drawn(result: Study) -> dict[str, go.Figure]:
    return {
        "retrieval": figures.retrieval(result, "clear"),
        "confusion": figures.confusion(result, "first-16", "clear"),
        "responses": figures.study_responses(result, "router_frozen", "clear"),
        "cost": figures.cost_fidelity(result, "clear"),
    }


def test_every_figure_says_what_it_shows(result: Study) -> None:
    for name, figure in drawn(result).items():
        assert type(figure) is go.Figure, name
        assert figures.describe(figure).endswith("."), name
        assert any(char.isdigit() for char in figures.describe(figure)), name
        assert not figures.data_table(figure).empty, name
        figure.to_json()


def test_confusion_shows_which_fault_each_is_taken_for(result: Study) -> None:
    figure = figures.confusion(result, "first-16", "clear")
    table = figures.data_table(figure)
    taken = dict(zip(table["fault"], table["taken for"], strict=True))
    names = list(made.FAULTS)
    assert taken == dict(zip(names, [*names[1:], names[0]], strict=True))
    assert (table["share"] == 1).all()
    heat = figure.data[0]
    assert list(heat.x) == [*heat.y, "none"]
    z = np.array(heat.z)
    assert z.shape == (6, 7)
    assert np.trace(z[:, :6]) == 0
    assert "0% of the runs of first-16 lie on the diagonal" in figures.describe(figure)
    ours = np.array(figures.confusion(result, "original", "clear").data[0].z)
    np.testing.assert_array_equal(ours[:, :6], np.eye(6))


def test_responses_stand_beside_each_other_in_fixed_colours(result: Study) -> None:
    figure = figures.study_responses(result, "router_frozen", "clear", n_signals=2)
    assert [trace.line.color for trace in figure.data] == [ORIGINAL, PROXY] * 2
    assert [trace.line.dash for trace in figure.data] == ["solid", "dash"] * 2
    assert list(figure.data[0].x) == ["0–4", "5–29"]
    strongest = set(figures.data_table(figure)["signal"])
    assert strongest <= {"grad_norm_router", "router_share", "router_load_entropy", "router_max_violation"}
    kept = result.responses.set_index(["model", "fault", "level", "signal", "window"])["mean"]
    row = figures.data_table(figure).iloc[0]
    assert row["mean"] == pytest.approx(
        kept[row["model"], "router_frozen", "clear", row["signal"], row["window"]], abs=0.01
    )


def test_retrieval_and_cost_draw_every_model_with_its_interval(result: Study) -> None:
    figure = figures.retrieval(result, "clear")
    assert [trace.y[0] for trace in figure.data] == ["original", "cluster-16", "first-16"]
    assert [trace.x[0] for trace in figure.data] == [1, 1, 0]
    costs = pd.DataFrame({"model": ["original", "cluster-16"], "params": [2e6, 1e6]})
    cost = figures.cost_fidelity(result, "clear", costs=costs)
    assert [(trace.x[0], trace.y[0]) for trace in cost.data] == [(2e6, 1.0), (1e6, 1.0)]
    kept = figures.cost_fidelity(result, "clear")
    original, *proxies = (trace.x[0] for trace in kept.data)
    assert original == 32
    assert np.mean(proxies) == 16, "proxies of one size stand around it, none over another"
    assert len(set(proxies)) == len(proxies)


def test_what_was_not_judged_is_refused(result: Study) -> None:
    with pytest.raises(MoeproxyError, match="no level 'typo'"):
        figures.retrieval(result, "typo")
    with pytest.raises(MoeproxyError, match="no run of 'first-16' at level 'subtle'"):
        figures.confusion(result, "first-16", "subtle")
    with pytest.raises(MoeproxyError, match="no run of 'typo'"):
        figures.study_responses(result, "typo", "clear")


def test_the_section_shows_every_level_and_its_controls(result: Study) -> None:
    (section,) = study_sections(result)
    blocks = section.blocks
    captions = [block.caption for block in blocks if isinstance(block, Figure | Table)]
    assert sum(caption.startswith("How often the right fault") for caption in captions) == 2
    assert "Proxy minus control" in captions
    assert "Healthy runs judged like a fault" in captions
    lead = next(iter(study_lead(result)))
    assert "cluster-16 points to the right one in 100% of the runs" in lead
    assert "chance is 17%" in lead


def test_without_a_study_the_report_has_no_section_for_it(tmp_path: Path, result: Study) -> None:
    assert list(study_sections(None)) == []
    assert list(study_lead(None)) == []
    bare = write_report(ReportInput(), tmp_path / "bare").parent
    assert "Many faults" not in (bare / "report.md").read_text("utf-8")
    full = write_report(replace(ReportInput(), study=result), tmp_path / "full").parent
    text = (full / "report.md").read_text("utf-8")
    assert "Many faults: do the proxies respond alike?" in text
    assert result.protocol.hash in text
