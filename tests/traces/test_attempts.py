"""The attempts of a resumed run: exactly what stood in the log before each resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moeproxy.traces import LogTrace, read
from moeproxy.traces.attempts import attempts


def _log(folder: Path, *rows: tuple[int, float]) -> LogTrace:
    lines = [json.dumps({"step": step, "actor/grad_norm": value, "actor/entropy": value / 2}) for step, value in rows]
    (folder / "x.jsonl").write_text("\n".join(lines) + "\n")
    (log,) = read(folder / "x.jsonl")
    return log


def test_every_attempt_is_what_its_resume_found(tmp_path: Path) -> None:
    first = [(step, 1.0 + step) for step in range(1, 9)] + [(9, float("inf")), (10, float("nan"))]
    second = [(step, 20.0 + step) for step in range(6, 13)]
    third = [(step, 40.0 + step) for step in range(3, 15)]
    log = _log(tmp_path, *first, *second, *third)
    one, two = attempts(log)
    assert one.trace.steps.index.tolist() == list(range(1, 11))
    np.testing.assert_array_equal(one.trace.values("grad_norm"), [value for _, value in first])
    assert not one.trace.missing("grad_norm").any(), "NaN was logged, which is not the same as nothing"
    assert (one.resume.step, one.resume.before) == (6, 10)
    # The second took over the first five steps, and the third has not yet begun.
    assert two.trace.values("grad_norm").tolist() == [2, 3, 4, 5, 6, *(value for _, value in second)]
    assert two.trace.values("entropy").tolist() == [v / 2 for v in two.trace.values("grad_norm")]
    assert log.trace.values("grad_norm").tolist() == [2.0, 3.0, *(value for _, value in third)]
    assert one.trace.provenance == log.trace.provenance


def test_a_run_that_was_never_resumed_has_no_other_attempt(tmp_path: Path) -> None:
    assert attempts(_log(tmp_path, (1, 1.0), (2, 2.0))) == ()
    (tmp_path / "empty.log").write_text("Traceback (most recent call last):\nKeyError: 'x'\n")
    (empty,) = read(tmp_path / "empty.log")
    assert attempts(empty) == ()


def test_what_was_not_logged_stays_missing(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in (1, 2, 3, 4, 5, 2, 3, 4, 5, 6):
        rows.append({"step": step, "actor/grad_norm": 1.0, "critic/score/mean": 0.5})
        if len(rows) in (2, 4) or len(rows) > 5:
            rows[-1]["actor/entropy"] = 0.1 * len(rows)
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (log,) = read(tmp_path / "x.jsonl")
    (first,) = attempts(log)
    assert first.trace.missing("entropy").tolist() == [True, False, True, False, True]
    np.testing.assert_allclose(first.trace.values("entropy")[[1, 3]], [0.2, 0.4])
