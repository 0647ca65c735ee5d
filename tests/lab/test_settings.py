"""Settings that no run can have are refused when they are made, not after hours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import LabError
from moeproxy.lab import train
from moeproxy.lab.executors import chosen
from moeproxy.lab.settings import GRPOSettings, _check_number


@pytest.mark.parametrize("name", ["beta", "learning_rate", "temperature"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_settings_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(LabError, match=name):
        GRPOSettings(**{name: value})


# Tests check types at every call, users do not: what they would get is asked of the function itself.
@pytest.mark.parametrize("value", [1.5, True, "1", None, float("nan"), 2.0])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(LabError, match="steps is"):
        _check_number("steps", value, whole=True)


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(LabError, match="beta is"):
        _check_number("beta", value)


def test_numpy_s_numbers_are_numbers() -> None:
    _check_number("steps", np.int64(5), whole=True)
    _check_number("beta", np.float64(0.5))


@pytest.mark.parametrize("workers", [0, -1])
def test_no_worker_is_refused(workers: int) -> None:
    with pytest.raises(LabError, match=f"workers is {workers}"):
        chosen("local", workers)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no readable settings"), ("[", "no readable settings"), ("{}", "no model is named")]
)
def test_the_command_says_in_one_line_what_is_wrong(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.json"
    if text is not None:
        spec.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train", "--spec", str(spec), "--out", str(tmp_path / "trace.parquet")])
    with pytest.raises(SystemExit, match=words):
        train.main()
    assert not (tmp_path / "trace.parquet").exists()
