"""RFT-FaultBench's layout, on files made here: labels from the registry, nothing lost, errors with file and line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeproxy.errors import TraceError
from moeproxy.traces.readers import RftRun, read_benchmark, read_run, rft_faultbench
from moeproxy.traces.readers.rft_faultbench import STEP_FILE, TRAJECTORY_FILE
from moeproxy.traces.readers.rft_registry import read_registries
from moeproxy.traces.signals import SIGNALS

Rows = list[dict[str, Any]]


def _steps(n: int = 3) -> Rows:
    return [
        {"metadata": {"global_step": step}, "metrics": {"reward": 0.1 * step, "kl": 0.01, "vllm_kl": 2.0}}
        for step in range(1, n + 1)
    ]


def _responses(n: int = 3, injected: bool = False, prompt: Any = 4) -> Rows:
    fault = {"fault_injection_type": "reward_spike", "fault_injection_strength": 0.7} if injected else {}
    metrics = {"reward": 1.0, "response_length": 9, "repetition_ratio": 0.2, "advantage_mean": -0.5, "return": 0.9}
    flags = {"empty_response": False, "long_response": True}
    return [
        {
            "metadata": {"rollout_step": step, "prompt_id": prompt, "fault_injection": fault},
            "metrics": metrics,
            "flags": flags,
        }
        for step in range(1, n + 1)
        for _ in range(2)
    ]


def _write(folder: Path, steps: Rows | None = None, responses: Rows | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, rows in ((STEP_FILE, steps), (TRAJECTORY_FILE, responses)):
        if rows is not None:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def _registry(file: Path, rows: list[dict[str, str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def _row(name: str, word: str, fault: str = "", **more: str) -> dict[str, str]:
    return {"experiment_id": name, "control_or_fault": word, "fault_type": fault, **more}


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    """Two runs in a folder of faults, of which one was not injected, and a baseline that no registry names."""
    root = tmp_path / "bench"
    _write(root / "rf_hard_fault" / "run_a" / "logs", _steps(), _responses(injected=True))
    _write(root / "rf_hard_fault" / "run_b" / "logs", _steps(), _responses())
    _write(root / "baseline" / "run_c" / "logs", _steps(), _responses())
    rows = [_row("run_a", "fault", "Reward Spike", seed="3"), _row("run_b", "control", "reward_spike", seed="4")]
    _registry(root / "metadata" / "registries" / "hard.csv", rows)
    return root


def test_labels_come_from_the_registry_and_not_from_the_folder(benchmark: Path) -> None:
    runs = {run.name: run for run in read_benchmark(benchmark)}
    assert {name: run.label for name, run in runs.items()} == {
        "run_a": "fault",
        "run_b": "healthy",
        "run_c": "unknown",
    }
    info = runs["run_a"].trace.provenance
    assert (info.fault, info.strength, info.onset, info.seed, info.source) == ("reward_spike", 1.0, 1, 3, "file")
    assert any("strength" in note for note in runs["run_a"].notes)
    assert runs["run_b"].trace.provenance.healthy
    assert [runs[name].injected for name in sorted(runs)] == [True, False, False]
    assert runs["run_a"].registry_row["fault_type"] == "Reward Spike"
    assert repr(runs["run_b"]) == "RftRun(run_b: healthy; 3 steps, 6 trajectories)"


def test_runs_outside_the_registries_are_healthy_only_when_the_caller_says_so(benchmark: Path) -> None:
    runs = {run.name: run for run in read_benchmark(benchmark, unregistered="healthy")}
    assert runs["run_c"].label == "healthy"
    assert runs["run_a"].label == "fault"


def test_a_contradiction_is_noted_and_the_registry_stands(benchmark: Path) -> None:
    row = _row("run_a", "control")
    run = read_run(benchmark / "rf_hard_fault" / "run_a", row)
    assert run.label == "healthy"
    assert "the registry says healthy, but trajectories carry an injection" in run.notes
    run = read_run(benchmark / "rf_hard_fault" / "run_b", _row("run_b", "fault", "too-short", fault_strength="0.4"))
    assert (run.trace.provenance.fault, run.trace.provenance.strength) == ("response_too_short", 0.4)
    assert "the registry says fault, but no trajectory carries an injection" in run.notes


def test_canonical_signals_and_everything_else(benchmark: Path) -> None:
    run = read_run(benchmark / "baseline" / "run_c")
    assert run.trace.signals == ("reward_mean", "kl")
    assert run.trace.steps.index.tolist() == [1, 2, 3]
    assert run.trace.values("reward_mean").tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert run.extra_steps.columns.tolist() == ["metadata/global_step", "metrics/vllm_kl"]
    assert run.extra_steps["metrics/vllm_kl"].tolist() == [2.0, 2.0, 2.0]
    assert run.trajectories is not None
    assert run.trajectories.values["metrics/return"].tolist() == [0.9] * 6
    assert run.trajectories.kinds["flags/long_response"].tolist() == ["bool"] * 6
    responses = run.trace.trajectories
    assert responses is not None
    assert responses.iloc[0].tolist() == [1, 4, 1.0, 9, 0.2, -0.5]


@pytest.mark.parametrize("prompt", ["gsm8k_12", None, 1.5])
def test_trajectories_without_a_prompt_number_are_kept_but_not_canonical(prompt: Any, tmp_path: Path) -> None:
    run = read_run(_write(tmp_path / "run", _steps(), _responses(prompt=prompt)))
    assert run.trace.trajectories is None
    assert any("prompt not found" in note for note in run.notes)
    assert run.trajectories is not None
    assert len(run.trajectories.values) == 6


def test_odd_values_stay_apart(tmp_path: Path) -> None:
    odd = [0.5, None, math.nan, math.inf, "nan"]
    steps = [{"step": i, "metrics": {"reward": value}} for i, value in enumerate(odd, start=1)]
    run = read_run(_write(tmp_path / "run", [*steps, {"step": 6, "metrics": {"kl": 1.0}}]))
    assert run.trace.missing("reward_mean").tolist() == [False, True, False, False, False, True]
    assert np.isnan(run.trace.values("reward_mean")).tolist() == [False, True, True, False, True, True]
    kinds = run.steps.kinds["metrics/reward"].tolist()
    assert kinds == ["number", "null", "NaN", "infinite", "number in quotes", "absent"]
    assert (run.trajectories, run.trace.trajectories, run.injected) == (None, None, None)
    assert f"no {TRAJECTORY_FILE}" in run.notes


def test_text_in_a_signal_leaves_it_among_the_extra_columns_with_a_note(tmp_path: Path) -> None:
    steps = [{"step": 1, "metrics": {"reward": "skipped", "kl": 0.1}}]
    run = read_run(_write(tmp_path / "run", steps))
    assert run.trace.signals == ("kl",)
    assert any("holds no numbers" in note for note in run.notes)


def test_two_names_of_one_signal(tmp_path: Path) -> None:
    steps = [{"step": 1, "metrics": {"policy_loss": 1.0, "act_loss": 2.0}}]
    run = read_run(_write(tmp_path / "run", steps))
    assert run.trace.values("policy_loss").tolist() == [1.0]
    assert any("act_loss" in note for note in run.notes)
    assert run.steps.values["metrics/act_loss"].tolist() == [2.0]


def test_rows_that_say_no_step_are_numbered_with_a_note(tmp_path: Path) -> None:
    run = read_run(_write(tmp_path / "run", [{"metrics": {"kl": 0.1}}, {"metrics": {"kl": 0.2}}]))
    assert run.trace.steps.index.tolist() == [1, 2]
    assert any("numbered from 1" in note for note in run.notes)


def test_steps_are_sorted_and_a_repeated_one_needs_a_word(tmp_path: Path) -> None:
    rows = [{"step": step, "metrics": {"kl": value}} for step, value in ((2, 0.2), (1, 0.1), (2, 0.3))]
    folder = _write(tmp_path / "run", rows)
    with pytest.raises(TraceError, match="line 3: step 2 again, after line 1"):
        read_run(folder)
    assert read_run(folder, repeated="first").trace.values("kl").tolist() == [0.1, 0.2]
    last = read_run(folder, repeated="last")
    assert last.trace.values("kl").tolist() == [0.1, 0.3]
    assert any("1 lines repeat a step" in note for note in last.notes)


@pytest.mark.parametrize("step", [None, "3", 1.5, True, math.nan, math.inf, 10**30])
def test_a_step_that_is_no_whole_number_is_refused(step: Any, tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [{"step": 1, "metrics": {}}, {"step": step, "metrics": {"kl": 1}}])
    with pytest.raises(TraceError, match=f"{STEP_FILE}, line 2.*step is"):
        read_run(folder)


def test_what_is_wrong_with_the_files_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="folders of runs"):
        read_benchmark(tmp_path)
    with pytest.raises(TraceError, match=f"no {STEP_FILE}"):
        read_run(tmp_path)
    with pytest.raises(TraceError, match="no steps"):
        read_run(_write(tmp_path / "empty", []))
    with pytest.raises(TraceError, match="line 2: no step, unlike other lines"):
        read_run(_write(tmp_path / "mixed", [{"step": 1, "metrics": {}}, {"metrics": {"kl": 1}}]))
    with pytest.raises(TraceError, match=f"{TRAJECTORY_FILE}, line 1: no metrics"):
        read_run(_write(tmp_path / "no_metrics", _steps(), [{"metadata": {"rollout_step": 1}}]))
    _write(tmp_path / "two" / "a", _steps())
    _write(tmp_path / "two" / "b", _steps())
    with pytest.raises(TraceError, match="2 files"):
        read_run(tmp_path / "two")


def test_registries_are_read_as_text_and_checked(tmp_path: Path) -> None:
    rows = [_row("a", "fault", "nan", seed="007"), _row("b", "", "")]
    found = read_registries(_registry(tmp_path / "one.csv", rows))
    assert found["a"]["fault_type"] == "nan"
    assert found["a"]["seed"] == "007"
    _registry(tmp_path / "two.csv", [_row("b", "fault", "", seed="")])
    assert list(read_registries(tmp_path / "one.csv")) == ["a", "b"]
    with pytest.raises(TraceError, match=r"two\.csv, line 2: a second, different row of 'b'"):
        read_registries(tmp_path)
    with pytest.raises(TraceError, match="no registries"):
        read_registries(tmp_path / "absent")
    with pytest.raises(TraceError, match="none names the run"):
        read_registries(_registry(tmp_path / "x" / "three.csv", [{"colour": "blue"}]))
    (tmp_path / "x" / "three.csv").write_text("experiment_id,seed\na,1,2\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 2: more or fewer cells"):
        read_registries(tmp_path / "x")
    with pytest.raises(TraceError, match="control_or_fault is 'perhaps'"):
        read_run(_write(tmp_path / "run", _steps()), _row("run", "perhaps"))
    with pytest.raises(TraceError, match="says fault but not which"):
        read_run(tmp_path / "run", _row("run", "fault"))


def test_aliases_name_canonical_signals() -> None:
    assert set(rft_faultbench.STEP_ALIASES.values()) <= set(SIGNALS)


_CELL = st.one_of(st.none(), st.floats(), st.integers(-(2**70), 2**70), st.sampled_from(["nan", "inf", "-", ""]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(["reward", "kl", "strange"]), _CELL), min_size=1, max_size=5))
def test_no_value_is_lost_or_invented(tmp_path: Path, written: Rows) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    rows = [{"step": step, "metrics": cells} for step, cells in enumerate(written, start=1)]
    (folder / STEP_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = read_run(folder)
    assert isinstance(run, RftRun)
    for name, signal in (("reward", "reward_mean"), ("kl", "kl")):
        numbers = [isinstance(c.get(name, 0), int | float) or c[name] in (None, "nan", "inf") for c in written]
        held = [name in c and c[name] is not None for c in written]
        assert (signal in run.trace.signals) == (all(numbers) and any(held))
        if signal in run.trace.signals:
            assert run.trace.missing(signal).tolist() == [not there for there in held]
            wanted = [float(c[name]) if there else math.nan for c, there in zip(written, held, strict=True)]
            assert np.array_equal(run.trace.values(signal), wanted, equal_nan=True)
