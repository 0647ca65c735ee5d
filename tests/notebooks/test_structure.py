"""Notebooks stay thin: prose, parameters, one call a step; everything else belongs into the library."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_CELLS = 25
MAX_CODE_LINES = 12

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def _cells(path: Path, kind: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def _tree(path: Path) -> list[ast.stmt]:
    return [node for cell in _cells(path, "code") for node in ast.parse(cell.source).body]


def test_is_valid_and_numbered(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stem[:2].isdigit()
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_holds_no_results(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in _cells(path, "code"))
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}, "widget state would add 5 MB"
    assert notebook.metadata.kernelspec.name == "python3"


def test_is_thin(path: Path) -> None:
    assert len(nbformat.read(path, as_version=4).cells) < MAX_CELLS
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.Try)
    found = [type(n).__name__ for top in _tree(path) for n in ast.walk(top) if isinstance(n, defined)]
    assert not found, f"{found}: move them into the library"
    longest = max(len(cell.source.splitlines()) for cell in _cells(path, "code"))
    assert longest <= MAX_CODE_LINES


def test_opens_with_aim_inputs_and_expected_reading(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    for heading in ("**Aim**", "**Inputs**", "**Expected reading**"):
        assert heading in first.source


def test_has_one_parameters_cell_of_literals(path: Path) -> None:
    tagged = [cell for cell in _cells(path, "code") if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for node in ast.parse(tagged[0].source).body:
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        assert node.value is not None
        ast.literal_eval(node.value)


def test_ends_by_asserting_what_it_taught(path: Path) -> None:
    assert isinstance(_tree(path)[-1], ast.Assert)


def test_imports_only_what_a_reader_needs(path: Path) -> None:
    modules = {
        name.split(".")[0]
        for node in _tree(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert modules <= {"moeproxy", "pathlib"}


def test_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    here = f"/{FOLDER.parts[1]}/"  # where this checkout lies, whatever machine it is on
    assert all(word not in text for word in ("/home/", "/root/", "/tmp/", here, "C:\\\\"))
