"""One signal as it is drawn: gaps, marks, what was replaced; and what befell the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.view.log_events import early_end, failures, resumes
from moeproxy.view.log_series import KINDS, Series, series_of
from tests.view.made_logs import jsonl, log_of, trace, verl

BY_NAME = {kind.name: kind for kind in KINDS}


def _drawn(series: Series, low: float, high: float) -> list[tuple[float, float]]:
    x, y = series.drawn(low, high)
    return [(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def test_a_line_breaks_at_what_is_no_number_and_runs_over_what_was_not_logged() -> None:
    series = series_of(trace(kl=[0.5, None, 0.25, math.nan, 0.125, math.inf, 1.0]), "kl")
    x, y = series.drawn(0, 6)
    assert np.array_equal(x, [0, 2, np.nan, 4, np.nan, 6], equal_nan=True)
    assert np.array_equal(y, [0.5, 0.25, np.nan, 0.125, np.nan, 1.0], equal_nan=True)
    assert series.counts() == {"NaN": 1, "+Inf": 1, "not logged at this step": 1}
    assert series.marks(BY_NAME["NaN"], 0, 6).first_M.tolist() == [3]
    assert series.marks(BY_NAME["+Inf"], 0, 4).first_M.tolist() == []


def test_a_part_is_drawn_exactly_with_one_point_beyond_either_end() -> None:
    n = 50_000
    series = Series(np.arange(n), np.arange(n) / 7, np.zeros(n, np.uint8))
    x, y = series.drawn(1000.5, 1500)
    assert x.tolist() == list(range(1000, 1502))
    assert y.tolist() == [step / 7 for step in range(1000, 1502)]
    assert _drawn(series, 10, 9) == [(9.0, 9 / 7), (10.0, 10 / 7)], "an empty part is a line across it"


def test_a_whole_long_run_is_bounded_and_breaks_at_its_single_nan() -> None:
    n = 300_000
    values, states = np.random.default_rng(0).normal(size=n), np.zeros(n, np.uint8)
    values[77_777], states[123_456], values[123_456] = 1e6, 3, np.nan
    x, y = Series(np.arange(n), values, states).drawn(0, n)
    assert len(x) <= 2003
    assert (77_777.0, 1e6) in set(zip(x.tolist(), y.tolist(), strict=True))
    (gap,) = np.flatnonzero(np.isnan(y))
    assert x[gap - 1] < 123_456 < x[gap + 1]


def test_states_of_a_log_become_marks(tmp_path: Path) -> None:
    losses = [0.5, 0.0, -math.inf, None, "nan"]
    norms = [1.0, math.nan, *[1.0] * 4]
    history = [{"step": n, "grad_norm": norm, "learning_rate": 0.1, "epoch": n} for n, norm in enumerate(norms, 1)]
    for row, loss in zip(history, losses, strict=False):
        row["loss"] = loss
    log = log_of(tmp_path, json.dumps({"log_history": history}), "trainer_state.json")
    series = series_of(log, "total_loss")
    places = {name: steps.tolist() for name, steps in series.places.items()}
    assert places == {
        "NaN": [5],
        "-Inf": [3],
        "not finite, logged as something else": [2],
        "null or text": [4],
        "not logged at this step": [6],
    }
    assert series.finite_S.tolist() == [0.5], "the loss of 0 beside a NaN norm was none"
    assert series.key == "loss"
    assert "mean over the steps since the last log" in series.definition


def test_values_replaced_after_a_resume_are_kept(tmp_path: Path) -> None:
    first = jsonl(*({"step": n, "actor/lr(1e-4)": float(n), "actor/grad_norm": math.inf} for n in range(1, 7)))
    second = jsonl(*({"step": n, "actor/lr(1e-4)": n + 0.5, "actor/grad_norm": 2.0} for n in range(4, 6)))
    log = log_of(tmp_path, first + second)
    rate = series_of(log, "learning_rate")
    assert rate.values_S.tolist() == pytest.approx([1e-4, 2e-4, 3e-4, 4.5e-4, 5.5e-4])
    steps, values, words = rate.replaced(0, 10)
    assert steps.tolist() == [4, 5, 6], "step 6 was lost by the resume, not from the figure"
    assert values.tolist() == pytest.approx([4e-4, 5e-4, 6e-4]), "in the unit of the signal"
    assert set(words) == {"replaced after a resume"}
    assert rate.replaced(5, 5)[0].tolist() == [5]
    norm = series_of(log, "grad_norm")
    assert norm.replaced_places["+Inf"].tolist() == [4, 5, 6]
    assert norm.places["+Inf"].tolist() == [1, 2, 3]
    assert (rate.n_replaced, norm.n_replaced) == (3, 3)
    (event,) = resumes(log)
    assert (event.step, "resumed at step 4 after step 6" in event.text) == (4, True)


def test_a_step_written_twice_keeps_both_and_equal_values_are_no_news(tmp_path: Path) -> None:
    rows = [(1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0), (3, 3.0)]
    log = log_of(tmp_path, jsonl(*({"step": n, "actor/grad_norm": v, "actor/pg_loss": 0.5} for n, v in rows)))
    series = series_of(log, "grad_norm")
    steps, values, words = series.replaced(0, 10)
    assert series.values_S.tolist() == [1.0, 2.5, 3.0]
    assert (steps.tolist(), values.tolist(), list(words)) == ([2], [2.0], ["written again for the same step"])


def test_failures_stand_at_the_step_before_them(tmp_path: Path) -> None:
    crash = "Traceback (most recent call last):\n  File 'x'\nValueError: bad batch\n"
    log = log_of(tmp_path, verl(range(1, 4)) + crash + verl(range(4, 6)) + "Training:  10%|#| 5/50 [00:10<01:00]\n")
    first, last = failures(log)
    assert (first.step, first.text) == (3, "traceback on line 6: ValueError: bad batch")
    assert (last.step, last.text) == (5, "the log ends at 5 of 50 (line 9)")
    assert early_end(log_of(tmp_path, verl(range(1, 4)) + "50/50 [done]\n")) == ""
    assert failures(trace(kl=[1.0])) == resumes(trace(kl=[1.0])) == ()


def test_a_signal_that_is_not_there_is_refused() -> None:
    with pytest.raises(TraceError, match="no signal 'entropy'"):
        series_of(trace(kl=[1.0]), "entropy")
