"""Public tools get what the lab logs under their own names; what they say becomes scores. They are stand-ins here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from moeproxy.errors import ComparisonError
from moeproxy.traces import RunInfo, Trace
from moeproxy.triage import public_tools as module
from moeproxy.triage.detection_scores import detection_scores
from moeproxy.triage.evaluate import SCORES, write_page
from moeproxy.triage.public_tools import Seen, Tool, judgements, probe_rows, scored, trl_rows


def trace(
    seed: int = 0, fault: str | None = None, onset: int | None = None, rate: float = 1e-4, **columns: Any
) -> Trace:
    given = columns or {"reward_mean": [0.5, 0.6, 0.7], "grad_norm": [1.0, math.nan, math.inf]}
    steps = pd.DataFrame(given, index=pd.RangeIndex(1, len(next(iter(given.values()))) + 1, name="step"))
    strength = 1.0 if fault else 0.0
    info = RunInfo(
        "original", "original", 0, seed, fault, strength, onset, config={"learning_rate": rate, "samples": 2}
    )
    return Trace(steps, None, info)


def with_responses(run: Trace) -> Trace:
    rows = {"step": [1, 1, 2, 2, 3, 3], "prompt": 0, "reward": [0.0, 1.0, 0, 0, 1, 1], "length": [2.0, 4, 2, 2, 3, 3]}
    table = pd.DataFrame({**rows, "repetition_ratio": 0.25, "advantage": [-1.0, 1, 0, 0, 0, 2]})
    return Trace(run.steps, table, run.provenance)


def stand_in(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    made = {name.replace("__", "."): value for name, value in modules.items()}
    monkeypatch.setattr(module, "import_module", made.__getitem__)


def test_rows_carry_the_names_of_trl() -> None:
    run = trace(reward_mean=[0.5], clip_fraction_low=[0.1], clip_fraction_high=[0.2], kl=[math.nan])
    (row,) = trl_rows(run)
    assert math.isnan(row.pop("kl"))
    assert row == {
        **{"step": 1, "learning_rate": 1e-4, "reward": 0.5, "clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2},
        "clip_ratio/region_mean": pytest.approx(0.3),
    }


def test_rows_of_rlprobe_count_what_is_not_finite() -> None:
    first, second, third = probe_rows(with_responses(trace()))
    assert (first["grad_norm"], first["nan_count"], first["inf_count"]) == (1.0, 0, 0)
    assert "grad_norm" not in second
    assert (second["nan_count"], second["inf_count"]) == (1, 0)
    assert (third["nan_count"], third["inf_count"]) == (0, 1)
    assert (first["adv_mean"], first["adv_std"], third["adv_std"]) == (0.0, 1.0, 1.0)
    assert (first["adv_zero_frac"], second["adv_zero_frac"], third["adv_zero_frac"]) == (0.0, 1.0, 0.5)
    assert (first["completion_len_max"], first["completion_len_p95"]) == (4.0, pytest.approx(3.9))


def test_rl_doctor_alarms_from_a_warning_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def diagnose(run: Any) -> SimpleNamespace:
        given.append(run)
        return SimpleNamespace(worst=3 if math.isinf(run[-1]["grad_norm"]) else 2)

    doctor = SimpleNamespace(
        run_from_records=lambda rows, config: rows, diagnose=diagnose, Severity=SimpleNamespace(WARNING=3)
    )
    stand_in(monkeypatch, rl_doctor=doctor)
    assert module.rl_doctor(trace()).alarm
    seen = module.rl_doctor(trace(grad_norm=[1.0, 1.0]))
    assert not seen.alarm
    assert math.isnan(seen.onset)
    assert [row["step"] for row in given[1]] == [1, 2]


class Record(SimpleNamespace):
    """Stands in for rlprobe's StepRecord."""


class View:
    """Stands in for rlprobe's RunView."""

    def __init__(self, _manifest: Any, records: list[Record]) -> None:
        self.records = records
        self.step_ids = np.array([record.step for record in records])


def probe(**more: Any) -> dict[str, Any]:
    schemas = SimpleNamespace(RunManifest=Record, StepRecord=Record)
    return {"rlprobe__schemas": schemas, "rlprobe__doctor__runview": SimpleNamespace(RunView=View), **more}


def test_rlprobe_alarms_by_warnings_at_their_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("info", 1), ("warn", 3), ("critical", 2), ("warn", None)]
    findings = [SimpleNamespace(severity=severity, first_step=step) for severity, step in found]
    doctor = SimpleNamespace(diagnose_view=lambda view: findings[: len(view.records)])
    stand_in(monkeypatch, **probe(rlprobe__doctor=doctor))
    assert module.rlprobe(trace()) == Seen(True, 2.0)
    assert module.rlprobe(trace(grad_norm=[1.0, 1.0])) == Seen(True, 3.0)
    assert not module.rlprobe(trace(grad_norm=[1.0])).alarm


def test_rlprobe_diff_names_the_first_step_at_which_two_runs_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def series(ours: View, theirs: View) -> list[tuple[str, np.ndarray, np.ndarray]]:
        pair = [np.array([record.reward_mean for record in view.records]) for view in (ours, theirs)]
        return [("reward_mean", *pair), ("step_time_s", pair[0], pair[0] + 1)]

    def diverge(_name: str, a: np.ndarray, b: np.ndarray, steps: np.ndarray, **_: Any) -> SimpleNamespace:
        apart = np.flatnonzero(a != b)
        return SimpleNamespace(divergence_step=int(steps[apart[0]]) if len(apart) else None)

    stand_in(monkeypatch, **probe(rlprobe__doctor__diff=SimpleNamespace(_metric_series=series, _diverge=diverge)))
    run, other = trace(reward_mean=[0.5, 0.6, 0.7]), trace(reward_mean=[0.5, 0.6, 0.1])
    assert module.rlprobe_diff(run, other) == Seen(True, 3.0)
    assert not module.rlprobe_diff(run, run).alarm
    with pytest.raises(ComparisonError, match="two runs"):
        module.rlprobe_diff(run, None)


def test_rlwatch_alarms_at_its_first_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite:
        def __init__(self, _config: Any) -> None: ...

        def check_step(self, _step: int, *, reward_mean: float, grad_norm: float) -> list[str]:
            return ["grad"] if not math.isfinite(grad_norm) and reward_mean > 0 else []

    stand_in(
        monkeypatch,
        rlwatch__config=SimpleNamespace(RLWatchConfig=dict),
        rlwatch__detectors=SimpleNamespace(DetectorSuite=Suite),
    )
    assert module.rlwatch(trace()) == Seen(True, 2.0)
    assert not module.rlwatch(trace(reward_mean=[0.5], grad_norm=[1.0])).alarm


def test_a_paired_tool_gets_another_healthy_run_of_the_same_settings() -> None:
    runs = [trace(100), trace(101), trace(102, rate=1e-3), trace(0, "kl_sign", 2)]
    pairs: list[tuple[int, int | None]] = []

    def judge(run: Trace, healthy: Trace | None) -> Seen:
        pairs.append((run.provenance.seed, healthy.provenance.seed if healthy else None))
        return Seen(not run.provenance.healthy, 3.0)

    table = judgements(Tool("x", "numpy", True, judge), runs)
    assert pairs == [(100, 101), (101, 100), (102, 100), (0, 100)]
    assert table["usual"].tolist() == [True, True, False, True]
    pairs.clear()
    assert judgements(Tool("x", "numpy", False, judge), runs)["usual"].all()
    assert [other for _, other in pairs] == [None] * 4


def test_scores_are_those_of_the_judgements() -> None:
    runs = [trace(100), trace(101), trace(0, "kl_sign", 2), trace(1, "kl_sign", 2)]
    tool = Tool("x", "numpy", False, lambda run, _: Seen(run.provenance.seed in (0, 101), 3.0))
    (row,) = scored([tool], runs)
    assert row["method"] == f"x {np.__version__}"
    assert (row["level"], row["runs"], row["healthy_runs"], row["recall"]) == ("clear", 2, 2, 0.5)
    assert row["f1"] == pytest.approx(2 / 4)
    assert row["false_alarms_per_1000_steps"] == pytest.approx(1000 / 6)
    assert (row["onset_within_2"], row["onset_median_error"]) == (1.0, 1.0)


def test_a_tool_that_names_no_onset_has_no_onset_error() -> None:
    table = judgements(Tool("x", "numpy", False, lambda *_: Seen(True)), [trace(0, "kl_sign", 2), trace(100)])
    assert np.isnan(detection_scores(table, "clear")["onset_within_2"])


def test_the_page_shows_the_tools(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="no scores"):
        write_page(tmp_path)
    parts: dict[str, Any] = {part: [] for part in ("detection", "diagnosis", "unknown", "reproduction")}
    (tmp_path / SCORES).write_text(json.dumps({"runs": 4, **parts}))
    write_page(tmp_path)
    assert "Public tools" not in (tmp_path / "TRIAGE.md").read_text()
    tool = Tool("x", "numpy", False, lambda run, _: Seen(not run.provenance.healthy))
    rows = scored([tool], [trace(100), trace(0, "kl_sign", 2)])
    rows[0] |= {"onset_within_2": None, "onset_median_error": None}
    (tmp_path / module.FILE).write_text(json.dumps({"runs": 2, "detection": rows}))
    write_page(tmp_path)
    text = (tmp_path / "TRIAGE.md").read_text()
    assert f"| alone | x {np.__version__} | clear | 1 | 1 | 1.00 | 1.000 | 0.667 | 0.00 | – | – |" in text
