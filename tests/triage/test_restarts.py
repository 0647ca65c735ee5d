"""Restarts in logs are told from training faults: planted ones are found, real healthy and broken runs show none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moeproxy.places import data_dir
from moeproxy.traces.reading import read
from moeproxy.traces.trace import Trace
from moeproxy.triage.logs import judge_log
from moeproxy.triage.restarts import restart_notes, restarts, slowdown

SHIPPED = sorted((data_dir() / "runs").glob("original--*.parquet"))
Row = dict[str, float]


def _rows(seed: int = 0, steps: int = 40) -> list[Row]:
    """The signals of a shipped healthy run, with a clock that no machine disturbed."""
    trace = Trace.load(next(path for path in SHIPPED if f"healthy--s{seed}-" in path.name))
    names = ("policy_loss", "grad_norm", "reward_mean", "kl", "update_norm", "entropy")
    clock = 1 + 0.05 * np.random.default_rng(seed).random(steps)
    table = {name: trace.values(name)[:steps] for name in names} | {"seconds_per_step": clock}
    return [{"step": i + 1, **{name: float(values[i]) for name, values in table.items()}} for i in range(steps)]


def _log(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_restart_that_lost_nothing_is_a_machine_fault(tmp_path: Path) -> None:
    rows = _rows()
    rows[25]["seconds_per_step"] = 31.0  # step 26 stands through the restart
    path = _log(tmp_path / "a.jsonl", [*rows[:28], *rows[25:]])
    (found,) = restarts(read(path)[0])
    assert (found.step, found.before, found.again, found.clean) == (26, 28, 3, True)
    assert "a machine fault, not a loss spike" in str(found)
    (verdict,) = judge_log(path)
    assert any("goes back from step 28 to step 26" in note for note in verdict.notes)


def test_a_long_step_is_a_machine_fault_only_with_another_sign(tmp_path: Path) -> None:
    rows = _rows()
    rows[19]["seconds_per_step"] = 24.0
    (found,) = restarts(read(_log(tmp_path / "a.jsonl", rows))[0])
    assert (found.step, found.before, found.again, found.clean) == (20, 19, 0, True)
    assert "23 times as long as the others (24 s)" in str(found)
    assert "an evaluation, a checkpoint or a slow machine" in str(found)
    assert "machine fault" not in str(found)
    lines = [json.dumps(row) for row in rows]
    died = [*lines[:19], "Traceback (most recent call last):", "RuntimeError: NCCL timeout", *lines[19:]]
    (tmp_path / "b.jsonl").write_text("\n".join(died) + "\n")
    (found,) = restarts(read(tmp_path / "b.jsonl")[0])
    assert "and the log has a" in str(found)
    assert "a machine fault, not a loss spike" in str(found)


def test_long_steps_of_evaluations_are_told_in_one_sentence(tmp_path: Path) -> None:
    rows = _rows()
    for place in range(9, 40, 10):
        rows[place]["seconds_per_step"] = 24.0
    (told,) = restart_notes(read(_log(tmp_path / "a.jsonl", rows))[0])
    assert told.startswith("4 long steps (10, 20, 30, 40)")


@pytest.mark.parametrize(("agree", "lost"), [(0, True), (1, True), (2, False), (5, False)])
def test_state_is_lost_only_where_the_first_steps_done_again_differ(tmp_path: Path, agree: int, lost: bool) -> None:
    """Attempts that part later do so by a fault of one of them, or what was changed between them."""
    rows = _rows()
    again = [dict(row) for row in rows[20:]]
    for row in again[agree:]:
        row["policy_loss"] += 1e-3
    (found,) = restarts(read(_log(tmp_path / "a.jsonl", [*rows[:30], *again]))[0])
    assert (found.agree, found.apart, found.clean) == (agree, 21 + agree, not lost)
    assert ("the restart lost state" in str(found)) == lost
    assert f"from step {21 + agree} on" in str(found)
    if not lost:
        assert "the restart itself lost nothing" in str(found)


def test_a_restart_that_lost_state_is_said_to_have(tmp_path: Path) -> None:
    rows = _rows()
    again = [dict(row) for row in rows[25:]]
    for row in again:
        row["policy_loss"] += 1e-6
    again[0]["update_norm"] *= 40
    (found,) = restarts(read(_log(tmp_path / "a.jsonl", [*rows[:28], *again]))[0])
    assert not found.clean
    assert {"policy_loss", "update_norm"} <= set(found.differ)
    assert found.moved == ("update_norm",)
    assert "the restart lost state" in str(found)


def test_a_loss_spike_is_no_restart(tmp_path: Path) -> None:
    rows = _rows()
    for row in rows[20:23]:
        row["policy_loss"] += 5.0
        row["grad_norm"] *= 1e4
    assert restarts(read(_log(tmp_path / "a.jsonl", rows))[0]) == ()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem[:60])
def test_real_runs_that_were_never_restarted_show_no_restart_of_training(path: Path) -> None:
    """Their clocks are those of a shared machine; what its pauses look like is a clean restart at worst."""
    assert [found for found in restarts(Trace.load(path)) if not found.clean] == []


def test_a_slow_machine_is_told_from_one_long_step(tmp_path: Path) -> None:
    rows = _rows()
    assert slowdown(read(_log(tmp_path / "a.jsonl", rows))[0]) is None
    rows[30]["seconds_per_step"] = 50.0
    assert slowdown(read(_log(tmp_path / "b.jsonl", rows))[0]) is None
    rows[30]["seconds_per_step"] = 1.0
    for row in rows[20:]:
        row["seconds_per_step"] *= 2.5
    found = slowdown(read(_log(tmp_path / "c.jsonl", rows))[0])
    assert found is not None
    assert found.step == 21
    assert found.times == pytest.approx(2.5, rel=0.05)
    assert restarts(read(tmp_path / "c.jsonl")[0]) == ()
    for row in rows:
        del row["seconds_per_step"]
    bare = read(_log(tmp_path / "d.jsonl", rows))[0]
    assert slowdown(bare) is None
    assert restarts(bare) == ()
