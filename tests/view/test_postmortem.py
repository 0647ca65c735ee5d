"""The postmortem: what it says is so, every number is among those for machines, and nothing in a name is markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.triage.alarms import judged_number
from moeproxy.triage.jsonable import sure
from moeproxy.triage.remedy_result import Remedy
from moeproxy.view.actions import Action
from moeproxy.view.document import Document, Figure, Points, Table, Text
from moeproxy.view.figures_evidence import _axis, evidence_figure
from moeproxy.view.figures_incident import signals_figure
from moeproxy.view.figures_outcome import match_figure, severity_figure
from moeproxy.view.figures_timeline import timeline_figure
from moeproxy.view.gather import Words, gather, load_results, postmortem
from moeproxy.view.incident import Incident, incident, open_incidents
from moeproxy.view.render_html import render_html
from moeproxy.view.render_text import render_json, render_markdown
from moeproxy.view.report import compose
from moeproxy.view.style import data_table, describe
from moeproxy.view.timeline import ACTIONS, timeline
from tests.triage.synthetic import FAULTS, run
from tests.view import postmortems, shared
from tests.view.made_logs import log_of, verl
from tests.view.test_report import Page

_NUMBER = re.compile(r"(?<![\w.^#-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?:\s?%)?(?![\w^-])")
# Numbers of definitions, which belong to no run: severity from 0 to 1, per 1,000 steps, within 2 steps, 95 % of runs.
_DEFINITIONS = {"0", "1", "2", "4", "5", "29", "1,000", "95 %", "95%"}


@pytest.fixture(scope="module")
def document() -> Document:
    return compose(postmortems.everything())


def test_each_attempt_is_judged_and_the_failed_one_leads(document: Document) -> None:
    found = postmortems.resumed()
    assert [one.diagnosis.detection.verdict for one in found.judgements] == ["alarm", "healthy"]
    assert [one.steps for one in found.judgements] == [(1, 35), (11, 60)]
    assert found.verdict == "alarm"
    assert found.main is found.judgements[0]
    assert found.main.diagnosis.detection.onset == 15
    lead = " ".join(document.lead)
    assert "verl_console, attempt 1 of 2: The run departs from step 15 on" in lead
    assert "Likeliest cause: gradient_overflow (Gradient overflow)" in lead
    assert "After the last resume (steps 11 to 60, attempt 2 of 2) there is no alarm." in lead
    assert "The authors noted 4 actions." in lead
    assert "cluster-16 shows the failure when gradient_overflow is injected (match 0.93" in lead
    said = "severity falls from 0.410 to 0.004, as healthy runs are (4 remedies tried)."
    assert f"lower_scale helps against gradient_overflow on cluster-16: {said}" in lead


def test_only_what_was_given_has_a_section(document: Document) -> None:
    titles = [section.title for section in document.sections]
    assert titles == [
        "What the authors say",
        "Timeline",
        "What was seen",
        "Probable cause",
        "Reproduced on the proxy",
        "Remedies tried",
        "Limits",
        "Provenance",
    ]
    page = Page(render_html(document))
    assert "Not run" not in page.text
    assert "Not part of this report: what was done, model and cost" in page.text
    alone = compose(gather([postmortems.remedy()]))
    assert [section.title for section in alone.sections] == ["Remedies tried", "Limits", "Provenance"]
    with_traces = compose(gather(shared.traces()))
    assert "Runs: loss and gradient norm" in [section.title for section in with_traces.sections]


def test_every_number_of_a_sentence_is_among_the_data() -> None:
    for given in (postmortems.everything(), gather([postmortems.beside()]), gather([postmortems.poisoned()])):
        document = compose(given)
        data = json.loads(render_json(document))
        known = set(_spelled({name: data[name] for name in document.data}))
        notes = _noted(given.incidents[0])
        assert all(json.dumps(note)[1:-1] in render_json(document).partition('"incidents"')[2] for note in notes)
        for sentence in _sentences(document, notes):
            words = re.sub(r"arXiv \d+\.\d+", "", sentence)
            lost = [n for n in _NUMBER.findall(words) if n.strip() not in known | _DEFINITIONS]
            assert not lost, (sentence, lost)
    broken = {"severity": 0.5}
    assert "0.4" not in set(_spelled(broken)), "the test can fail"


def _noted(found: Incident) -> tuple[str, ...]:
    """Return the notes of reader and detector: sentences that stand among the data word for word."""
    return (*found.notes, *(note for one in found.judgements for note in one.diagnosis.detection.notes))


def _sentences(document: Document, notes: tuple[str, ...]) -> Iterator[str]:
    yield from document.lead
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Text):
                yield block.text
            elif isinstance(block, Points):
                yield from (item for item in block.items if item not in notes)
            elif isinstance(block, Figure):
                yield f"{block.caption} {describe(block.figure)}"


def _spelled(value: Any) -> Iterator[str]:
    """Yield every way in which the numbers of JSON values may stand in a sentence; of a list its length too."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _spelled(item)
    elif isinstance(value, list):
        yield str(len(value))
        for item in value:
            yield from _spelled(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        ways = (".0f", ".1f", ".2f", ".3f", ".3g", ".4g", ",.0f", ".0%")
        yield from (format(value, way) for way in ways)
        if 0 <= value <= 1:
            yield sure(value).rpartition(" ")[2]
        yield from (f"+{value:g}", f"{abs(value):.1f}", f"{value:.0%}".replace("%", " %"))


def test_the_timeline_has_everything_at_its_step() -> None:
    drawn = timeline(postmortems.resumed(), postmortems.ACTIONS)
    assert drawn.rows == ("attempt 1 of 2", "grad_norm", "attempt 2 of 2", ACTIONS, f"{ACTIONS}, row 2")
    rows = {(m.row, m.kind): (m.step, m.until) for m in drawn.moments}
    assert rows["attempt 1 of 2", "attempt"] == (1, 35)
    assert rows["attempt 1 of 2", "onset"] == (15, None)
    assert rows["attempt 1 of 2", "failure"] == (35, None), "SIGTERM came before the resume"
    assert rows["attempt 2 of 2", "attempt"] == (11, 60)
    assert rows["attempt 2 of 2", "resumed"] == (11, None)
    assert rows["grad_norm", "alarm: not finite"] == (15, 35)
    # The first in time has no step: it is number 1 and stands in the table only.
    assert [m.number for m in drawn.moments if m.row.startswith(ACTIONS)] == [2, 3, 4]
    assert [(action.text, number) for action, number in drawn.aside] == [("the pager rang", 1)]
    assert drawn.span == (1, 60)
    table = drawn.table()
    assert table["what"].tolist()[-1] == "1: noted"
    assert "the pager rang (2026-11-30 03:02)" in table["in words"].tolist()
    figure = timeline_figure(drawn, "x")
    named = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data if trace.name}
    assert named["onset"] == ([15], ["attempt 1 of 2"])
    assert named["setting changed"] == ([11], [f"{ACTIONS}, row 2"])
    assert "1 action at no step of the run only in the table" in describe(figure)


def test_actions_at_no_step_of_the_run_are_listed_and_squeeze_nothing() -> None:
    """Step 0 and the step after the last are next to the run; 500 and 10,000 are not."""
    done = tuple(Action(f"step {step}", step=step) for step in (0, 15, 61, 500, 10_000))
    drawn = timeline(postmortems.resumed(), done)
    assert [m.step for m in drawn.moments if m.row.startswith(ACTIONS)] == [0, 15, 61]
    assert [number for _, number in drawn.aside] == [4, 5]
    assert drawn.span == (0, 61)
    assert drawn.table()["step"].tolist()[-2:] == ["500", "10000"]
    figure = timeline_figure(drawn, "x")
    assert figure.layout.xaxis.range[1] < 65
    assert "steps 0 to 61" in describe(figure)
    found = postmortems.poisoned()
    signals = signals_figure(found, found.judgements[0], actions=(*done, Action("no step")))
    assert {shape.x0 for shape in signals.layout.shapes} & {0, 15, 500, 10_000} == {0, 15}
    words = " ".join(
        block.text
        for section in compose(gather([postmortems.resumed()], Words(actions=done))).sections
        for block in section.blocks
        if isinstance(block, Text)
    )
    assert "not drawn, since the run has no such step: 4 (step 500), 5 (step 10000)" in words


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([3.4, -0.2], ["-1", "0", "+1", "+2", "+5"]),
        ([0.3], ["0", "+1"]),
        ([-11.0], ["-20", "-10", "-5", "-2", "-1", "0"]),
        ([60.0, float("inf")], ["0", "+1", "+10", "+100"]),
        ([], ["0"]),
    ],
)
def test_the_axis_of_the_evidence_names_its_scale_and_is_ticked_to_its_ends(
    values: list[float], ticks: list[str]
) -> None:
    axis = _axis(values)
    assert axis["ticktext"] == ticks
    assert axis["tickvals"] == pytest.approx([math.asinh(float(tick)) for tick in ticks])
    assert axis["range"][0] <= min(axis["tickvals"])
    assert axis["range"][1] >= max(axis["tickvals"])
    assert "asinh" in axis["title"]["text"]
    finite = [value for value in values if math.isfinite(value)]
    assert all(float(ticks[0]) <= value <= float(ticks[-1]) for value in finite)


def test_more_alarms_than_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = postmortems.poisoned().judgements[0].diagnosis.detection.alarms
    assert len(alarms) > 3
    monkeypatch.setattr("moeproxy.view.timeline.MOST_ALARMS", len(alarms) - 1)
    drawn = timeline(postmortems.poisoned())
    assert drawn.beyond == 1
    assert f"{len(alarms)} alarms, the last ones not drawn" in describe(timeline_figure(drawn, "x"))


def test_signals_are_drawn_in_their_own_units_with_what_healthy_runs_do() -> None:
    found = postmortems.beside()
    (judged,) = found.judgements
    figure = signals_figure(found, judged, actions=(Action("x", step=30),))
    alarms = judged.diagnosis.detection.alarms
    assert judged.diagnosis.detection.onset == 21, "one step after the fault sets in, a fifth of it at a time"
    lines = [trace for trace in figure.data if trace.name == "this run" and trace.x[0] is not None]
    assert len(lines) == 4
    drawn = [name for name in data_table(figure).columns[1:] if "," not in name]
    assert set(drawn) <= {alarm.signal for alarm in alarms}
    place, first = next((i, name) for i, name in enumerate(drawn) if name in judged.trace.signals)
    alarm = next(alarm for alarm in alarms if alarm.signal == first)
    np.testing.assert_allclose(lines[place].y, judged.trace.values(first), rtol=1e-6)
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    low = np.min([one.values(first) for one in found.healthy], axis=0)
    np.testing.assert_allclose(np.array(bands[place].y)[60:][::-1], low, rtol=1e-6)
    expected = [trace for trace in figure.data if trace.name == "expected there"][place]
    assert list(expected.y) == [alarm.expected] * 2
    assert list(expected.x) == list(alarm.shown)
    marks = [shape.x0 for shape in figure.layout.shapes]
    assert set(marks) == {21, 30}
    assert "beside 8 healthy runs, onset at step 21" in describe(figure)
    assert f"{first}, healthy low" in data_table(figure).columns
    assert figure.layout.title.text.endswith("quiet &amp; &lt;odd&gt;")


def test_an_action_at_the_onset_does_not_hide_it() -> None:
    found = postmortems.resumed()
    judged = found.judgements[0]
    onset = judged.diagnosis.detection.onset
    figure = signals_figure(found, judged, actions=[Action("stopped by hand", step=onset, kind="stopped")])
    here = [shape.line for shape in figure.layout.shapes if shape.x0 == onset]
    assert here[-1].dash == "dot"
    assert here[-1].width < min(line.width for line in here if line.dash == "dashdot")


def test_what_is_not_finite_is_crossed_and_said() -> None:
    figure = signals_figure(postmortems.poisoned(), postmortems.poisoned().judgements[0])
    crosses = next(trace for trace in figure.data if trace.name == "not finite")
    assert list(crosses.x) == list(range(15, 61))
    assert data_table(figure)["grad_norm"].tolist()[14:16] == ["not finite", "not finite"]
    assert "kl not finite from step 15, 0.0121 before" in describe(figure)


def test_evidence_and_outcomes_are_drawn_as_they_are() -> None:
    cause = postmortems.poisoned().judgements[0].diagnosis.causes[0]
    figure = evidence_figure(postmortems.poisoned().judgements[0].diagnosis)
    seen = next(trace for trace in figure.data if trace.name == "this run")
    assert list(seen.customdata) == [one.seen for one in (*cause.supports, *cause.contradicts) if not one.broken]
    np.testing.assert_allclose(seen.x, np.arcsinh(list(seen.customdata)))
    matches = match_figure(postmortems.reproduction())
    assert list(matches.data[0].x) == [0.93, -0.21], "what has no run has no match"
    assert list(matches.data[1].x) == [0.87, 0.09, 0.04]
    assert data_table(matches)["match"].tolist()[:2] == [0.93, -0.21]
    remedies = severity_figure(postmortems.remedy())
    ends = {trace.name: list(trace.x) for trace in remedies.data if trace.name}
    assert ends["before"] == [0.41] * 3, "what did not end is not drawn"
    assert ends["after, kept"] == [0.004]
    assert ends["after, harmful, rolled back"] == [0.56]
    assert ends["healthy runs stay left of this"] == [0.011] * 2
    assert data_table(remedies)["outcome"].tolist() == ["rolled back", "harmful, rolled back", "kept", "did not end"]


def test_a_remedy_that_does_not_help_and_one_without_need_are_said(tmp_path: Path) -> None:
    ill = postmortems.remedy()
    none = Remedy(ill.model, ill.cause, 0, 15, ill.before, ill.margin, ill.trials[:2])
    assert "Nothing that was tried helps against gradient_overflow" in compose(gather([none])).lead[0]
    well = Remedy(ill.model, ill.cause, 0, 15, postmortems.severity(0.01), ill.margin, ())
    assert "needs no remedy: severity 0.010, healthy runs reach 0.011." in compose(gather([well])).lead[0]


def test_a_log_without_metrics_and_one_too_short(tmp_path: Path) -> None:
    crashed = compose(gather(open_incidents(postmortems.shipped("crashed_before_step_1.log"))))
    assert "could not be judged, since its log has no metric; it contains" in crashed.lead[0]
    assert crashed.sections[0].title == "What the log holds"
    short = incident(log_of(tmp_path, verl(range(1, 4))))
    assert short.verdict == "could not judge"
    document = compose(gather([short]))
    assert "Could not judge" in document.lead[0]
    assert "The run has 3 steps" in Page(render_html(document)).text
    assert "Probable cause" not in [section.title for section in document.sections]


def test_a_healthy_run_is_said_to_be_so() -> None:
    healthy = [run("original", seed, n_experts=32) for seed in range(100, 108)]
    found = incident(run("original", 1, n_experts=32), healthy)
    document = compose(gather([found]))
    assert "No alarm" in document.lead[0]
    assert [f.caption for s in document.sections for f in s.blocks if isinstance(f, Figure)][-1] == "The usual signals."


def test_names_and_notes_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = verl(range(1, 41), critic__score__mean=0.5) + verl(range(41, 61), critic__score__mean=9.5)
    log = log_of(tmp_path, rows)
    found = incident(log, name=evil, facts={evil: evil})
    actions = (Action(evil, step=3), Action("[x](javascript:alert(3)) `a`"))
    document = compose(gather([found], Words(evil, evil, (evil, "# a heading", "1. a list"), actions)))
    source = render_html(document)
    page = Page(source)
    assert len(page.all("script")) == 1 + len(page.all("figure")), "plotly.js and its figures only"
    assert not page.all("img")
    assert "<script>alert" not in source
    assert "onerror=alert(2)>" not in source.replace("onerror=alert(2)&gt;", "")
    assert page.text.count("alert(1)") > 5, "it is shown as it stands"
    markdown = render_markdown(document)
    assert not re.search(r"(?<!\\)<(script|img)", markdown)
    assert "](javascript" not in markdown
    assert "\n\\# a heading" in markdown
    assert json.loads(render_json(document))["title"] == evil


def test_several_runs_have_sections_of_their_own() -> None:
    document = compose(gather([postmortems.poisoned(), postmortems.beside()]))
    titles = [section.title for section in document.sections]
    assert titles[:3] == [f"{what}: trainer_state" for what in ("Timeline", "What was seen", "Probable cause")]
    assert "Timeline: quiet & <odd>" in titles
    anchors = [section.anchor for section in document.sections]
    assert len(set(anchors)) == len(anchors)


def test_results_are_read_by_what_they_are(tmp_path: Path) -> None:
    saved = [
        postmortems.remedy().save(tmp_path / "remedy.json"),
        postmortems.reproduction().save(tmp_path / "reproduction.json"),
        run("original", 0).save(tmp_path / "trace.parquet"),
    ]
    found = load_results(saved)
    assert [type(one).__name__ for one in found] == ["Remedy", "Reproduction", "Trace"]
    assert found[0] == postmortems.remedy()
    report = postmortem(postmortems.shipped("trainer_state.json"), results=saved)
    assert report.title == "Postmortem: trainer_state"
    assert (len(report.incidents), len(report.remedies), len(report.traces)) == (1, 1, 1)
    facts = report.incidents[0].facts
    assert re.fullmatch(r"[0-9a-f]{64}", facts["SHA-256 of the log"])


@pytest.mark.parametrize(
    ("content", "words"), [("{", "no result"), ("[]", "the format None"), ('{"format": "x"}', "the format 'x'")]
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(MoeproxyError, match=words):
        load_results([tmp_path / "a.json"])


@pytest.mark.bad_types
def test_nothing_and_something_else_are_refused() -> None:
    with pytest.raises(MoeproxyError, match="no result to report"):
        gather([])
    with pytest.raises(MoeproxyError, match="a float among the results"):
        gather([math.pi])  # pyright: ignore[reportArgumentType]


def test_values_are_shown_as_they_were_logged(tmp_path: Path) -> None:
    """What is judged is bounded: the line and its table have the values of the log, and a mean is said to be beyond."""
    waves = {step: 0.01 * ((step * 7919) % 13 - 6) for step in range(1, 41)}
    rows = [
        {"step": s, "policy_loss": 1e308 if s >= 25 else 0.2 + w, "grad_norm": 1e307 if s >= 25 else 1.0 + w}
        for s, w in waves.items()
    ]
    (tmp_path / "huge.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = open_incidents(tmp_path / "huge.jsonl")
    figure = signals_figure(found, found.judgements[0])
    table = data_table(figure)
    assert (table["policy_loss"].tolist()[-1], table["grad_norm"].tolist()[-1]) == (1e308, 1e307)
    (loss,) = [line for line in figure.data if line.name == "this run" and line.customdata[-1] == 1e308]
    assert loss.y[-1] == 1e300, "plotly draws no larger ones"
    assert "customdata" in loss.hovertemplate
    assert "policy_loss beyond 1e+50 instead of 0.203 from step 25" in describe(figure)
    assert "1e+60" not in describe(figure)
    assert [judged_number(value) for value in (-1e60, 1e50, 12345.0)] == ["beyond -1e+50", "beyond 1e+50", "1.23e+04"]
    cells = [str(row["seen"]) for block in _tables(found) for row in block.frame.to_dict("records") if "seen" in row]
    assert cells == ["beyond 1e+50", "beyond 1e+50"]


def _tables(found: Incident) -> list[Table]:
    sections = compose(gather([found])).sections
    return [block for section in sections for block in section.blocks if isinstance(block, Table)]


def test_a_log_without_a_metric_says_what_to_do() -> None:
    (found,) = open_incidents(postmortems.shipped("own_columns.csv"))
    words = [b.text for section in compose(gather([found])).sections for b in section.blocks if isinstance(b, Text)]
    assert any(text.startswith("What to do: name the columns with a mapping") for text in words)


def test_the_caption_of_an_overlay_says_whose_lines_it_has() -> None:
    """A lone broken run is no pair of original and proxy, and none of it is healthy."""
    effect = FAULTS["quiet_update"]
    broken, other = (run(name, 0, n_experts=8, fault="quiet_update", effect=effect) for name in ("original", "half"))
    healthy = run("original", 0, n_experts=8)
    captions = [
        next(b.caption for s in compose(gather(traces)).sections for b in s.blocks if isinstance(b, Figure))
        for traces in ([broken], [broken, healthy], [broken, other, healthy])
    ]
    source = broken.provenance.source
    assert captions == [
        f"Original, with quiet_update; from {source} runs.",
        f"Original, healthy and with quiet_update; from {source} runs.",
        f"Original and half, healthy and with quiet_update (half without a healthy run); from {source} runs.",
    ]
