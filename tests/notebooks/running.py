"""Prepare a folder in which the notebooks can run, and run one, as the tests of two folders need it."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("out/start_here")


def copy_of(notebooks: Path, root: Path) -> Path:
    """Copy `notebooks` below `root`, with the recorded twins of the runs that notebook 00 trains.

    Training them takes two minutes, and `tests/lab` does that already. Where this machine rounds otherwise than
    the recording one, so that another proxy comes out, the notebook finds no twin and trains.
    """
    shutil.copytree(notebooks, root / "notebooks", ignore=shutil.ignore_patterns(".*", "out"))
    runs = root / OUT / "runs"
    runs.mkdir(parents=True)
    for model in ("original", "cluster-16"):
        for run in ("healthy", "*-1-at20"):
            for file in (ROOT / "data" / "runs").glob(f"{model}--{run}--s0--*.parquet"):
                shutil.copy(file, runs)
    return root / "notebooks"


def execute(
    name: str, probe: str, root: Path, home: Path, values: Mapping[str, object] | None = None
) -> nbformat.NotebookNode:
    """Run a copy of a notebook below `root` with `probe` appended: what a reader would do with its panel.

    Args:
        name: file name of the notebook.
        probe: code of the appended cell.
        root: folder that the copy goes to.
        home: folder for Jupyter's own state.
        values: parameters to be set otherwise than in the notebook, by name.
    """
    folder = copy_of(ROOT / "notebooks", root)
    notebook = nbformat.read(folder / name, as_version=4)
    if values:
        cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
        assert values.keys() <= {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    notebook.cells.append(nbformat.v4.new_code_cell(probe or "pass"))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(variable, str(home))
        # Widget state would add 5 MB a figure; nobody reads it here.
        NotebookClient(
            notebook,
            timeout=540,
            kernel_name="python3",
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[nbformat.NotebookNode]:
    """Return all outputs of one kind."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


def check_executed(notebook: nbformat.NotebookNode, n_figures: int) -> None:
    """Assert that every cell ran, nothing is shown in red, and `n_figures` static figures carry a text alternative."""
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert outputs(notebook, "error") == []
    red = [output.text for output in outputs(notebook, "stream") if output.name == "stderr"]
    assert red == []
    shown = outputs(notebook, "execute_result") + outputs(notebook, "display_data")
    figures = [output for output in shown if "application/vnd.plotly.v1+json" in output.data]
    assert len(figures) == n_figures
    assert all(output.data["application/vnd.plotly.v1+json"]["layout"]["meta"]["alt"] for output in figures)
    assert "widgets" not in notebook.metadata
