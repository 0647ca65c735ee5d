"""Notebook 00 runs from top to bottom without a browser, and its panel answers."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.running import ROOT, copy_of

# Appended to the notebook: what a reader would do with the panel.
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


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    folder = copy_of(ROOT / "notebooks", tmp_path_factory.mktemp("start"))
    notebook = nbformat.read(folder / "00_start_here.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    home = str(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, home)
        # Widget state would add 5 MB a figure; nobody reads it here.
        NotebookClient(
            notebook,
            timeout=540,
            kernel_name="python3",
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return notebook


def _outputs(notebook: nbformat.NotebookNode, kind: str) -> list[nbformat.NotebookNode]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


@pytest.mark.slow
def test_every_cell_runs_and_the_panel_answers(executed: nbformat.NotebookNode) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert _outputs(executed, "error") == []


@pytest.mark.slow
def test_nothing_is_shown_in_red(executed: nbformat.NotebookNode) -> None:
    red = [output.text for output in _outputs(executed, "stream") if output.name == "stderr"]
    assert red == []


@pytest.mark.slow
def test_figures_are_drawn_as_figures(executed: nbformat.NotebookNode) -> None:
    shown = _outputs(executed, "execute_result") + _outputs(executed, "display_data")
    figures = [output for output in shown if "application/vnd.plotly.v1+json" in output.data]
    assert len(figures) == 4
    assert all(output.data["application/vnd.plotly.v1+json"]["layout"]["meta"]["alt"] for output in figures)
    assert "widgets" not in executed.metadata


def test_data_of_the_recorded_twins_is_shipped(tmp_path: Path) -> None:
    copy_of(ROOT / "notebooks", tmp_path)
    assert len(list((tmp_path / "out/start_here/runs").iterdir())) == 6
