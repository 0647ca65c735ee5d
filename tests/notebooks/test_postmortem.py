"""Notebook 08 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute

PROBE = """
panel.images.value = False
panel.actions.rows[0].text.value = "somebody <b>ended</b> it"
panel.folder.value = "../out/again"
again = panel.write()
assert "somebody &lt;b&gt;ended" in again.read_text()
again.write_text("mine")
panel.job.start()
assert panel.job.join(60) == "failed"
assert "would be lost" in panel.status.text
assert again.read_text() == "mine"
"""


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    check_executed(execute("08_postmortem.ipynb", PROBE, root, tmp_path / "home"), n_figures=0)
    assert (root / "out/postmortem/index.html").stat().st_size > 4e6
