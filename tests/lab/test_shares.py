"""What several processes record of one step is put together as one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.shares import gathered, joined, mean_row
from moeproxy.traces.trace import Trace


def test_signals_are_means_but_for_largest_values() -> None:
    rows = [{"kl": 1.0, "logprob_diff_max": 3.0, "seconds_per_step": 2.0}, {"kl": 2.0, "logprob_diff_max": 1.0}]
    rows[1]["seconds_per_step"] = 5.0
    assert mean_row(rows) == {"kl": 1.5, "logprob_diff_max": 3.0, "seconds_per_step": 5.0}


def test_what_is_not_finite_stays_so() -> None:
    one = mean_row([{"kl": math.nan, "logprob_diff_max": 1.0}, {"kl": 1.0, "logprob_diff_max": math.nan}])
    assert math.isnan(one["kl"])
    assert math.isnan(one["logprob_diff_max"])
    assert mean_row([{"kl": math.inf}, {"kl": 1.0}])["kl"] == math.inf


def test_prompts_are_numbered_through() -> None:
    parts = [{"prompt": [0.0, 0.0, 1.0], "reward": [1.0, 0.0, 1.0]}, {"prompt": [0.0, 1.0], "reward": [0.5, 0.25]}]
    assert joined(parts) == {"prompt": [0, 0, 1, 2, 3], "reward": [1.0, 0.0, 1.0, 0.5, 0.25]}


def test_one_process_keeps_its_own() -> None:
    row, columns = {"kl": 1.0}, {"prompt": [0.0]}
    assert gathered(row, columns, 1) == (row, columns)


@pytest.mark.slow
def test_two_processes_train_one_run(qwen3: Path, tmp_path: Path) -> None:
    settings = GRPOSettings(steps=2, prompts=4, samples=4, tasks=64)
    (tmp_path / "spec.json").write_text(json.dumps(RunSpec(qwen3, settings=settings).to_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "moeproxy.lab.train"]
    command += ["--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path / "trace.parquet")]
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    trace = Trace.load(tmp_path / "trace.parquet")
    assert trace.trajectories is not None
    rows = trace.trajectories.groupby("step")
    assert rows.size().tolist() == [16, 16]
    assert rows["prompt"].nunique().tolist() == [4, 4]
    assert rows["reward"].mean().tolist() == pytest.approx(trace.values("reward_mean").tolist())
