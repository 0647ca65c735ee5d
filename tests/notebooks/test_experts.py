"""Notebook 01 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
assert panel.state.layout == "UMAP", "layouts of this model are shipped"
panel.choose(8)
panel.layer.value = 3
panel.scope.value = True
panel.weight_sliders[3].value = 7
assert panel.settle()
assert panel.plan.n_keep == 8, panel.status.text
assert panel.state.layout == "PCA", "nobody computed a UMAP for these weights"
assert len(panel.figure.widget.data[3].x) == 4 * 32
assert panel.summary.text.startswith("Layer 3 keeps 8 of 32 experts")
panel.pick("1000")
assert panel.status.is_error
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("01_experts.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
