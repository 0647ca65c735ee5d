"""Notebook 00 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import ROOT, check_executed, copy_of, execute

PROBE = """
panel.choose(8)
panel.layer.value = 2
assert panel.settle()
assert panel.plan.n_keep == 8, panel.status.text
assert "8 of 32 experts" in panel.figure.widget.layout.title.text
assert panel.summary.text.startswith("Layer 2 keeps experts")
panel.method.value = "frequency"
panel.job.start()
assert panel.job.join(120) == "done", panel.status.text
assert panel.proxy.plan.method == "frequency"
assert not panel.status.is_error
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("00_start_here.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=4)


def test_data_of_the_recorded_twins_is_shipped(tmp_path: Path) -> None:
    copy_of(ROOT / "notebooks", tmp_path)
    assert len(list((tmp_path / "out/start_here/runs").iterdir())) == 6
