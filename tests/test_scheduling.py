"""Tests that share fixtures or race for ports run in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduling import LONGEST, group_of, place_of

pytest_plugins = "pytester"


def test_a_file_is_a_group_and_all_kernels_are_one() -> None:
    assert group_of("tests/lab/test_grpo.py::test_one[a::b]") == "tests/lab/test_grpo.py"
    kernels = {group_of("tests/browser/test_logs.py::test_logs"), group_of("tests/notebooks/test_run.py::test_run[01]")}
    assert kernels == {LONGEST[0]}


def test_the_longest_come_first_and_the_rest_stays_in_order() -> None:
    names = ["tests/a.py::b", "tests/lab/test_executors.py::test_ray", "tests/a.py::a", "tests/browser/test_logs.py::x"]
    assert sorted(names, key=place_of) == [names[3], names[1], names[0], names[2]]


def test_processes_share_no_group(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(
        """
        import os
        import pytest
        from tests.scheduling import ByGroup

        def pytest_xdist_make_scheduler(config, log):
            return ByGroup(config, log)

        @pytest.fixture(scope="module")
        def process(request):
            with open(f"{request.config.rootpath}/made.txt", "a") as stream:
                stream.write(f"{request.module.__name__}\\n")
        """
    )
    body = "def test_one(process): pass\ndef test_two(process): pass\ndef test_three(process): pass\n"
    pytester.makepyfile(**{f"test_{name}": body for name in "abcd"})
    result = pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=12)
    made = (pytester.path / "made.txt").read_text().split()
    assert sorted(made) == [f"test_{name}" for name in "abcd"], "every module's fixture is made once"
