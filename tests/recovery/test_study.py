"""Strategies side by side: which faults are made, and what is read from jobs whose time lines are known."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.recovery import events as ev
from moeproxy.recovery.digests import DigestLog
from moeproxy.recovery.events import EventLog
from moeproxy.recovery.outcome import RoleRun, write_job
from moeproxy.recovery.plan import RolePlan
from moeproxy.recovery.study import Study, compare_strategies, faults_for

SPEC = RunSpec(Path("model"), settings=GRPOSettings(steps=10))


def test_faults_are_as_many_as_asked_and_the_same_for_every_strategy() -> None:
    assert faults_for(50, 0.0, 1) == ()
    found = faults_for(50, 0.10, 1)
    assert len(found) == 5
    assert len({item.step for item in found}) == 5
    assert min(item.step for item in found) > 1
    assert {item.member for item in found} == {"trainer"}
    assert found == faults_for(50, 0.10, 1)
    assert found != faults_for(50, 0.10, 2)
    with pytest.raises(RecoveryError, match="10 faults in 10 steps"):
        faults_for(10, 1.0, 0)


def _made_up(folder: Path, plan: RolePlan, *, away: float = 0.0, back_to: int = 0, other: bool = False) -> None:
    """A job of ten steps of one second; the trainer dies half a second into step 5, and is back after `away`."""
    folder.mkdir(parents=True)
    write_job(SPEC, plan, folder)
    trainer, job, digests = (
        EventLog(folder, "trainer", "trainer"),
        EventLog(folder, "job", "job"),
        DigestLog(folder / "digests.jsonl"),
    )
    job.add(ev.JOB_START, t=0.0, trainers=1, rollouts=1)
    t = 5.0

    def steps(first: int, last: int) -> None:
        nonlocal t
        for step in range(first, last + 1):
            trainer.add(ev.STEP_BEGIN, step, t=t)
            t += 1.0
            trainer.add(ev.STEP_COMMIT, step, t=t)
            digests.add(step, {"weights/a": "other" if other and step == 10 else str(step)})

    if not away:
        steps(1, 10)
    else:
        steps(1, 4)
        trainer.add(ev.STEP_BEGIN, 5, t=t)
        t += 0.5
        trainer.add(ev.FAULT, 5, t=t, kind="kill")
        trainer.add(ev.DETECT, 5, t=t + 0.1, kind="died")
        if back_to:
            job.add(ev.TASK_RESTART, 5, t=t + 0.11, reason="every fault")
        t += away
        trainer.add(ev.READY, 5, t=t)
        steps(back_to or 5, 10)
    job.add(ev.JOB_END, t=t, outcome="finished")


def test_a_study_reads_its_jobs_and_says_what_each_strategy_costs(tmp_path: Path) -> None:
    mishaps = faults_for(10, 0.1, 0)
    calm = tmp_path / "none-f0-s0"
    _made_up(calm, RolePlan(strategy="none", standby=False, max_task_restarts=1000))
    for strategy, away, back_to in (("none", 8.0, 1), ("task", 8.0, 3), ("role", 1.0, 0)):
        plan = RolePlan(strategy=strategy, mishaps=mishaps, standby=strategy == "role", max_task_restarts=1000)
        _made_up(tmp_path / f"{strategy}-f0.1-s0", plan, away=away, back_to=back_to, other=strategy == "none")
    found = compare_strategies(SPEC, tmp_path, frequencies=(0.1,), seeds=(0,))
    none, task, role = found.rows
    assert (none.again, task.again, role.again) == (4, 2, 0)
    assert (none.equal, task.equal, role.equal) == (False, True, True)
    assert role.wall == pytest.approx(11.5)
    assert role.ettr == pytest.approx((10 + 0.5 * 1.0) / 11.5)
    assert task.ettr == task.strict == pytest.approx(10 / (10 + 0.5 + 8 + 2))
    assert (role.recovery, task.recovery) == (pytest.approx(1.0), pytest.approx(8.0))
    assert role.faults == 1
    assert found.in_order(0.1)
    assert not Study((none, task, replace(role, ettr=task.ettr))).in_order(0.1)
    assert not found.in_order(0.02)  # not made
    assert Study.load(found.save(tmp_path / "study.json")) == found
    assert f"{os.cpu_count()} cores" in json.loads((tmp_path / "study.json").read_text())["provenance"]["machine"]
    assert "| restart the failed role | 10% | 1.0 | 0 | 0.91 | 0.87 | 12 |" in found.table()
    with pytest.raises(RecoveryError, match="another job is here"):
        compare_strategies(replace(SPEC, settings=GRPOSettings(steps=11)), tmp_path, frequencies=(0.1,), seeds=(0,))
    with pytest.raises(RecoveryError, match="no study"):
        Study.load(calm / "job.json")


def test_a_study_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Made:
        def __init__(self, spec: RunSpec, folder: Path, plan: RolePlan) -> None:
            self.spec, self.folder, self.plan = spec, folder, plan

        def run(self, limit: float) -> RoleRun:
            made.append(self.folder.name)
            _made_up(self.folder, self.plan)
            write_job(self.spec, self.plan, self.folder)
            return RoleRun.load(self.folder)

    monkeypatch.setattr("moeproxy.recovery.job.Job", Made)
    stopped = tmp_path / "none-f0-s1"  # in the middle of a step
    write_job(replace(SPEC, seed=1), RolePlan(strategy="none", standby=False, max_task_restarts=1000), stopped)
    EventLog(stopped, "trainer", "trainer").add(ev.STEP_BEGIN, 1)
    again = [compare_strategies(SPEC, tmp_path, frequencies=(0.0,), seeds=(0, 1)) for _ in range(2)]
    names = [f"{strategy}-f0-s{seed}" for seed in (0, 1) for strategy in ("none", "task", "role")]
    assert made == names
    assert again[0] == again[1]
    assert [row.again for row in again[0].rows] == [0] * 6
