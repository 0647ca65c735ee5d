"""What a job in roles is made of, each alone: rules, manager, channel, checkpoints. No Ray, no torch."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeproxy.errors import RecoveryError
from moeproxy.recovery.channel import Address, Server, checksum, fetch
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.detection import Progress
from moeproxy.recovery.events import STEP_BEGIN, STEP_COMMIT, EventLog, trainer_step
from moeproxy.recovery.holding import Holding
from moeproxy.recovery.manager_role import ManagerRole, Order, bounds
from moeproxy.recovery.member import Member
from moeproxy.recovery.plan import Mishap, RolePlan, due, suffer
from moeproxy.recovery.policy import (
    DIED,
    HUNG,
    NO_RESTART,
    RAISED,
    RESTART_ROLE,
    RESTART_TASK,
    STOP,
    Policy,
)
from moeproxy.recovery.trainer_role import _full_disk, damage

PLAN = RolePlan()


def test_a_fault_restarts_its_role_only() -> None:
    policy = Policy(PLAN)
    for step, (kind, member) in enumerate([(DIED, "trainer"), (HUNG, "rollout-1"), (RAISED, "trainer")], 2):
        assert policy.decide(kind, member, step).action == RESTART_ROLE
    assert policy.decide(DIED, "trainer", 1).action == RESTART_ROLE  # a machine may die in the first step, too


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([(RAISED, "trainer", 1)], "raised in the first step"),
        ([(DIED, "rollout-0", 5), (DIED, "trainer", 5)], "second fault in step 5"),
        ([(DIED, "trainer", 3), (NO_RESTART, "trainer", 3), (NO_RESTART, "trainer", 3)], "second restart of trainer"),
    ],
)
def test_the_three_cases_restart_the_task_and_only_their_last_fault_does(faults: list, reason: str) -> None:
    policy = Policy(PLAN)
    *before, last = [policy.decide(*fault) for fault in faults]
    assert all(decision.action == RESTART_ROLE for decision in before)
    assert last.action == RESTART_TASK
    assert reason in last.reason


def test_a_restarted_role_and_a_restarted_task_start_with_a_clean_sheet() -> None:
    policy = Policy(RolePlan(max_task_restarts=1))
    policy.decide(NO_RESTART, "rollout-0", 3)
    policy.restarted("rollout-0")
    assert policy.decide(NO_RESTART, "rollout-0", 3).action == RESTART_ROLE
    policy.decide(DIED, "trainer", 3)
    assert policy.decide(DIED, "trainer", 3).action == RESTART_TASK
    policy.task_restarted(3)
    assert policy.decide(DIED, "trainer", 3).action == RESTART_ROLE
    ended = policy.decide(DIED, "trainer", 3)
    assert ended.action == STOP
    assert "restarted 1 times already" in ended.reason


@pytest.mark.parametrize("strategy", ["task", "none"])
def test_other_strategies_restart_the_task_for_everything(strategy: str) -> None:
    assert Policy(RolePlan(strategy=strategy)).decide(DIED, "rollout-0", 7).action == RESTART_TASK


def _manager(steps: int = 3, lag: int = 1, committed: int = 0) -> ManagerRole:
    schedule = [[f"{step}{c}" for c in "abcd"] for step in range(1, steps + 1)]
    return ManagerRole(schedule, RolePlan(shares=2, lag=lag).to_dict(), committed)


def test_shares_go_out_once_and_come_back_in_order() -> None:
    async def job() -> None:
        manager = _manager()
        orders: list[Order] = [await manager.next(name) for name in ("x", "y", "u", "v")]  # type: ignore[misc]
        assert [(o.step, o.share, o.version, o.prompts) for o in orders] == [
            (1, 0, 0, ("1a", "1b")),
            (1, 1, 0, ("1c", "1d")),
            (2, 0, 0, ("2a", "2b")),
            (2, 1, 0, ("2c", "2d")),
        ]
        assert await manager.progress() == Progress("serve", 0, 0)
        waiting = asyncio.create_task(manager.next("w"))  # step 3 needs the weights after step 1
        await manager.deliver("y", 1, 1, b"second")
        await manager.deliver("x", 1, 0, b"first")
        await manager.deliver("z", 1, 0, b"again")  # made twice: the first stays
        assert await manager.progress() == Progress("serve", 0, 1)  # step 1 is all there
        assert await manager.take(1) == [b"first", b"second"]
        await manager.available("y", ("127.0.0.1", 9), 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        await manager.commit(1)
        assert await manager.progress() == Progress("serve", 0, 1)
        order = await waiting
        assert (order.step, order.version, order.sources) == (3, 1, (("127.0.0.1", 9),))

    asyncio.run(job())


def test_what_a_lost_rollout_was_at_goes_out_again() -> None:
    async def job() -> None:
        manager = _manager(steps=1)
        assert (await manager.next("x")).share == 0
        assert (await manager.next("y")).share == 1
        await manager.lost("x")
        assert (await manager.next("y")).share == 0
        assert (await manager.look())["at"] == {"y": (1, 0)}

    asyncio.run(job())


def test_a_rollout_that_died_while_it_waited_is_given_nothing() -> None:
    """Seen in a real job: the dead one's question was still open, got the next share, and nobody ever made it."""

    async def job() -> None:
        manager = _manager(steps=2, lag=0)
        for share, payload in enumerate((b"a", b"b")):
            assert (await manager.next("x")).share == share  # type: ignore[union-attr]
            await manager.deliver("x", 1, share, payload)
        dead, other = (asyncio.create_task(manager.next(name)) for name in ("x", "y"))
        await asyncio.sleep(0)
        await manager.lost("x")
        assert await dead is None
        await manager.available("y", ("127.0.0.1", 9), 1)
        await manager.commit(1)
        assert (await other).share == 0
        assert (await manager.look())["at"] == {"y": (2, 0)}
        assert (await manager.next("x")).share == 1  # its replacement
        assert (await manager.next("x")).share == 1  # and the next one, of which nobody said that the last was lost
        assert (await manager.look())["at"] == {"y": (2, 0), "x": (2, 1)}

    asyncio.run(job())


def test_a_trainer_that_goes_back_gets_the_step_again_and_the_end_is_told() -> None:
    async def job() -> None:
        manager = _manager(steps=2, committed=1)
        taking = asyncio.create_task(manager.take(1))
        await asyncio.sleep(0)
        for name, share in (("x", 0), ("y", 1)):
            order = await manager.next(name)
            assert (order.step, order.share) == (1, share)
            await manager.deliver(name, 1, share, name.encode())
        assert await taking == [b"x", b"y"]
        await manager.commit(1)
        await manager.commit(2)
        assert await manager.next("x") is None
        assert (await manager.look())["held"] == {}

    asyncio.run(job())


@pytest.mark.parametrize(("n", "shares"), [(8, 3), (4, 4), (5, 1)])
def test_shares_cover_everything_once(n: int, shares: int) -> None:
    found = [i for share in range(shares) for i in range(*bounds(n, shares, share))]
    assert found == list(range(n))


@contextmanager
def _proxy(target: Address, cut_after: int | None) -> Iterator[Address]:
    """A network that fails between two members: the connection breaks off after some bytes, or goes dumb (None)."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            with peer, socket.create_connection(target) as behind:
                behind.sendall(peer.recv(4096))
                if cut_after is None:
                    peer.recv(1)  # says nothing until the other side gives up
                    return
                sent = 0
                while sent < cut_after and (data := behind.recv(min(1000, cut_after - sent))):
                    peer.sendall(data)
                    sent += len(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()
    thread.join(5)


WEIGHTS = bytes(range(256)) * 400


def test_weights_come_from_the_next_source_when_the_network_drops() -> None:
    server = Server(lambda version: WEIGHTS if version == 3 else None)
    try:
        assert fetch(3, [server.address]) == WEIGHTS
        with _proxy(server.address, 5000) as cut, _proxy(server.address, None) as dumb:
            assert fetch(3, [cut, dumb, server.address], timeout=0.3) == WEIGHTS
        with _proxy(server.address, 5000) as cut, pytest.raises(RecoveryError, match=r"broke off after \d+ of 102400"):
            fetch(3, [cut])
        with pytest.raises(RecoveryError, match=r"no member gave the weights after 4 updates.*does not have it"):
            fetch(4, [server.address])
    finally:
        server.close()
    with pytest.raises(RecoveryError, match="refused"):
        fetch(3, [server.address], timeout=0.5)
    with pytest.raises(RecoveryError, match="nobody has them"):
        fetch(3, [])


def test_damaged_bytes_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(lambda _: WEIGHTS)
    monkeypatch.setattr("moeproxy.recovery.channel.checksum", lambda payload: checksum(payload + b"x"))
    answers: Iterator[str] = iter([checksum(WEIGHTS + b"x"), "other"])
    monkeypatch.setattr("moeproxy.recovery.channel.checksum", lambda _: next(answers))
    try:
        with pytest.raises(RecoveryError, match="damaged"):
            fetch(1, [server.address])
    finally:
        server.close()


def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    assert kept.newest() is None
    for step in (10, 20, 30):
        kept.save(step, b"state" * 1000 + bytes([step]))
    assert [path.name for path in sorted(tmp_path.glob("*.pt"))] == ["state-000020.pt", "state-000030.pt"]
    assert kept.newest(at_most=25).step == 20  # type: ignore[union-attr]
    for harm, words in _harms():
        kept.save(30, b"state" * 1000 + bytes([30]))
        harm(tmp_path / "state-000030.pt")
        found = kept.newest()
        assert found is not None
        assert (found.step, found.payload[-1]) == (20, 20)
        assert words in found.skipped[0]


def _harms() -> list[tuple[Callable[[Path], object], str]]:
    return [
        (damage, "checksum is wrong"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "bytes of"),
        (lambda path: path.with_suffix(".json").unlink(), "No such file"),
        (lambda path: path.with_suffix(".json").write_text("{"), "state-000030"),
    ]


def test_a_full_disk_is_an_error_that_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(10, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _full_disk(True), pytest.raises(RecoveryError, match=r"after step 20 could not be written.*File too large"):
        kept.save(20, bytes(2**20))
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    assert kept.newest().payload == b"old"  # type: ignore[union-attr]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state-000010.json", "state-000010.pt"]
    with pytest.raises(RecoveryError, match="at least 2"):
        Checkpoints(tmp_path, keep=1)


def test_the_last_checkpoint_is_there_afterwards_or_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> bytes:
        raise RecoveryError("no rollout holds a state")

    kept = Checkpoints(tmp_path)
    kept.save(10, b"older")
    assert "no rollout holds a state" in kept.ensure(20, nowhere)
    assert kept.ensure(20, lambda: b"state") == ""  # it was missing
    assert kept.ensure(20, nowhere) == ""  # it is whole: nobody is asked
    for harm, _ in _harms():
        harm(tmp_path / "state-000020.pt")
        assert "no rollout holds a state" in kept.ensure(20, nowhere)
        assert kept.ensure(20, lambda: b"state") == ""
        assert kept.newest().payload == b"state"  # type: ignore[union-attr]
    with _full_disk(True):
        assert "could not be written (File too large" in kept.ensure(30, lambda: bytes(2**20))
    save = kept.save
    monkeypatch.setattr(kept, "save", lambda step, payload: damage(save(step, payload)))
    assert "damaged again" in kept.ensure(30, lambda: b"state")


def test_a_mishap_happens_once_in_a_job_but_slowness_stays(tmp_path: Path) -> None:
    kill, slow = Mishap("trainer", 3, "update"), Mishap("rollout-1", 2, "generate", "slow", 0.1)
    plan = RolePlan(mishaps=(kill, slow))
    assert due(plan.mishaps, tmp_path, "trainer", "update", 2) is None
    assert due(plan.mishaps, tmp_path, "trainer", "wait", 3) is None
    assert due(plan.mishaps, tmp_path, "trainer", "update", 3) == kill
    assert due(plan.mishaps, tmp_path, "trainer", "update", 3) is None
    assert [due(plan.mishaps, tmp_path, "rollout-1", "generate", step) for step in (1, 2, 5)] == [None, slow, slow]
    assert RolePlan.from_dict(plan.to_dict()) == plan
    late = RolePlan(mishaps=(Mishap("rollout-0", 4, "generate"),)).mishaps
    (tmp_path / "other").mkdir()
    found = [due(late, tmp_path / "other", "rollout-0", "generate", step) for step in (3, 6, 7)]
    assert found == [None, late[0], None]  # it had no share of step 4


def test_a_mishap_is_logged_before_it_happens_and_slowness_is_none(tmp_path: Path) -> None:
    said: list[tuple[object, ...]] = []

    def say(event: str, step: int, **info: str) -> None:
        said.append((event, step, info))

    slow, fail = Mishap("trainer", 2, "wait", "slow", 0.001), Mishap("trainer", 2, "update", "raise")
    full = Mishap("trainer", 3, "publish", "disk_full")
    plan = (slow, fail, full)
    assert suffer(plan, tmp_path, "trainer", "wait", 1, say) is None
    assert suffer(plan, tmp_path, "trainer", "wait", 2, say) == slow
    assert said == []
    with pytest.raises(RuntimeError, match="made to fail in step 2, phase update"):
        suffer(plan, tmp_path, "trainer", "update", 2, say)
    assert suffer(plan, tmp_path, "trainer", "publish", 3, say) == full  # the caller's to make
    assert said == [
        ("fault", 2, {"kind": "raise", "phase": "update"}),
        ("fault", 3, {"kind": "disk_full", "phase": "publish"}),
    ]


def test_impossible_plans_are_refused() -> None:
    for wrong in ({"rollouts": 0}, {"lag": -1}, {"heartbeat": 0.0}, {"strategy": "hope"}):
        with pytest.raises(RecoveryError, match=f"{next(iter(wrong))} is"):
            RolePlan(**wrong)
    with pytest.raises(RecoveryError, match="mishaps of rollout-7"):
        RolePlan(mishaps=(Mishap("rollout-7", 1, "generate"),))
    with pytest.raises(RecoveryError, match="in phase 'lunch'"):
        Mishap("trainer", 1, "lunch")
    with pytest.raises(RecoveryError, match="kind 'flood'"):
        Mishap("trainer", 1, "update", "flood")


def test_the_step_a_trainer_died_in_is_read_from_its_events(tmp_path: Path) -> None:
    assert trainer_step(tmp_path) == 1
    log = EventLog(tmp_path, "trainer", "trainer")
    for step in range(1, 200):
        log.add(STEP_BEGIN, step)
        assert trainer_step(tmp_path) == step
        log.add(STEP_COMMIT, step)
    assert trainer_step(tmp_path) == 200


class _Holder:
    """A rollout's handle, which keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[tuple[int, bytes]] = []
        self.hold = self
        self.remote: Callable[[int, bytes], object] = lambda step, payload: self.got.append((step, payload))


@pytest.mark.parametrize("resumed_first", [True, False])
def test_a_state_reaches_all_holders_whoever_comes_first(resumed_first: bool) -> None:
    """Seen in a real job: the job named a second rollout while the trainer took over its state; nobody got it."""
    one, two = _Holder(), _Holder()
    holding = Holding()
    steps = [lambda: holding.resume(4, b"state"), lambda: holding.name([one, two])]
    for step in steps if resumed_first else reversed(steps):
        step()
    holding.name([one], first=True)  # what the trainer was started with
    assert one.got == two.got == [(4, b"state")]
    three = _Holder()  # in the place of the first
    holding.name([three, two])
    assert (len(one.got), len(two.got), three.got) == (1, 1, [(4, b"state")])


def test_a_holder_that_is_frozen_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in a real job: the trainer waited for a frozen rollout, and was taken for hung itself."""
    ray = pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    frozen: list[_Holder] = []
    owner: dict[object, _Holder] = {}

    def wait(references: list[object], *, num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        assert num_returns == len(references) > 0
        assert timeout == (
            7.0 if one in (owner[reference] for reference in references) else 0
        )  # for a late one not again
        late = [reference for reference in references if owner[reference] in frozen]
        return [reference for reference in references if reference not in late], late

    def sends(holder: _Holder) -> None:
        def remote(step: int, payload: bytes) -> object:
            holder.got.append((step, payload))
            owner[reference := object()] = holder
            return reference

        holder.remote = remote

    monkeypatch.setattr(ray, "put", lambda payload: payload)
    monkeypatch.setattr(ray, "wait", wait)
    one, two = _Holder(), _Holder()
    sends(one)
    sends(two)
    holding = Holding(patience=7.0)
    holding.name([one, two])
    for step in range(1, 7):
        frozen[:] = [two] if step < 4 else []
        holding.give(step, b"state")
    holding.settle()
    assert [step for step, _ in one.got] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in two.got] == [1, 4, 5, 6]


def test_the_manager_named_last_is_used_though_the_first_comes_later(tmp_path: Path) -> None:
    member = Member(PLAN, tmp_path, "rollout", "rollout-0")
    member.connect("replacement")
    member.connect("dead", first=True)
    assert member._manager == "replacement"
    member.connect("another")
    assert member._manager == "another"
