"""The thread that pushes copies: what arrives is kept, what fails is told, and what was given up writes nothing."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moeproxy.errors import RecoveryError
from moeproxy.recovery import pushing
from moeproxy.recovery.hotswap import SwapPlan
from moeproxy.recovery.pushing import Pusher
from moeproxy.recovery.shards import Memory, Shard
from moeproxy.recovery.swap_member import SwapMember


class _Shard(Shard):
    """Three values that count the copies taken, each once it may."""

    def __init__(self) -> None:
        self.numel, self.copies = 3, 0
        self.may, self.error = threading.Event(), ""
        self.may.set()

    def copy_to(self, flat: torch.Tensor) -> None:
        assert self.may.wait(20)
        if self.error:
            raise RuntimeError(self.error)
        self.copies += 1
        flat.fill_(float(self.copies))


class _Move:
    """A transfer that waits until it is let go, and then fails or not."""

    def __init__(self, go: threading.Event, error: list[str]) -> None:
        self._go, self._error = go, error

    def wait(self) -> None:
        assert self._go.wait(20)
        if self._error:
            raise RuntimeError(self._error[0])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pusher, Memory, threading.Event, list[str]]:
    go, error, memory = threading.Event(), [], Memory()

    def receive(flat: torch.Tensor, source: int, group: object = None) -> _Move:
        flat.fill_(10.0 * source)
        return _Move(go, error)

    monkeypatch.setattr(pushing.dist, "isend", lambda *_, **__: _Move(go, error))
    monkeypatch.setattr(pushing.dist, "irecv", receive)
    me = SwapMember.__new__(SwapMember)
    me.plan, me.folder, me.name = SwapPlan(tmp_path, driver="sharded", digests=False), tmp_path, "trainer-0"
    return Pusher(me, memory, _Shard(), None, 0, [3, 3, 5]), memory, go, error


def test_a_copy_arrives_next_door_and_the_left_ones_here(made: tuple) -> None:
    pusher, memory, go, _ = made
    assert pusher.arrived() < 1  # nothing is under way
    go.set()
    pusher.put(1)
    pusher.arrived()
    pusher.put(2)
    pusher.close()
    assert memory.steps() == {"own": [1, 2], "peer": [1, 2]}
    assert (memory.own[1].tolist(), memory.own[2].tolist()) == ([1.0] * 3, [2.0] * 3)
    assert memory.peer[2].tolist() == [20.0] * 5  # rank 2 is on the left, and its shard is larger


def test_a_step_is_copied_before_it_is_done_and_what_was_given_up_is_copied_to_the_end(made: tuple) -> None:
    pusher, memory, go, _ = made
    go.set()
    pusher._shard.may.clear()
    pusher.put(1)
    for act in (pusher.copied, pusher.drop):
        waiting = threading.Thread(target=act, daemon=True)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    assert memory.steps()["own"] == []
    assert not pusher.copied(wait=False)
    pusher._shard.may.set()
    waiting.join(20)
    assert pusher.copied()
    assert memory.own.steps == [1]
    pusher._thread.join(20)
    pusher.put(2)  # nobody takes it any more
    assert memory.steps()["own"] == [1]


def test_training_hears_of_a_copy_that_failed(made: tuple) -> None:
    pusher, memory, _, _ = made
    pusher._shard.error = "no memory"
    pusher.put(1)
    with pytest.raises(RecoveryError, match=r"rank 0 could not copy its shard \(no memory\)"):
        pusher.copied()
    assert memory.steps() == {"own": [], "peer": []}


def test_training_hears_of_a_push_that_failed(made: tuple) -> None:
    pusher, memory, go, error = made
    error.append("connection gone")
    go.set()
    pusher.put(1)
    assert pusher.copied()
    with pytest.raises(RecoveryError, match=r"rank 0 could not push its shard \(connection gone\)"):
        pusher.arrived()
    assert memory.steps() == {"own": [1], "peer": []}


def test_what_was_given_up_writes_to_memory_no_more(made: tuple) -> None:
    pusher, memory, go, _ = made
    pusher.put(1)
    pusher.copied()
    pusher.drop()
    go.set()
    pusher._thread.join(20)
    assert not pusher._thread.is_alive()
    assert memory.steps() == {"own": [1], "peer": []}


def test_who_waits_for_a_push_that_never_arrives_can_be_stopped() -> None:
    """The engine restarts a rank by an exception in its thread; one long wait would not let it in."""
    pusher: Any = object.__new__(Pusher)
    pusher._arrived = threading.Event()
    stopped = threading.Event()

    def wait() -> None:
        try:
            pusher.arrived()
        except InterruptedError:
            stopped.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert stop(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(InterruptedError)) == 1
    assert stopped.wait(10)
