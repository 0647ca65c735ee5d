"""The house rules that a parser can check: import direction, file length, no print in the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moeproxy"
MAX_LINES = 450

# Each room and the rooms it may import. Names of single files within a room go before the room itself.
ALLOWED: dict[str, set[str]] = {
    "traces": set(),
    "experts": set(),
    "proxy": {"experts"},
    "lab": {"experts", "proxy", "traces"},
    "triage": {"traces"},
    "triage/learn.py": {"traces", "lab"},
    "triage/reproduce.py": {"traces", "experts", "proxy", "lab"},
    "triage/remedy.py": {"traces", "experts", "proxy", "lab"},
    "triage/remedy_study.py": {"traces", "experts", "proxy", "lab"},
    "scale": {"traces", "experts", "proxy", "lab"},
    "recovery": {"traces", "experts", "proxy", "lab"},
    "view": {"traces", "experts", "proxy", "lab", "triage", "scale", "recovery"},
}
SHARED = {"errors", "files", "lazy", "places"}
TORCH_FREE = (
    "__init__.py",
    "errors.py",
    "files.py",
    "lazy.py",
    "recovery/calculator",
    "recovery/channel",
    "recovery/checkpoints",
    "recovery/detection",
    "recovery/effective",
    "recovery/events",
    "recovery/machine_faults",
    "recovery/manager_role",
    "recovery/parting",
    "recovery/plan",
    "recovery/policy",
    "recovery/saved",
    "recovery/timeline",
    "recovery/torchft_log",
    "traces/",
    "triage/alarms",
    "triage/arrays",
    "triage/alone",
    "triage/catalogue",
    "triage/compare",
    "triage/course",
    "triage/departure",
    "triage/detect",
    "triage/diagnose",
    "triage/fingerprint",
    "triage/jsonable",
    "triage/judged",
    "triage/learned",
    "triage/library",
    "triage/logs",
    "triage/metric_checks",
    "triage/mixed",
    "triage/reference",
    "triage/restarts",
)
HEAVY = {"torch", "transformers", "trl", "accelerate", "datasets"}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _imports(path: Path) -> Iterator[str]:
    """Yield every absolute module name that the file imports anywhere, in functions too."""
    package = ("moeproxy", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parts, *([node.module] if node.module else [])])
            # `from moeproxy import x` names the room in x.
            yield from ((f"{module}.{alias.name}" for alias in node.names) if module == "moeproxy" else (module,))


def _rooms_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("moeproxy.")}


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_imports_point_down(path: Path) -> None:
    name = _relative(path)
    room = name.split("/")[0]
    if "/" not in name:  # the top level may use every room; what all rooms share uses none
        wrong = _rooms_imported(path) - SHARED if path.stem in SHARED else set()
    else:
        assert room in ALLOWED, f"{name}: a room that test_layers.py does not know; add it to ALLOWED"
        wrong = _rooms_imported(path) - ALLOWED.get(name, ALLOWED[room]) - SHARED - {room}
    assert not wrong, f"{name} imports {sorted(wrong)}, which lie above it"


@pytest.mark.parametrize("path", [p for p in _files() if _relative(p).startswith(TORCH_FREE)], ids=_relative)
def test_judging_needs_no_torch(path: Path) -> None:
    found = {name.split(".")[0] for name in _imports(path)} & HEAVY
    assert not found, f"{_relative(path)} imports {sorted(found)}; traces must be readable without them"


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_library_does_not_print(path: Path) -> None:
    if path.name == "__main__.py":
        pytest.skip("the command line talks to its user")
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    lines = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
    assert not lines, f"{_relative(path)} prints on lines {lines}; report progress through tqdm or a callback"


@pytest.mark.parametrize(
    "path", [*_files(), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_files_stay_short(path: Path) -> None:
    length = len(path.read_text(encoding="utf-8").splitlines())
    assert length <= MAX_LINES, f"{path.name} has {length} lines; split it (at most {MAX_LINES})"
