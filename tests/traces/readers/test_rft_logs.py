"""traces.read takes folders of RFT-FaultBench: labels, states and lines come through."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np

from moeproxy.traces import read
from moeproxy.traces.readers.rft_faultbench import STEP_FILE, TRAJECTORY_FILE

STEPS = [
    {"metadata": {"global_step": 1}, "metrics": {"reward": 0.5, "kl": "nan", "x": "text"}},
    {"metadata": {"global_step": 2}, "metrics": {"reward": None, "kl": math.inf, "x": True}},
    {"metadata": {"global_step": 3}, "metrics": {"reward": math.nan}},
]


def _write(folder: Path, steps: list[dict]) -> None:
    folder.mkdir(parents=True)
    (folder / STEP_FILE).write_text("".join(json.dumps(row) + "\n" for row in steps))
    (folder / TRAJECTORY_FILE).write_text("")


def test_folder_with_registries(tmp_path: Path) -> None:
    _write(tmp_path / "rf_fault" / "run_a" / "logs", STEPS)
    _write(tmp_path / "rf_fault" / "run_b" / "logs", [STEPS[0], STEPS[0]])
    _write(tmp_path / "rf_fault" / "run_c" / "logs", [{"metadata": {"global_step": 1.5}, "metrics": {}}])
    registry = tmp_path / "metadata" / "registries" / "r.csv"
    registry.parent.mkdir(parents=True)
    with registry.open("w", newline="") as stream:
        rows = [["experiment_id", "control_or_fault", "fault_type"], ["run_a", "fault", "Reward Spike"]]
        csv.writer(stream).writerows(rows)
    logs = {log.info.name: log for log in read(tmp_path)}
    log = logs["run_a"]
    assert log.trace.provenance.fault == "reward_spike"
    assert log.info.facts["label"] == "fault"
    assert log.info.container == "RFT-FaultBench run"
    assert log.trace.steps.index.tolist() == [1, 2, 3]
    assert log.status["reward_mean"].tolist() == ["measured", "null", "nan"]
    assert log.status["kl"].tolist() == ["nan text", "pos inf", "missing"]
    assert log.original_status["metrics/x"].tolist() == ["text", "bool", "missing"]
    assert np.array_equal(log.trace.values("reward_mean"), [0.5, math.nan, math.nan], equal_nan=True)
    assert log.trace.missing("reward_mean").tolist() == [False, True, False]
    assert log.info.keys == {"reward_mean": "metrics/reward", "kl": "metrics/kl"}
    assert log.places["line"].tolist() == [1, 2, 3]
    assert any("repeat a step" in note for note in logs["run_b"].info.notes)
    assert "metadata/global_step is 1.5" in logs["run_c"].contents
    # A run alone finds the registry above it.
    (alone,) = read(tmp_path / "rf_fault" / "run_a")
    assert alone.trace.provenance.fault == "reward_spike"


def test_folder_without_registries(tmp_path: Path) -> None:
    _write(tmp_path / "run_a", STEPS)
    (log,) = read(tmp_path / "run_a")
    assert log.info.facts["label"] == "unknown"
    assert log.trace.signals == ("reward_mean", "kl")
    assert "label of the registry: unknown" in log.info.notes
