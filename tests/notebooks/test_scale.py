"""Notebook 06 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
panel.choose(ep=12)
assert panel.settle()
assert panel.status.is_error
assert "1, 2, 4" in panel.status.text, panel.status.text
panel.choose(ep=16, tokens=16384)
assert panel.settle()
assert not panel.status.is_error, panel.status.text
assert "does not fit" in panel.advice.value
assert "recompute activations" in panel.advice.value
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    check_executed(execute("06_scale.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
