"""mlflow's file store, written by its rules."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from moeproxy.traces import read


def _run(folder: Path, metrics: dict[str, str], meta: str = "run_name: 'sunny day'\nstatus: 3\n") -> Path:
    for key, text in metrics.items():
        file = folder / "metrics" / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    (folder / "meta.yaml").write_text(meta)
    return folder


def test_runs_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "meta.yaml").write_text("experiment_id: '1'\n")
    norms = "1700000000001 0.5 1\n1700000000002 nan 2\n1700000000003 inf 3\n1700000000004 -inf 4 name digest\n"
    rates = "1700000000001 1e-06 1\n1700000000002 2e-06 2\nno point\n"
    _run(tmp_path / "1" / ("a" * 32), {"actor/grad_norm": norms, "actor/lr": rates, "eval.log": "1 0.5\n"})
    _run(tmp_path / "1" / ("b" * 32), {"actor/grad_norm": "1 0.25 7\n"}, meta="status: 3\n")
    _run(tmp_path / "1" / ("c" * 32), {})
    (tmp_path / "other.jsonl").write_text('{"step": 1, "actor/lr": 0.5}\n')
    first, second, empty, other = read(tmp_path)
    assert [log.info.name for log in (first, second, empty)] == [
        "sunny day (aaaaaaaa)",
        "bbbbbbbb",
        "sunny day (cccccccc)",
    ]
    assert (first.info.framework, first.info.container) == ("verl", "mlflow file store")
    assert first.trace.steps.index.tolist() == [1, 2, 3, 4]
    assert np.array_equal(first.trace.values("grad_norm"), [0.5, math.nan, math.inf, -math.inf], equal_nan=True)
    assert first.status["grad_norm"].tolist() == ["measured", "nan", "pos inf", "neg inf"]
    assert first.trace.values("learning_rate").tolist()[:2] == [1e-6, 2e-6]
    assert first.original["eval.log"].dropna().tolist() == [0.5]  # a line without step is step 0
    assert [str(skipped) for skipped in first.info.skipped] == ["1 line (3): no point of a metric (actor/lr)"]
    assert second.trace.steps.index.tolist() == [7]
    assert not empty.has_metrics
    assert other.info.name == "other"
    (alone,) = read(tmp_path / "1" / ("a" * 32))
    assert alone.trace.equals(first.trace)


def test_a_resumed_run_keeps_both_values(tmp_path: Path) -> None:
    lines = [(1, 0.5, 1), (2, 0.25, 2), (3, 0.125, 3), (10, 9.0, 2), (11, 8.0, 3)]
    text = "".join(f"{time} {value} {step}\n" for time, value, step in lines)
    (log,) = read(_run(tmp_path / "r", {"actor/grad_norm": text}))
    assert log.trace.values("grad_norm").tolist() == [0.5, 9.0, 8.0]
    assert log.original["actor/grad_norm"].tolist() == [0.5, 0.25, 0.125, 9.0, 8.0]
    assert [(resume.step, resume.before) for resume in log.info.resumes] == [(2, 3)]
