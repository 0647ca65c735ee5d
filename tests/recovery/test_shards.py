"""Shards in memory: which copies are kept, which step can be had of them, and who takes whose place."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from moeproxy.errors import RecoveryError
from moeproxy.recovery.copies import KEPT, Copies, Outliving
from moeproxy.recovery.links import Links, open_sockets
from moeproxy.recovery.shards import Memory, Shard, choose, place


def _rank(own: list[int], peer: list[int]) -> dict[str, list[int]]:
    return {"own": own, "peer": peer}


def _last(step: int) -> list[int]:
    return list(range(step - KEPT + 1, step + 1))


def test_the_newest_step_that_every_shard_can_be_had_of_is_chosen() -> None:
    whole, empty = [_rank([7, 8], [7, 8]) for _ in range(4)], _rank([], [])
    assert choose(whole) == (8, [])
    assert choose([*whole[:2], empty, whole[3]]) == (8, [2])
    behind = _rank([7, 8], [6, 7])  # the neighbour's copy of step 8 never arrived
    assert choose([*whole[:2], empty, behind]) == (7, [2])
    assert choose([whole[0], empty, empty, whole[3]]) == (None, [])  # rank 1's copy died with rank 2
    assert choose([empty, whole[1], empty, whole[3]]) == (8, [0, 2])
    assert choose([_rank([8, 9], [7, 8]), *whole[1:]]) == (8, [])  # one has finished a step more than the others
    assert choose([empty] * 4) == (None, [])


def test_any_lone_death_within_a_step_leaves_a_common_step() -> None:
    """Ranks are at most a step apart, and no copy is ever two steps late: three copies are enough."""
    for finished in itertools.product((4, 5), repeat=3):
        for pushed in itertools.product((0, 1), repeat=3):
            infos = []
            for rank, step in enumerate(finished):
                left = (rank - 1) % 3
                arrived = finished[left] - pushed[left]
                infos.append(
                    _rank(list(range(step - KEPT + 1, step + 1)), list(range(arrived - KEPT + 1, arrived + 1)))
                )
            for dead in range(3):
                step, needy = choose([_rank([], []) if rank == dead else info for rank, info in enumerate(infos)])
                assert step is not None
                assert step >= min(finished) - 1
                assert needy == [dead]


def test_the_last_ones_fill_the_gaps_whoever_dies() -> None:
    assert [place(rank, 4, {1}) for rank in (0, 2, 3)] == [0, 2, 1]
    assert [place(rank, 5, {1, 3}) for rank in (0, 2, 4)] == [0, 2, 1]  # an active rank and the first spare
    assert [place(rank, 3, {2}) for rank in (0, 1)] == [0, 1]
    for world in range(1, 7):
        for count in range(world):
            for dead in itertools.combinations(range(world), count):
                living = [rank for rank in range(world) if rank not in dead]
                places = {rank: place(rank, world, dead) for rank in living}
                assert sorted(places.values()) == list(range(world - count))
                assert all(places[rank] == rank for rank in living if rank < world - count)


def _written(copies: Copies, step: int, numel: int = 3) -> None:
    flat = copies.room(numel)
    flat.fill_(float(step))
    copies.keep(step, flat)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for rank in range(2):
        (tmp_path / f"shard-{rank}").touch()
    return [str(tmp_path / f"shard-{rank}") for rank in range(2)]


@pytest.mark.parametrize("outliving", [False, True])
def test_memory_keeps_the_newest_and_uses_room_again(outliving: bool, places: list[str]) -> None:
    memory = Memory(places if outliving else ())
    memory.become(1, 3)
    for step in range(5):
        _written(memory.own, step)
    memory.peer.keep(4, torch.zeros(2))
    assert memory.steps() == {"own": [2, 3, 4], "peer": [4]}
    assert [float(memory.own[step][0]) for step in (2, 3, 4)] == [2.0, 3.0, 4.0]
    assert float(memory.own.room(3)[0]) in (0.0, 1.0)  # what fell out
    assert memory.peer.room(7).numel() == 7
    memory.cut(3)
    assert memory.steps() == {"own": [2, 3], "peer": []}
    _written(memory.own, 3)  # a step that is copied again
    memory.become(1, 3)
    assert memory.steps()["own"] == [2, 3]
    memory.become(0, 3)  # of another rank's shard it has nothing
    assert memory.steps() == {"own": [], "peer": []}
    memory.become(1, 3)
    assert memory.steps()["own"] == ([2, 3] if outliving else [])


_WRITER = """
import os, sys
from moeproxy.recovery.copies import Outliving
copies = Outliving(sys.argv[1], 1000)
for step in range(1, 10_000):
    flat = copies.room(1000)
    flat.fill_(float(step))
    copies.keep(step, flat)
    if step == 5:
        print("writes", flush=True)
"""


def test_copies_outlive_a_process_that_dies_at_any_moment(places: list[str]) -> None:
    for delay in (0.0, 0.01, 0.02, 0.05):
        with subprocess.Popen([sys.executable, "-c", _WRITER, places[0]], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writes\n"
            time.sleep(delay)
            writer.kill()
        left = Outliving(places[0], 1000)
        assert len(left.steps) == KEPT
        assert left.steps == list(range(left.steps[0], left.steps[-1] + 1))
        assert all(left[step].eq(float(step)).all() for step in left.steps)
        _written(left, left.steps[-1] + 1, 1000)
        left.cut(0)
        assert left.steps == []


def test_a_step_that_was_marked_twice_is_there_once(places: list[str]) -> None:
    copies = Outliving(places[0], 3)
    for step in (1, 2):
        _written(copies, step)
    copies._head[2] = 3  # as of a process that died before it gave the older copy of step 2 up
    again = Outliving(places[0], 3)
    assert again.steps == [1, 2]
    for step in (3, 4, 5):
        _written(again, step)
    assert again.steps == [3, 4, 5]


def test_memory_of_another_shard_is_not_used(places: list[str]) -> None:
    _written(Outliving(places[0], 3), 7)
    assert Outliving(places[0], 4).steps == []
    with pytest.raises(ValueError, match="slots of 4 values, not 3"):
        Outliving(places[0], 4).room(3)


def test_a_shard_is_copied_and_restored_with_its_moments(tmp_path_factory: pytest.TempPathFactory) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

        def step() -> None:
            model(torch.ones(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        shard = Shard(model, optimizer)
        assert shard.numel == 3 * (12 + 3 + 6 + 2)
        first, then = torch.empty(shard.numel), torch.empty(shard.numel)
        shard.copy_to(first)
        step()
        shard.copy_to(then)
        assert not torch.equal(first, then)
        named = shard.named(first, 5)
        assert set(named["weights"]) == {f"{name}/shard-5" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
        assert len(named["optimizer"]) == 8
        shard.restore(first, 1)
        step()
        again = torch.empty(shard.numel)
        shard.copy_to(again)
        assert torch.equal(again, then)  # the moments and the count of steps came back, too
        with pytest.raises(RecoveryError, match="a shard of 3 values"):
            shard.restore(torch.zeros(3), 1)
    finally:
        dist.destroy_process_group()


def test_only_watched_connections_are_cut() -> None:
    links = Links()
    with socket.create_server(("127.0.0.1", 0)) as server:
        apart = socket.create_connection(server.getsockname())
        other_end, _ = server.accept()
        with links.watched():
            ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        gone = socket.socket()
        with links.watched():
            gone.bind(("127.0.0.1", 0))
            listening = socket.create_server(("127.0.0.1", 0))
        gone.close()
        assert {ours.fileno(), apart.fileno()} <= set(open_sockets())
        assert links.cut() == 1
        assert theirs.recv(1) == b""  # the other end hears of it
        apart.sendall(b"x")
        assert other_end.recv(1) == b"x"
        assert links.cut() == 0
        socket.create_connection(listening.getsockname()).close()  # it listens still
        for item in (apart, other_end, ours, theirs, listening):
            item.close()
