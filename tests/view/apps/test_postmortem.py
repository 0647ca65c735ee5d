"""The postmortem panel without a browser: choose, edit, write, refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.traces.pack import REGISTRY
from moeproxy.view.actions import Action
from moeproxy.view.apps.postmortem import PostmortemPanel
from moeproxy.view.apps.postmortem_actions import ActionTable
from moeproxy.view.apps.ui import Status
from tests.view import postmortems
from tests.view.made_logs import verl

STOPPED = Action("job ended", step=35, kind="stopped")


@pytest.fixture
def panel(tmp_path: Path) -> PostmortemPanel:
    made = PostmortemPanel(out=tmp_path / "out", actions=[STOPPED], title="Overflow", notes="One.\n\nTwo.")
    made.images.value = False
    return made


def test_the_report_is_written_and_shown(
    panel: PostmortemPanel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = postmortems.remedy().save(tmp_path / "remedy.json")
    panel.results.value = f"{saved}\n\n"
    page = panel.write()
    assert page == tmp_path / "out" / "index.html"
    assert panel.status.text == f"Written: {page}"
    assert panel.document is not None
    assert "gradient_overflow" in panel.said.value
    assert "[page](out/index.html)" in panel.links.outputs[0]["data"]["text/markdown"]
    assert panel.pictures.value == "", "no images were asked for"
    data = json.loads((page.parent / "report.json").read_text())
    assert data["title"] == "Overflow"
    assert data["notes"] == ["One.", "Two."]
    assert data["actions"] == [{"text": "job ended", "step": 35, "time": "", "kind": "stopped"}]
    assert len(data["remedies"]) == 1


def test_what_is_wrong_is_said_and_nothing_is_lost(panel: PostmortemPanel, tmp_path: Path) -> None:
    page = panel.write()
    page.write_text("edited")
    with pytest.raises(MoeproxyError, match="was changed after it was written"):
        panel.write()
    assert page.read_text() == "edited"
    panel.folder.value = " "
    with pytest.raises(MoeproxyError, match="no folder"):
        panel.write()
    panel.folder.value = str(tmp_path / "other")
    panel.actions.rows[0].step.value = "soon"
    with pytest.raises(MoeproxyError, match="action 1: an action at step 'soon'"):
        panel.write()
    panel.actions.rows[0].remove.click()
    panel.source.log.text.value = str(tmp_path / "none.log")
    with pytest.raises(MoeproxyError, match=r"none\.log"):
        panel.write()
    assert panel.status.is_error
    assert not (tmp_path / "other").exists()


def test_healthy_logs_are_used(tmp_path: Path) -> None:
    import numpy as np

    def log(name: str, seed: int, jump: float = 0.0) -> Path:
        draw = np.random.default_rng(seed)
        rows = (
            verl(range(step, step + 1), critic__score__mean=float(draw.normal(0.5 + jump * (step > 30), 0.02)))
            for step in range(1, 61)
        )
        (tmp_path / name).write_text("".join(rows))
        return tmp_path / name

    good = [log(f"good{seed}.log", seed) for seed in range(6)]
    panel = PostmortemPanel(log("bad.log", 9, jump=-0.4), out=tmp_path / "out")
    panel.images.value = False
    panel.source.healthy.value = "\n".join(map(str, good))
    panel.write()
    (found,) = json.loads((tmp_path / "out" / "report.json").read_text())["incidents"]
    assert found["healthy_runs"] == 6
    assert found["attempts"][0]["diagnosis"]["detection"]["onset"] == 31
    assert "good5.log" in found["facts"]["healthy runs"]


def test_a_recorded_run_is_judged_beside_its_models_healthy_ones(tmp_path: Path) -> None:
    panel = PostmortemPanel(out=tmp_path / "out")
    panel.images.value = False
    if not (panel.source._bench / REGISTRY).is_file():
        pytest.skip("data/bench is not there")
    panel.source.kind.value = "a recorded run"
    assert panel.source.run.value is not None, "the first of the list is chosen"
    panel.source.model.value = "original"
    assert panel.source.run.value is not None
    panel.source.choose("cluster-16", "gradient_overflow 1 ")
    assert panel.source._of_log.layout.display == "none"
    (found,) = panel.source.open()
    assert found.name.startswith("cluster-16, gradient_overflow 1 from step ")
    assert len(found.healthy) >= 6
    assert found.verdict == "alarm"
    assert "one of those that the diagnosis has learned from" in found.notes[0]
    run = found.run.provenance  # pyright: ignore[reportAttributeAccessIssue]
    assert found.judgements[0].diagnosis.detection.onset == run.onset
    with pytest.raises(MoeproxyError, match="no recorded run 'x' of cluster-16"):
        panel.source.choose("cluster-16", "x")
    with pytest.raises(MoeproxyError, match="no recorded run of 'y'"):
        panel.source.choose("y", "x")


def test_rows_of_actions_are_added_named_and_removed() -> None:
    table = ActionTable([STOPPED], Status())
    table.add.click()
    table.add.click()
    assert table.actions == (STOPPED,), "empty rows say nothing"
    table.rows[2].step.value, table.rows[2].text.value, table.rows[2].kind.value = "11", "restored", "restored"
    assert table.actions == (STOPPED, Action("restored", step=11, kind="restored"))
    names = [field.description for field in table.rows[2].widget.children]
    assert names == ["3. step", "3. time", "3. kind", "3. what", "Remove 3"]
    table.rows[1].remove.click()
    assert [row.step.description for row in table.rows] == ["1. step", "2. step"]
    assert len(table.actions) == 2
