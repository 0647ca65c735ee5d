"""The log panel without a browser: reading, mapping, following, comparing, and what a log without metrics says."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import MoeproxyError, TraceError
from moeproxy.view.apps import log_follow
from moeproxy.view.apps.logs import LogPanel
from tests.view.made_logs import trace, verl

LINE, SECOND = 8, 12  # of the first and the second run in the first panel


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(verl(range(1, 31), critic__score__mean=0.5, actor__pg_loss=0.25))
    return path


@pytest.fixture
def panel(log: Path, tmp_path: Path) -> LogPanel:
    opened = LogPanel(log, out=tmp_path / "out", runs=[tmp_path / "own"])
    assert opened.settle()
    return opened


def _read(panel: LogPanel, path: Path, text: str) -> None:
    path.write_text(text)
    panel.read(path)
    assert panel.settle()


def test_a_log_is_read_described_and_drawn_at_once(panel: LogPanel) -> None:
    assert panel.status.text == "Read train.log: 1 run."
    assert panel.run.options == (("1: train, verl, 30 steps", 0),)
    assert panel.signals.value == ("policy_loss", "grad_norm", "reward_mean")
    assert panel.signals.options[0] == ("policy loss (actor/pg_loss)", "policy_loss")
    assert panel.summary.text.startswith("train (verl), steps 1 to 30: policy loss 0.25 to 0.25; grad norm 1 to 30")
    assert "Framework" in panel.about.value
    assert panel.figure.widget.data[LINE].y.tolist() == [0.25] * 30
    assert panel.table.frame["signal"].tolist() == ["policy loss", "grad norm", "reward mean"]
    assert not panel.map.value, "the framework is known"
    assert panel.log.trace.values("grad_norm")[-1] == 30.0


def test_chosen_signals_are_drawn_and_too_many_are_refused(panel: LogPanel, tmp_path: Path) -> None:
    panel.signals.value = ("grad_norm",)
    assert panel.settle()
    assert panel.figure.widget.data[LINE].y.tolist() == [float(step) for step in range(1, 31)]
    names = ("actor/pg_loss", "actor/loss", "actor/entropy", "actor/kl_loss", "actor/ppo_kl", "actor/pg_clipfrac")
    _read(panel, tmp_path / "b.log", verl(range(1, 3), **{name.replace("/", "__"): 1.0 for name in names}))
    assert len(panel.signals.value) == 4, "another log begins with the usual ones"
    panel.signals.value = tuple(name for _, name in panel.signals.options)
    assert panel.settle()
    assert "7 signals for one figure" in panel.status.text
    panel.signals.value = panel.signals.value[:2]
    assert panel.settle()
    assert not panel.status.is_error


def test_a_log_without_metrics_shows_what_it_contains_and_no_empty_plot(panel: LogPanel, tmp_path: Path) -> None:
    _read(panel, tmp_path / "b.log", "Training:   0%|   | 0/58 [00:00<?]\nKilled\n")
    assert "No metric in this log" in panel.summary.text
    assert "progress that ends at 0/58" in panel.summary.text
    assert "killed on line 2" in panel.about.value
    assert panel._figure_box.layout.display == "none"
    assert panel.table.widget.value == ""
    _read(panel, tmp_path / "train.log", verl(range(1, 3)))
    assert panel._figure_box.layout.display == ""


def test_columns_of_an_unknown_log_are_mapped_by_the_lists(panel: LogPanel, tmp_path: Path) -> None:
    rows = "".join(f"{n},{n / 8},{n / 4},{n}\n" for n in range(1, 6))
    _read(panel, tmp_path / "own.csv", f"update,gnorm,avg_reward,colour\n{rows}")
    assert panel.map.value, "the lists open by themselves"
    assert panel.mapping.widget.layout.display == ""
    assert panel.mapping.lists["gnorm"].value == "grad_norm"
    panel.mapping.lists["avg_reward"].value = ""
    panel.mapping.lists["colour"].value = "kl"
    panel.mapping.apply.click()
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    assert panel.log.trace.signals == ("grad_norm", "kl")
    assert panel.log.trace.values("grad_norm").tolist() == [n / 8 for n in range(1, 6)]
    assert panel.log.trace.steps.index.tolist() == [1, 2, 3, 4, 5]
    assert panel.mapping.lists["avg_reward"].value == "", "what was applied stands in the lists"
    assert panel.mapping.step.value == "update"
    panel.mapping.lists["colour"].value = "grad_norm"
    panel.mapping.apply.click()
    assert panel.settle()
    assert "both mapped to grad_norm" in panel.status.text
    panel.read_button.click()
    assert panel.settle()
    assert not panel.log.has_metrics, "Read reads as if for the first time"


def test_errors_stand_in_the_status_line_and_the_last_log_stays(panel: LogPanel, tmp_path: Path) -> None:
    panel.read(tmp_path / "absent.log")
    assert panel.settle()
    assert "no such file or directory" in panel.status.text
    assert panel.status.is_error
    assert panel.log.info.name == "train"
    panel.source.text.value = ""
    panel.read_button.click()
    assert panel.settle()
    assert "no path" in panel.status.text


@pytest.mark.parametrize("what", ["path", "healthy runs", "mapping"])
def test_what_arrives_just_after_a_click_counts(what: str, panel: LogPanel, tmp_path: Path) -> None:
    """JupyterLab may hand over the click before the text that was typed before it."""
    (tmp_path / "other.log").write_text(verl(range(1, 4), actor__pg_loss=0.25))
    if what == "path":
        panel.read_button.click()
        panel.source.text.value = str(tmp_path / "other.log")
        assert panel.settle()
        assert panel.log.info.name == "other"
    elif what == "healthy runs":
        panel.verdict.use.click()
        panel.verdict.path.value = str(tmp_path / "absent.log")
        assert panel.settle()
        assert "absent.log" in panel.status.text
    else:
        _read(panel, tmp_path / "own.csv", "update,gnorm\n1,2\n2,2\n")
        panel.mapping.apply.click()
        panel.mapping.lists["gnorm"].value = "kl"
        assert panel.settle()
        assert panel.log.trace.signals == ("kl",)


def test_a_panel_without_a_readable_log_opens_all_the_same(tmp_path: Path) -> None:
    empty = LogPanel(tmp_path / "absent.log", out=tmp_path)
    assert empty.settle()
    assert empty.status.is_error
    with pytest.raises(TraceError, match="nothing was read"):
        _ = empty.log


def test_a_run_of_the_lab_is_laid_over_with_notes_on_definitions(panel: LogPanel, tmp_path: Path) -> None:
    proxy = trace(policy_loss=np.full(30, 0.125), grad_norm=np.full(30, 2.0), reward_mean=np.full(30, 0.75))
    proxy.save(tmp_path / "own" / "cluster-16--kl_sign-1-at20--s0--0011223344556677.parquet")
    panel.pair.choose("cluster-16", "kl_sign-1-at20, s0 (own)")
    assert panel.settle()
    assert panel.figure.widget.data[SECOND].y.tolist() == [0.125] * 30
    assert set(panel.view.notes) == {"policy_loss", "grad_norm"}
    assert "verl, mean over the update&#x27;s micro-batches" in panel.notes.value
    assert "≠ defined differently" in panel.figure.widget.layout.annotations[0].text
    assert panel.table.frame["run"].nunique() == 2
    panel.pair.kind.value = "nothing"
    assert panel.settle()
    assert (panel.notes.value, len(panel.view.runs)) == ("", 1)


def test_several_runs_of_one_file_can_be_chosen_and_compared(panel: LogPanel, tmp_path: Path) -> None:
    _read(panel, tmp_path / "two.log", verl(range(1, 6)) + verl(range(1, 4), actor__pg_loss=1.0))
    assert [text for text, _ in panel.run.options] == ["1: two [run 1], verl, 5 steps", "2: two [run 2], verl, 3 steps"]
    panel.run.value = 1
    assert panel.settle()
    assert panel.signals.value == ("grad_norm",), "the signals chosen stay where a run of the same file has them"
    panel.pair.kind.value = "log"
    assert panel.settle()
    assert len(panel.view.runs) == 2
    assert panel.view.notes == {}


def test_a_growing_log_is_followed_and_the_zoom_stays(
    panel: LogPanel, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel.following, "_look_s", 0.02)
    panel.follow.value = True
    data = {"xaxis.range[0]": 20.0, "xaxis.range[1]": 40.0}
    panel.figure.widget._handler_js2py_relayout({"new": {"relayout_data": data, "source_view_id": "page"}})
    with log.open("a") as stream:
        stream.write(verl(range(31, 36), critic__score__mean=0.75, actor__pg_loss=0.5))
    for _ in range(300):
        if len(panel.log.trace.steps) == 35 and "Following train.log: 35 rows" in panel.status.text:
            break
        time.sleep(0.02)
    assert panel.settle()
    assert panel.log.trace.steps.index[-1] == 35
    assert panel.figure.seen == (20.0, 40.0)
    assert panel.figure.widget.data[LINE].x.tolist() == [float(step) for step in range(19, 36)]
    panel.follow.value = False
    assert panel.following.join()
    assert not panel.following.running


def test_what_cannot_be_followed_is_said_and_the_button_springs_back(panel: LogPanel, tmp_path: Path) -> None:
    _read(panel, tmp_path / "x.csv", "step,grad_norm\n1,0.5\n2,0.25\n")
    panel.follow.value = True
    assert "it cannot be followed" in panel.status.text
    assert not panel.follow.value
    assert log_follow.LOOK_S >= 0.5, "a page is not flooded"


def test_shipped_examples_can_be_read_by_name(panel: LogPanel) -> None:
    assert panel.example("trainer_state.json").info.framework == "trl"
    assert "not finite, logged as something else (46)" in [one.name for one in panel.figure.widget.data]
    with pytest.raises(MoeproxyError, match="no example 'typo'"):
        panel.example("typo")


def test_an_upload_is_read(panel: LogPanel, tmp_path: Path) -> None:
    content = memoryview(verl(range(1, 8)).encode())
    panel.source._uploaded({"new": ({"name": "mine.log", "content": content},)})
    assert panel.settle()
    assert panel.log.info.files == (str(tmp_path / "out" / "uploads" / "mine.log"),)
    assert len(panel.log.trace.steps) == 7
