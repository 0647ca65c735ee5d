"""Effective training time of made-up time lines, second by second, and of a log in torchft's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy import recovery
from moeproxy.errors import RecoveryError
from moeproxy.recovery import events as ev
from moeproxy.recovery.effective import Ettr
from moeproxy.recovery.events import Event, EventLog, read_events
from moeproxy.recovery.torchft_log import JOINED, LEFT, torchft_events

Row = tuple[float, str, str] | tuple[float, str, str, int]


def _job(*rows: Row, trainers: int = 1, rollouts: int = 1) -> list[Event]:
    """Rows are (time, member, event, step); the job's own start and end are "job"."""
    found = []
    for t, member, name, *step in rows:
        role = member.partition("-")[0]
        info = {"trainers": trainers, "rollouts": rollouts} if name == ev.JOB_START else {}
        found.append(Event(t, role, member, name, step[0] if step else None, info))
    return found


def _steps(begin: float, seconds: float, *steps: int) -> list[tuple[float, str, str, int]]:
    rows: list[tuple[float, str, str, int]] = []
    for number, step in enumerate(steps):
        start = begin + number * seconds
        rows += [(start, "trainer", ev.STEP_BEGIN, step), (start + seconds, "trainer", ev.STEP_COMMIT, step)]
    return rows


START, AWAY = (0.0, "job", ev.JOB_START), (14.0, "trainer", ev.STEP_BEGIN, 3)
OUT = ((15.0, "trainer", ev.FAULT), (16.0, "trainer", ev.DETECT), (18.0, "trainer", ev.READY))


def test_without_faults_all_time_is_effective_and_setting_up_is_apart() -> None:
    found = recovery.ettr(_job(START, *_steps(10, 2, 1, 2, 3), (16.0, "job", ev.JOB_END)))
    assert (found.ratio, found.setup, found.wall, found.steps, found.outages) == (1.0, 10.0, 6.0, 3, ())
    assert set(found.lost.values()) == {0.0}


@pytest.mark.parametrize(("rollouts", "credit"), [(0, 0.0), (1, 2.0), (3, 3.0)])
def test_a_trainer_away_counts_by_the_rollouts_beside_it(rollouts: int, credit: float) -> None:
    rows = [START, *_steps(10, 2, 1, 2), AWAY, *OUT, *_steps(19, 2, 3), (21.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*rows, rollouts=rollouts))
    assert found.lost == {
        "detect": 1.0, "restart": 2.0, "reconnect": 1.0, "recompute": 1.0, "checkpoint": 0.0, "idle": 0.0
    }  # fmt: skip
    assert (found.wall, found.productive, found.credit) == (11.0, 6.0, credit)
    assert found.ratio == pytest.approx((6 + credit) / 11)
    assert found.ratio_strict == pytest.approx(6 / 11)
    assert found.by_member["trainer"] == pytest.approx(1 - 4 / 11)
    (outage,) = found.outages
    assert (outage.member, outage.step, outage.seconds, outage.whole_task) == ("trainer", 3, 4.0, False)


def test_a_rollout_that_is_away_at_the_same_time_earns_no_credit() -> None:
    away = ((15.5, "rollout-0", ev.DETECT), (17.5, "rollout-0", ev.READY), (17.5, "rollout-0", ev.CONNECTED))
    rows = [START, *_steps(10, 2, 1, 2), AWAY, *OUT, *away, *_steps(19, 2, 3), (21.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*sorted(rows, key=lambda row: row[0]), rollouts=3))
    assert found.credit == pytest.approx(0.75 * 2 + 0.5 * 2)
    assert found.by_member["rollout-0"] == pytest.approx(1 - 2 / 11)
    assert found.wall == pytest.approx(found.productive + sum(found.lost.values()))


@pytest.mark.parametrize(("waits", "lost"), [(True, 3.0), (False, 0.0)])
def test_a_trainer_that_waits_for_a_rollout_that_hangs_works_at_nothing(waits: bool, lost: float) -> None:
    """From the fault to the detection; then another rollout does the share. One that does not wait loses nothing."""
    phase = Event(14.5, "trainer", "trainer", ev.PHASE, 3, {"phase": "wait" if waits else "update"})
    on = Event(20.0, "trainer", "trainer", ev.PHASE, 3, {"phase": "update" if waits else "publish"})
    hung = [(15.0, "rollout-0", ev.FAULT), (18.0, "rollout-0", ev.DETECT), (25.0, "rollout-0", ev.CONNECTED)]
    rest = [(21.0, "trainer", ev.STEP_COMMIT, 3), (21.0, "job", ev.JOB_END)]
    rows = [*_job(START, *_steps(10, 2, 1, 2), AWAY, *hung, rollouts=2), phase, on, *_job(*rest)]
    found = recovery.ettr(sorted(rows, key=lambda event: event.t))
    assert (found.lost["detect"], found.credit, found.steps) == (lost, 0.0, 3)
    assert found.productive == 11.0 - lost
    assert found.wall == pytest.approx(found.productive + sum(found.lost.values()))


def test_a_rollout_away_alone_costs_nothing_while_the_trainer_goes_on() -> None:
    away = ((11.0, "rollout-0", ev.DETECT), (13.0, "rollout-0", ev.READY), (13.5, "rollout-0", ev.CONNECTED))
    rows = [START, *_steps(10, 2, 1, 2), *away, (14.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*sorted(rows, key=lambda row: row[0])))
    assert found.ratio == 1.0
    assert found.by_member == {"trainer": 1.0, "rollout-0": pytest.approx(1 - 2.5 / 4)}


def _phase(t: float, member: str, phase: str) -> Event:
    return Event(t, member.partition("-")[0], member, ev.PHASE, None, {"phase": phase})


@pytest.mark.parametrize(
    ("member", "back", "end"),
    [
        ("manager", [(13.0, ev.READY)], 13.0),  # it needs nothing from others
        ("rollout-0", [(13.0, ev.READY), (14.0, ev.CONNECTED)], 14.0),
        ("rollout-0", [(13.0, ev.READY), (13.1, "idle")], 13.0),  # there was nothing left to generate
        ("rollout-0", [(13.0, ev.READY), (13.1, "idle"), (13.2, "weights")], 20.0),  # they never came
        ("trainer", [(13.0, ev.READY), (14.0, ev.CONNECTED)], 14.0),  # after the last step there is none to begin
        ("trainer", [(13.0, ev.READY), (14.0, ev.CONNECTED), (15.0, ev.STEP_BEGIN)], 15.0),
        ("manager", [], 20.0),
        ("rollout-0", [], 20.0),
        ("trainer", [], 20.0),
    ],
)
def test_an_outage_ends_when_the_member_works_again(member: str, back: list[tuple[float, str]], end: float) -> None:
    role = member.partition("-")[0]
    made = [
        _phase(t, member, name) if name in ("idle", "weights") else Event(t, role, member, name) for t, name in back
    ]
    before = _job(START, *_steps(10, 1, 1), (11.0, member, ev.FAULT), (12.0, member, ev.DETECT))
    others = [Event(12.5, "rollout", "rollout-1", name) for name in (ev.READY, ev.CONNECTED)]
    found = recovery.ettr([*before, *others, *made, *_job((20.0, "job", ev.JOB_END))])
    (outage,) = found.outages
    assert (outage.fault, outage.detect, outage.end) == (11.0, 12.0, end)
    assert outage.ready == (13.0 if back else end)
    assert found.by_member[member] == pytest.approx(1 - (end - 11) / 10)


def test_outages_of_one_member_that_overlap_count_once() -> None:
    """The manager's replacement dies before it is ready, and a rollout is away when the whole task restarts."""
    twice = ((11.0, "manager", ev.DETECT), (12.0, "manager", ev.DETECT), (13.0, "manager", ev.READY))
    task = ((15.0, "rollout-0", ev.DETECT), (17.0, "trainer", ev.DETECT), (17.1, "job", ev.TASK_RESTART))
    back = ((18.5, "manager", ev.READY), (18.5, "trainer", ev.READY), (20.0, "rollout-0", ev.CONNECTED))
    rows = [START, *_steps(10, 1, 1), *twice, *task, *back, *_steps(19, 1, 2), (21.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*sorted(rows, key=lambda row: row[0])))
    assert [(item.member, item.end) for item in found.outages] == [
        ("manager", 13.0), ("manager", 13.0), ("rollout-0", 20.0), ("job", 19.0)
    ]  # fmt: skip
    assert found.by_member == {
        "trainer": pytest.approx(1 - 2 / 11),
        "manager": pytest.approx(1 - (2 + 2) / 11),
        "rollout-0": pytest.approx(1 - 5 / 11),
    }


def test_what_a_restart_from_the_checkpoint_does_again_is_lost_and_earns_no_credit() -> None:
    away = ((15.0, "trainer", ev.FAULT), (16.0, "job", ev.TASK_RESTART), (18.0, "rollout-0", ev.READY))
    rows = [START, *_steps(10, 2, 1, 2), AWAY, *away, *_steps(19, 2, 2, 3), (23.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*rows))
    assert (found.wall, found.productive, found.credit, found.steps, found.repeated) == (13.0, 6.0, 0.0, 3, 1)
    assert found.lost["recompute"] == 3.0  # step 2 once, and one second of step 3
    assert found.outages[0].whole_task
    assert found.by_member["rollout-0"] < 1


def test_a_checkpoint_that_holds_the_trainer_up_is_lost() -> None:
    events = _job(START, *_steps(10, 4, 1, 2), (18.0, "job", ev.JOB_END))
    events.insert(2, Event(13.0, "trainer", "trainer", ev.CHECKPOINT, 1, {"seconds": 1.5}))
    found = recovery.ettr(events)
    assert (found.lost["checkpoint"], found.productive) == (1.5, 6.5)


@pytest.mark.parametrize("noticed", [13.2, 14.8, 15.5])
def test_a_step_that_the_other_ranks_finish_after_a_fault_is_kept(noticed: float) -> None:
    """Replicas: one dies in step 2 at 13 s, two finish it at 14 s, and step 3 begins at 14.5 s; noticed at any time."""
    rows: list[Row] = [START, (13.0, "trainer-1", ev.FAULT, 2), (noticed, "trainer-1", ev.DETECT)]
    for member in ("trainer-0", "trainer-1", "trainer-2"):
        rows += [(10.0, member, ev.STEP_BEGIN, 1), (12.0, member, ev.STEP_COMMIT, 1), (12.0, member, ev.STEP_BEGIN, 2)]
    for late, member in ((0.0, "trainer-0"), (0.125, "trainer-2")):
        rows += [(14.0 + late, member, ev.STEP_COMMIT, 2)]
        rows += [(14.5 + late, member, ev.STEP_BEGIN, 3), (16.0 + late, member, ev.STEP_COMMIT, 3)]
    rows += [(16.0, "trainer-0", ev.STEP_BEGIN, 4), (17.0, "trainer-0", ev.STEP_COMMIT, 4), (17.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*sorted(rows, key=lambda row: row[0]), trainers=2, rollouts=0))
    assert (found.steps, found.repeated, found.lost["recompute"]) == (4, 0, 0.0)
    assert (found.wall, found.productive, len(found.outages)) == (7.0, 6.5, 1)


@pytest.mark.parametrize("kind", ev.SURVIVED)
def test_a_fault_that_ends_no_process_begins_no_outage_and_ends_no_step(kind: str) -> None:
    rows = [START, *_steps(10, 2, 1, 2), AWAY, *OUT, *_steps(19, 2, 3), (21.0, "job", ev.JOB_END)]
    without = recovery.ettr(_job(*rows))
    events = _job(*rows)
    events.insert(4, Event(13.0, "trainer", "trainer", ev.FAULT, 2, {"kind": kind, "phase": "publish"}))
    assert recovery.ettr(events) == without
    assert without.lost["detect"] == 1.0
    calm = _job(START, *_steps(10, 2, 1, 2), (14.0, "job", ev.JOB_END))
    calm.insert(4, Event(13.0, "trainer", "trainer", ev.FAULT, 2, {"kind": kind, "phase": "publish"}))
    assert (recovery.ettr(calm).ratio, recovery.ettr(calm).outages) == (1.0, ())


def test_a_step_that_the_other_ranks_begin_anew_after_a_fault_was_cut_short_by_it() -> None:
    rows: list[Row] = [START, (13.0, "trainer-1", ev.FAULT, 1), (13.5, "trainer-1", ev.DETECT)]
    rows += [(t, m, ev.STEP_BEGIN, 1) for t in (10.0, 15.0) for m in ("trainer-0", "trainer-2")]
    rows += [(10.0, "trainer-1", ev.STEP_BEGIN, 1), (18.0, "trainer-0", ev.STEP_COMMIT, 1), (18.0, "job", ev.JOB_END)]
    found = recovery.ettr(_job(*sorted(rows, key=lambda row: row[0]), trainers=2, rollouts=0))
    assert (found.steps, found.productive, found.lost["recompute"]) == (1, 3.0, 3.0)


@pytest.mark.parametrize("known", [True, False])
def test_a_fault_that_nobody_logged_begins_with_the_last_sign_of_life(known: bool) -> None:
    """A process that is stopped from outside; who notices it says for how long it was silent."""
    detect = Event(16.0, "trainer", "trainer", ev.DETECT, 3, {"kind": "hung", **({} if known else {"silent": 1.0})})
    fault = [(15.0, "trainer", ev.FAULT, 3)] if known else []
    rest = [(18.0, "trainer", ev.READY), *_steps(19, 2, 3), (21.0, "job", ev.JOB_END)]
    found = recovery.ettr([*_job(START, *_steps(10, 2, 1, 2), AWAY, *fault), detect, *_job(*rest)])
    assert (found.lost["detect"], found.lost["recompute"]) == (1.0, 1.0)
    assert (found.outages[0].fault, found.outages[0].detect) == (15.0, 16.0)


@pytest.mark.parametrize("next_step", [3, 4])
def test_a_step_whose_state_was_taken_over_was_finished(next_step: int) -> None:
    """The trainer died between giving its state away and saying so; unless the one that takes over begins it again."""
    connected = (18.5, "trainer", ev.CONNECTED, next_step - 1)
    rest = _steps(19, 2, *range(next_step, 5))
    rows = [START, *_steps(10, 2, 1, 2), AWAY, *OUT, connected, *rest, (rest[-1][0], "job", ev.JOB_END)]
    found = recovery.ettr(_job(*rows))
    assert (found.steps, found.repeated) == (4, 0)
    assert found.lost["recompute"] == (1.0 if next_step == 3 else 0.0)
    assert found.productive == (8.0 if next_step == 3 else 7.0)


def test_a_standby_that_dies_is_no_outage_of_the_job() -> None:
    rows = [START, *_steps(10, 2, 1), (11.0, "standby-0", ev.DETECT), (12.0, "job", ev.JOB_END)]
    assert recovery.ettr(_job(*sorted(rows, key=lambda row: row[0]))).outages == ()


def test_events_come_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    trainer, job = EventLog(tmp_path, "trainer", "trainer"), EventLog(tmp_path, "job", "job")
    job.add(ev.JOB_START, t=1.0, trainers=1, rollouts=2)
    trainer.add(ev.STEP_BEGIN, 1, t=3.0)
    trainer.add(ev.STEP_COMMIT, 1, t=4.0)
    job.add(ev.JOB_END, t=5.0, outcome="done")
    trainer.path.write_bytes(trainer.path.read_bytes() + b'{"t": 9')
    found = read_events(tmp_path)
    assert [event.event for event in found] == [ev.JOB_START, ev.STEP_BEGIN, ev.STEP_COMMIT, ev.JOB_END]
    assert found[0].info == {"trainers": 1, "rollouts": 2}
    result = recovery.ettr(tmp_path)
    assert result.wall == 2.0
    EventLog(tmp_path, "trainer", "trainer").add(ev.READY, t=4.5)  # a replacement writes on after the torn line
    assert [event.event for event in read_events(tmp_path)].count(ev.READY) == 1
    assert Ettr.load(result.save(tmp_path / "ettr.json")) == result


@pytest.mark.parametrize(
    "line",
    [
        "{]}",
        '{"t": 1}',
        '{"t": 1, "role": "cook", "member": "x", "event": "start"}',
        "[1]",
        "null",
        '{"t": NaN, "role": "job", "member": "x", "event": "start"}',
    ],
)
def test_a_line_that_is_no_event_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.events.jsonl").write_text(line + "\n")
    with pytest.raises(RecoveryError, match="line 1 is no event"):
        read_events(tmp_path)


def test_nothing_to_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="no events"):
        recovery.ettr(tmp_path)
    with pytest.raises(RecoveryError, match="no step was finished"):
        recovery.ettr(_job(START, AWAY))
    with pytest.raises(RecoveryError, match="no saved effective"):
        Ettr.load(tmp_path / "none.json")


def test_events_in_which_no_time_passes_are_refused_and_a_step_without_any_is_none() -> None:
    still = [START, (5.0, "trainer", ev.STEP_BEGIN, 1), (5.0, "trainer", ev.STEP_COMMIT, 1)]
    with pytest.raises(RecoveryError, match=r"no time passes.*Expected: times of a clock"):
        recovery.ettr(_job(*still))
    for more in ((5.0, "trainer", ev.FAULT), (5.0, "trainer", ev.DETECT), (5.0, "rollout-0", ev.DETECT)):
        with pytest.raises(RecoveryError, match="no time passes"):
            recovery.ettr(_job(*still, more))
    found = recovery.ettr(_job(*still, *_steps(5, 2, 2), (7.0, "job", ev.JOB_END)))
    assert (found.ratio, found.steps, found.wall) == (1.0, 2, 2.0)


def test_events_given_in_another_order_say_the_same() -> None:
    rows = _job(START, *_steps(10, 2, 1, 2), AWAY, *OUT, *_steps(19, 2, 3), (21.0, "job", ev.JOB_END))
    by_member = sorted(rows, key=lambda event: event.role)
    assert by_member != rows
    assert recovery.ettr(by_member) == recovery.ettr(rows)


def _record(t: float, step: int, quorum: int, commit: bool | None, replica: str) -> str:
    attributes = {"job_id": "unknown", "replica_id": f"{replica}:uuid", "rank": 0, "quorum_id": quorum, "step": step}
    attributes |= {} if commit is None else {"commit_result": commit}
    return json.dumps({"body": "", "attributes": attributes, "timestamp": f"2026-11-30T10:00:{t:09.6f}Z"}, indent=4)


def test_a_torchft_log_shows_what_a_change_of_replicas_cost(tmp_path: Path) -> None:
    """Steps of one second, a replica lost in step 4, which takes 3 s more; the log has other output between."""
    ends = [1.0, 2.0, 3.0, 7.0, 8.0]
    for name in ("r0", "r1"):
        lines = ["[manager] starting {not json", _record(0.0, 0, 1, None, name)]
        for step, t in enumerate(ends):
            if name == "r1" and step >= 3:
                break
            if step == 3:
                lines += [_record(4.0, 3, 1, False, name), _record(5.5, 3, 2, None, name)]
            lines.append(_record(t, step, 2 if step >= 3 else 1, True, name))
        (tmp_path / f"{name}.log").write_text("\n".join(lines))
    found = recovery.ettr(torchft_events(tmp_path / "r0.log", tmp_path / "r1.log"))
    assert (found.wall, found.productive, found.steps, found.credit) == (8.0, 5.0, 5, 0.0)
    assert found.lost["detect"] == pytest.approx(2.5)
    assert found.lost["restart"] == pytest.approx(0.5)
    assert found.ratio == pytest.approx(5 / 8)
    assert [item.kind for item in found.outages] == [LEFT]
    (tmp_path / "empty.log").write_text("nothing")
    with pytest.raises(RecoveryError, match="fewer than two"):
        torchft_events(tmp_path / "empty.log")
    with pytest.raises(RecoveryError, match="no log"):
        torchft_events(tmp_path / "none.log")


def test_a_replica_lost_in_a_step_that_is_no_slower_than_others_is_out_until_the_new_quorum(tmp_path: Path) -> None:
    """Steps of three seconds, of which the third loses a replica and takes one."""
    told = [(3.0, 0, 1, True), (6.0, 1, 1, True), (6.4, 2, 2, None), (7.0, 2, 2, True), (10.0, 3, 2, True)]
    (tmp_path / "r0.log").write_text("\n".join(_record(*row, "r0") for row in told))
    (tmp_path / "r1.log").write_text("\n".join(_record(*row, "r1") for row in told[:2]))
    (outage,) = recovery.ettr(torchft_events(tmp_path / "r0.log", tmp_path / "r1.log")).outages
    assert (outage.kind, outage.seconds) == (LEFT, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("members", "kinds"),
    [
        ((["r0"], ["r0", "r1"], ["r0", "r1", "r2"]), []),  # spares arrive
        ((["r0", "r1"], ["r0"], ["r0", "r2"]), [LEFT, JOINED]),
        ((["r0", "r1"], ["r0", "r2"], ["r0", "r2", "r3"]), [LEFT, JOINED]),
        ((["r0"], ["r0"], ["r0"]), [JOINED, JOINED]),  # the logs of the others are missing
    ],
)
def test_a_member_that_joins_is_an_outage_only_after_one_has_left(
    members: tuple[list[str], ...], kinds: list[str], tmp_path: Path
) -> None:
    """Two steps of one second in each quorum."""
    quorums = [(step, 1 + step // 2) for step in range(6)]
    lines = [_record(step + 1.0, step, quorum, True, name) for step, quorum in quorums for name in members[quorum - 1]]
    (tmp_path / "all.log").write_text("\n".join(lines))
    assert [item.kind for item in recovery.ettr(torchft_events(tmp_path / "all.log")).outages] == kinds


@pytest.mark.parametrize("commit", [False, None])
def test_a_torchft_job_ends_with_its_last_record_of_any_kind(commit: bool | None, tmp_path: Path) -> None:
    lines = [_record(t, int(t), 1, True, "r0") for t in (1.0, 2.0, 3.0)] + [_record(33.0, 4, 1, commit, "r0")]
    (tmp_path / "r0.log").write_text("\n".join(lines))
    found = recovery.ettr(torchft_events(tmp_path / "r0.log"))
    assert (found.steps, found.productive, found.lost["idle"]) == (3, 2.0, 30.0)
    assert found.wall == 32.0


@pytest.mark.parametrize("value", ["null", '"x"', "true", "1.5", "NaN"])
@pytest.mark.parametrize("name", ["step", "quorum_id"])
def test_a_torchft_record_without_a_whole_number_is_named_by_file_and_line(
    name: str, value: str, tmp_path: Path
) -> None:
    bad = _record(3.0, 7, 7, True, "r0").replace(f'"{name}": 7', f'"{name}": {value}')
    (tmp_path / "r0.log").write_text("\n".join(["other output", "more of it", bad]))
    with pytest.raises(RecoveryError, match=rf"{name} is .*r0\.log, line 3|r0\.log, line 3.*{name} is "):
        torchft_events(tmp_path / "r0.log")
