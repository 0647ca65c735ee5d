"""Notebook 05 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
panel.choose("tool_call_error", "cluster-16")
assert panel.diagnosis.causes
panel.cause.value = panel.cause.options[-1][1]
assert panel.settle()
assert panel.remedies.frame["remedy"].tolist() == list(panel._candidates())
assert not panel.status.is_error, panel.status.text
panel.which.value = ()
panel.job.start()
assert panel.job.join(60) == "failed"
assert "no remedy is chosen" in panel.status.text
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("05_remedy.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
