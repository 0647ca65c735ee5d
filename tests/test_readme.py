"""The README tells the truth: its tables are those of the shipped data, its paths exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import readme_tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("make", [readme_tables.accuracies, readme_tables.gains, readme_tables.verdicts])
def test_tables_are_those_of_the_shipped_data(make) -> None:
    table = make()
    assert table in README, f"README.md needs this table (python -m tests.readme_tables):\n{table}"


def test_linked_files_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
