"""Rows out of order lose nothing and make no runs of their own; resumed and repeated runs are told from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeproxy.traces import LogTrace, read


def _logs(tmp_path: Path, steps: Sequence[int]) -> tuple[LogTrace, ...]:
    """Read a log of these steps whose loss is the number of the row."""
    rows = ({"step": step, "loss": float(row), "grad_norm": 1.0, "epoch": 0.5} for row, step in enumerate(steps))
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(file)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mixed_rows_are_put_in_order(tmp_path: Path, data: st.DataObject) -> None:
    grid, first = data.draw(st.sampled_from([1, 5, 10])), data.draw(st.integers(0, 30))
    order = data.draw(st.permutations([first + grid * n for n in range(30)]))
    (log,) = _logs(tmp_path, order)
    assert log.trace.steps.index.tolist() == sorted(order)
    assert log.trace.values("total_loss").tolist() == [order.index(step) for step in sorted(order)]
    assert not log.info.resumes


@pytest.mark.parametrize("order", [[1, 2, 4, 3, 5], [2, 1, 3, 4], [10, 20, 40, 30], [1, 2, 3, 5, 6, 4, 7, 9, 8]])
def test_a_row_behind_its_place(tmp_path: Path, order: list[int]) -> None:
    (log,) = _logs(tmp_path, order)
    assert log.trace.steps.index.tolist() == sorted(order)
    assert not log.info.resumes
    assert any("came after later steps" in note for note in log.info.notes)


@pytest.mark.parametrize("n_runs", [1, 3])
def test_newest_first(tmp_path: Path, n_runs: int) -> None:
    logs = _logs(tmp_path, list(range(40, 0, -1)) * n_runs)
    assert len(logs) == n_runs
    for number, log in enumerate(reversed(logs)):
        assert log.trace.steps.index.tolist() == list(range(1, 41))
        assert log.trace.values("total_loss").tolist() == [40 * number + 39 - n for n in range(40)]
        assert any("newest first" in note for note in log.info.notes)
        assert log.places["line"].tolist() == [40 * number + 40 - n for n in range(40)]


def test_newest_first_with_a_resume(tmp_path: Path) -> None:
    written = [*range(1, 21), *range(15, 31)]
    (log,) = _logs(tmp_path, written[::-1])
    (plain,) = _logs(tmp_path, written)
    assert (
        [(r.step, r.before) for r in log.info.resumes] == [(15, 20)] == [(r.step, r.before) for r in plain.info.resumes]
    )
    last = len(written) - 1
    assert log.trace.values("total_loss").tolist() == [last - row for row in plain.trace.values("total_loss")]


@pytest.mark.parametrize(
    ("steps", "shown", "resumes"),
    [
        ([1, 2, 3, 4, 5, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [(3, 5)]),
        ([1, 2, 4, 3, 4, 5], [1, 2, 3, 4, 5], [(3, 4)]),
        ([10, 20, 30, 15, 25, 35], [10, 15, 25, 35], [(15, 30)]),
        ([10, 20, 30, 40, 20, 30, 40, 30, 40, 50], [10, 20, 30, 40, 50], [(20, 40), (30, 40)]),
    ],
)
def test_resumed_runs_are_no_mixed_rows(
    tmp_path: Path, steps: list[int], shown: list[int], resumes: list[tuple[int, int]]
) -> None:
    (log,) = _logs(tmp_path, steps)
    assert log.trace.steps.index.tolist() == shown
    assert [(resume.step, resume.before) for resume in log.info.resumes] == resumes


@pytest.mark.parametrize("steps", [[1, 2, 3, 1, 2, 3], [2, 3, 4, 5, 1, 2, 3, 4], [7, 8, 9, 10, 1, 2, 3, 4]])
def test_repeated_runs_are_no_mixed_rows(tmp_path: Path, steps: list[int]) -> None:
    assert len(_logs(tmp_path, steps)) == 2


def test_many_rows_in_reverse_or_mixed_take_linear_time(tmp_path: Path) -> None:
    # With a search through all rows for each, these would take very long; the limit of each test ends that.
    for order in (range(50_000, 0, -1), [n ^ 3 for n in range(50_000)]):
        (log,) = _logs(tmp_path, order)
        assert len(log.trace.steps) == 50_000


def test_a_log_without_steps_is_numbered_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("entropy,pg_loss\n0.5,1\n0.25,2\n")
    (log,) = read(file)
    assert log.trace.values("entropy").tolist() == [0.5, 0.25]
    assert log.trace.steps.index.tolist() == [1, 2]
    assert any("numbered from 1" in note for note in log.info.notes)


def test_keys_without_a_signal_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"step": 1, "actor/grad_norm": 0.5, "my/odd": 1, "word": "x"}\n')
    (log,) = read(file, framework="verl")
    assert log.unmapped == ("my/odd",)
    assert "my/odd" in log.summary()


def test_the_name_of_swifts_log_is_a_hint(tmp_path: Path) -> None:
    row = '{"loss": 4.5, "learning_rate": 5e-6, "epoch": 0.0, "global_step": 10}\n'
    for name, framework in (("v0-logging.jsonl", "ms-swift"), ("x.jsonl", "transformers")):
        (tmp_path / name).write_text(row)
        (log,) = read(tmp_path / name)
        assert log.info.framework == framework
