"""The parameters of a notebook are the reader's: with other valid values it runs to its end too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.running import check_executed, execute


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("03_reproduce.ipynb", {"fault": "kl_sign"}),
        ("05_remedy.ipynb", {"fault": "kl_sign"}),
    ],
)
def test_every_cell_runs_with_other_values(name: str, values: dict[str, object], tmp_path: Path) -> None:
    """The fault chosen is the one of the catalogue that leaves least to show: no run falls ill, no remedy is tried."""
    check_executed(execute(name, "", tmp_path / "root", tmp_path / "home", values), n_figures=0)
