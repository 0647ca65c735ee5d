"""The example logs are what their script writes from the recorded runs, and hold what their README says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import LabError
from moeproxy.lab.example_logs import write
from moeproxy.places import data_dir
from moeproxy.traces import LogTrace, Trace, read
from moeproxy.traces.pack import load_bench

SHIPPED = data_dir() / "logs"


def _log(name: str, **options) -> LogTrace:
    (log,) = read(SHIPPED / name, **options)
    return log


def _recorded(fault: str | None) -> Trace:
    found = load_bench(data_dir() / "bench", models=["original"], faults=[fault], trajectories=False)
    return next(t for t in found if t.provenance.seed == 0 and t.provenance.strength in (0, 1))


def test_shipped_files_are_those_of_the_script(tmp_path: Path) -> None:
    for path in write(data_dir() / "bench", tmp_path):
        assert path.read_bytes() == (SHIPPED / path.name).read_bytes(), path.name
    assert {path.name for path in tmp_path.iterdir()} | {"README.md"} == {path.name for path in SHIPPED.iterdir()}


def test_console_log_is_two_recorded_runs_with_a_resume() -> None:
    log = _log("verl_console.log")
    overflow, healthy = _recorded("gradient_overflow"), _recorded(None)
    assert log.info.framework == "verl"
    assert [(r.step, r.before) for r in log.info.resumes] == [(11, 35)]
    shown = log.trace.values("grad_norm")
    assert np.array_equal(shown[10:], healthy.values("grad_norm")[10:])
    assert np.array_equal(shown[:10], overflow.values("grad_norm")[:10])
    first = log.original.loc[log.places["attempt"] == 0, "actor/grad_norm"].to_numpy(float)
    assert np.array_equal(first, overflow.values("grad_norm")[:35])
    assert np.isposinf(first[14:]).all()


def test_trainer_state_hides_nan_as_the_trainer_does() -> None:
    log = _log("trainer_state.json")
    assert log.info.framework == "trl"
    assert log.counts("total_loss") == {"filtered": 46, "measured": 14}
    assert np.array_equal(log.trace.values("kl"), _recorded("nan_poison").values("kl"), equal_nan=True)


def test_own_columns_need_a_mapping_and_the_crash_has_no_metric() -> None:
    assert not _log("own_columns.csv").has_metrics
    mapped = _log("own_columns.csv", mapping={"kl_to_ref": "kl"}, step="update")
    assert np.array_equal(mapped.trace.values("kl"), _recorded("kl_explosion").values("kl"))
    crash = _log("crashed_before_step_1.log")
    assert not crash.has_metrics
    assert "progress that ends at 0/58" in crash.contents
    assert "IndexError: list index out of range" in crash.contents


def test_a_run_that_is_not_recorded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeproxy.lab.example_logs.load_bench", lambda *_, **__: ())
    with pytest.raises(LabError, match="no run of the original with gradient_overflow and seed 0"):
        write(tmp_path, tmp_path)
