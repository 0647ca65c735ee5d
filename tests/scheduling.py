"""Which tests one process of several runs: a file's, which share fixtures, and all that start a Jupyter kernel.

pytest-xdist's own `loadgroup` groups nothing with pytest 9.2 (xdist 3.8 writes the group where that pytest does not
look for it), and its `loadfile` starts with the files of most tests, which are not those that take longest.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

JUPYTER = ("tests/browser/", "tests/notebooks/")
"""Kernels that start at the same time race for ports ("Kernel died before replying")."""

LONGEST = ("jupyter", "tests/triage/test_evaluate_logged.py", "tests/lab/test_executors.py")
"""Groups that take minutes. What begins last must be short, or one process waits for the other."""


def group_of(nodeid: str) -> str:
    """Return the group of a test."""
    file = nodeid.partition("::")[0]
    return "jupyter" if file.startswith(JUPYTER) else file


def place_of(nodeid: str) -> int:
    """Return a number by which tests are sorted: those that take longest come first, the others stay as they are."""
    group = group_of(nodeid)
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


class ByGroup(LoadScopeScheduling):
    """Hands out whole groups, in the order of their first tests."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
