"""`import moeproxy` is cheap, and every public name resolves."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moeproxy

# Imports a module where torch cannot be imported, and fails if anything heavy came along.
LIGHT = """
import importlib, sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "trl"}:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Ban())
importlib.import_module(sys.argv[1])
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def _modules_after(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, module], check=False, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pandas", "transformers", "plotly", "ipywidgets", "sklearn"}
    assert not _modules_after("moeproxy") & heavy


@pytest.mark.parametrize("module", ["moeproxy.traces.trace", "moeproxy.triage.compare"])
def test_judging_works_without_torch(module: str) -> None:
    assert not _modules_after(module) & {"torch", "transformers"}


@pytest.mark.parametrize("name", moeproxy.__all__)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(moeproxy, name)
    assert value.__doc__
    assert value.__module__.startswith("moeproxy.")
    assert name in dir(moeproxy)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = moeproxy.nonsense


def test_docstring_explains_every_axis() -> None:
    assert moeproxy.__doc__
    for axis in ("L layer", "E expert", "C cluster", "K top-k", "T token", "D width", "S step"):
        assert axis in moeproxy.__doc__
