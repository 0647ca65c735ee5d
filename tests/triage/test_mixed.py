"""Two runs in one file are said to be, whichever way they are mixed; resumed runs and double rows are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.traces.reading import read
from moeproxy.triage.detect import UNCLEAR, detect
from moeproxy.triage.diagnose import diagnose
from moeproxy.triage.logs import exit_code, judge_log
from moeproxy.triage.mixed import mixed
from moeproxy.view.incident import open_incidents

STEPS = 60
Row = dict[str, float]


def _rows(seed: int, broken: bool = False) -> list[Row]:
    rng = np.random.default_rng(seed)
    loss, norm, reward = rng.normal(0.1, 0.01, STEPS), rng.normal(1, 0.05, STEPS), rng.normal(0.5, 0.02, STEPS)
    if broken:
        norm[30:] *= 20
        reward[30:] -= 0.4
    table = {"policy_loss": loss, "grad_norm": norm, "reward_mean": reward, "seconds_per_step": rng.normal(9, 1, STEPS)}
    return [{"step": i + 1, **{name: float(values[i]) for name, values in table.items()}} for i in range(STEPS)]


def _log(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _in_turn(left: Sequence[Row], right: Sequence[Row], lag: int = 0, block: int = 1) -> list[Row]:
    """Rows of two runs as they come, the second `lag` rows behind, in blocks."""
    parts = [[list(rows[i : i + block]) for i in range(0, len(rows), block)] for rows in (left[lag:], right)]
    pairs = zip_longest(*parts, fillvalue=[])
    return [*left[:lag], *chain.from_iterable(chain(one, other) for one, other in pairs)]


@pytest.mark.parametrize("swap", [False, True])
def test_runs_in_step_are_not_judged_whichever_comes_last(tmp_path: Path, swap: bool) -> None:
    runs = [_rows(1, broken=True), _rows(2)]
    path = _log(tmp_path / "a.jsonl", _in_turn(*(runs[::-1] if swap else runs)))
    judged = judge_log(path)
    assert exit_code(judged) == 2
    said = judged[0].text()
    assert "60 of 60 steps have two values that differ" in said
    assert "split the file" in said
    assert [one.verdict for one in open_incidents(path)] == [UNCLEAR]
    assert diagnose(read(path)[0]).detection.verdict == detect(read(path)[0]).verdict == UNCLEAR


@pytest.mark.parametrize(("lag", "block"), [(5, 1), (2, 1), (20, 1), (9, 3), (10, 10)])
def test_runs_behind_each_other_are_no_resumes(tmp_path: Path, lag: int, block: int) -> None:
    path = _log(tmp_path / "a.jsonl", _in_turn(_rows(1), _rows(2), lag, block))
    judged = judge_log(path)
    assert exit_code(judged) == 2
    said = "\n".join(one.text() for one in judged)
    assert "split the file" in said
    assert "resumed at" not in said
    assert "machine fault" not in said
    assert "attempt" not in said


def test_nan_beside_a_number_is_another_value(tmp_path: Path) -> None:
    rows = _rows(1)
    dead = [row | ({"policy_loss": float("nan")} if row["step"] > 40 else {}) for row in rows]
    (run,) = read(_log(tmp_path / "a.jsonl", _in_turn(rows, dead)))
    assert mixed(run).startswith("20 of 60 steps")


def test_what_stands_twice_for_a_good_reason_is_judged(tmp_path: Path) -> None:
    rows = _rows(1)
    again = [row | {"seconds_per_step": row["seconds_per_step"] + 1} for row in rows]
    short = [{name: float(f"{value:.3g}") for name, value in row.items()} for row in rows]
    names = ("step", "policy_loss", "grad_norm")
    halves = [
        [{name: row[name] for name in row if (name in names) == first or name == "step"} for row in rows]
        for first in (True, False)
    ]
    cases = {"twice": (rows, rows), "clock": (rows, again), "rounded": (rows, short), "halves": halves}
    for name, (left, right) in cases.items():
        (run,) = read(_log(tmp_path / f"{name}.jsonl", _in_turn(left, right)))
        assert mixed(run) == "", name
    few = [*rows[:30], rows[29] | {"policy_loss": 9.0}, *rows[30:]]
    assert mixed(read(_log(tmp_path / "few.jsonl", few))[0]) == ""


def test_a_run_that_was_resumed_often_is_one_run(tmp_path: Path) -> None:
    """Whether it does steps again as before, or, with lost state, with other numbers."""
    same, other = _rows(1), _rows(2)
    ends, starts = (12, 23, 34, 47, 60), (0, 10, 20, 30, 40)
    for name, redo in (("same", same), ("lost", other)):
        runs = [same, redo, same, redo, same]
        parts = [run[start:end] for run, start, end in zip(runs, starts, ends, strict=True)]
        (run,) = read(_log(tmp_path / f"{name}.jsonl", list(chain.from_iterable(parts))))
        assert len(run.info.resumes) == 4
        assert mixed(run) == "", name
    loop = [
        *same[:35],
        *same[10:35],
        *same[10:35],
        *same[10:35],
        *same[10:35],
        *same[10:],
    ]  # one step kills it each time
    assert mixed(read(_log(tmp_path / "loop.jsonl", loop))[0]) == ""


def test_a_healthy_log_of_two_runs_cannot_serve(tmp_path: Path) -> None:
    path = _log(tmp_path / "a.jsonl", _in_turn(_rows(1), _rows(2)))
    good = _log(tmp_path / "b.jsonl", _rows(3))
    with pytest.raises(TraceError, match="healthy run a cannot serve: 60 of 60 steps"):
        judge_log(good, [path])
