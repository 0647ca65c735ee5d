"""The parameters of a notebook are the reader's: with other valid values it runs to its end too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import ROOT, check_executed, execute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("03_reproduce.ipynb", {"fault": "kl_sign"}),
        ("04_triage.ipynb", {"log": str(ROOT / "data" / "logs" / "crashed_before_step_1.log")}),
        ("05_remedy.ipynb", {"fault": "kl_sign"}),
        ("06_scale.ipynb", {"world": 64, "ep": 8, "tokens": 2048, "n_keep": 64, "device": "H200"}),
    ],
)
def test_every_cell_runs_with_other_values(name: str, values: dict[str, object], tmp_path: Path) -> None:
    """What is chosen leaves least to show: a fault that makes no run ill, a log without a metric, a small world."""
    check_executed(execute(name, "", tmp_path / "root", tmp_path / "home", values), n_figures=0)
