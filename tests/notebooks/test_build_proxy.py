"""Notebook 02 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
panel.choose(8)
assert panel.settle()
assert "8 of 32 experts" in panel.figure.widget.layout.title.text
panel.job.start()
assert panel.job.join(120) == "done", panel.status.text
assert panel.fidelity.n_keep == 8
assert panel.fidelity_table.frame["measure"].tolist()[-1] == "task score"
assert panel.fidelity.kl > measured.kl, "fewer experts, farther away"
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("02_build_proxy.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=2)
