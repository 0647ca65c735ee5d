"""Notebook 03 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
panel.controls.second.value = "random-16"
panel.controls.seeds.value = "1"
assert panel.settle()
assert not panel.status.is_error, panel.status.text
assert panel.state.asked.models == ("original", "cluster-16", "random-16")
assert panel.state.asked.seeds == (1,)
assert set(panel.verdict.rows["seeds"]) == {"1"}
assert "One seed only" in panel.verdict.text
panel.controls.steps.value = 5
panel.job.start()
assert panel.job.join(60) == "failed", "the fault would act after the last step"
assert "onset is step" in panel.status.text
panel.controls.seeds.value = "x"
assert panel.status.is_error
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("03_reproduce.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
