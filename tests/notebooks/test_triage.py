"""Notebook 04 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
assert len(panel.view.runs) == 2
panel.pair.kind.value = "nothing"
panel.signals.value = ("grad_norm", "kl")
assert panel.settle()
assert panel.view.signals == ("grad_norm", "kl")
assert len(panel.view.runs) == 1
panel.follow.value = True
assert panel.following.running
panel.follow.value = False
assert not panel.status.is_error, panel.status.text
panel.read("nowhere.log")
assert panel.settle()
assert panel.status.is_error
assert panel.log is not crashed
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("04_triage.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
