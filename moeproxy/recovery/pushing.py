"""The thread of a rank that copies its shard while training goes on, and pushes the copy into its neighbour's memory.

A copy may be taken as long as nobody writes to the shard: from the end of an optimizer step until the next one. The
forward and backward pass between them only read it, so copy and push go on beside them. A step counts as done once it
is copied, to memory that may outlive the process. Before the next optimizer step training waits for what has not
arrived yet: weights never move on from a state that nobody else has.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from moeproxy.errors import RecoveryError
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.packing import pack
from moeproxy.recovery.priority import give_way
from moeproxy.recovery.shards import Memory, Shard
from moeproxy.recovery.swap_member import SwapMember
from moeproxy.recovery.swap_plan import shard_folder

_PATIENCE_S = 60.0
_LOOK_S = 0.05


class Pusher:
    """Copies and pushes, in a thread.

    Args:
        me: events, digests, mishaps.
        memory: takes the copies.
        shard: is copied.
        group: whom to push over.
        rank: of this process.
        sizes: of every rank's shard: FSDP pads unevenly.
    """

    def __init__(self, me: SwapMember, memory: Memory, shard: Shard, group: Any, rank: int, sizes: list[int]) -> None:
        self._me, self._memory, self._shard, self._group, self._rank = me, memory, shard, group, rank
        self._right, self._left = (rank + 1) % len(sizes), (rank - 1) % len(sizes)
        self._left_numel = sizes[self._left]
        self._disk = Checkpoints(shard_folder(me.folder, rank))
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._copied, self._arrived = threading.Event(), threading.Event()
        self._copied.set()
        self._arrived.set()
        self._problem: BaseException | None = None
        self._asked = self._whole = 0
        self._over, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"pusher-{rank}", daemon=True)
        self._thread.start()

    def put(self, step: int) -> None:
        """Have the shard copied and pushed as it is after a step; it must not change until that has `arrived`."""
        self._copied.clear()
        self._arrived.clear()
        self._asked = step
        self._queue.put(step)

    def copied(self, *, wait: bool = True) -> bool:
        """Return whether the newest copy is whole, if need be once it is.

        Raises:
            RecoveryError: it could not be taken.
        """
        if not wait and not self._copied.is_set():
            return False
        _waited(self._copied)
        if self._whole != self._asked:
            raise RecoveryError(f"rank {self._rank} could not copy its shard ({self._problem})")
        return True

    def arrived(self) -> float:
        """Wait until the newest copy is in the neighbours' memories, and return the seconds that it took.

        Raises:
            RecoveryError: it could not be pushed.
        """
        seconds = _waited(self._arrived)
        if self._problem is not None:
            raise RecoveryError(f"rank {self._rank} could not push its shard ({self._problem})")
        return seconds

    def close(self) -> None:
        """Let what is under way arrive and be written, and end the thread."""
        self.arrived()
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)

    def drop(self) -> None:
        """Give up what is under way; memory is not written to any more, wherever the thread may wait.

        A copy that is being taken is finished first. For a push it was seen to wait for a minute on a connection whose
        other end had died, well beyond gloo's own limit.
        """
        with self._lock:
            self._over = True
        self._queue.put(None)

    def _run(self) -> None:
        give_way()
        try:
            while (step := self._queue.get()) is not None and (own := self._copy(step)) is not None:
                self._copied.set()
                self._push(step, own)
                self._arrived.set()
                self._log(step, own)
        except Exception as error:  # training hears of it with its next step
            self._problem = error
            self._copied.set()
            self._arrived.set()

    def _copy(self, step: int) -> torch.Tensor | None:
        with self._lock:
            if self._over:
                return None
            own = self._memory.own.room(self._shard.numel)
            self._shard.copy_to(own)
            self._memory.own.keep(step, own)
            self._whole = step
            return own

    def _push(self, step: int, own: torch.Tensor) -> None:
        arriving = self._memory.peer.room(self._left_numel)
        moves: list[Any] = [
            dist.isend(own, self._right, group=self._group),
            dist.irecv(arriving, self._left, group=self._group),
        ]
        self._me.suffer("publish", step)
        for move in moves:
            move.wait()
        with self._lock:
            if not self._over:
                self._memory.peer.keep(step, arriving)

    def _log(self, step: int, own: torch.Tensor) -> None:
        if self._me.plan.digests:
            self._me.digest(step, self._shard.named(own, self._rank))
        if step and step % self._me.plan.checkpoint_every == 0:
            began, problem = time.monotonic(), ""
            try:
                self._disk.save(step, pack({"shard": own, "layout": self._shard.layout}))
            except RecoveryError as error:  # no room: the job goes on, and memory still has it
                problem = str(error)
            # Training waited for none of it, or will say so as `blocked`.
            self._me.say(ev.CHECKPOINT, step, seconds=0.0, took=time.monotonic() - began, problem=problem)


def _waited(event: threading.Event) -> float:
    """Wait for an event of the other thread, and return the seconds.

    The engine stops a rank by an exception in its thread, which comes only between two instructions: one long wait for
    a push over a connection that is gone would hold it up until the engine kills the process.
    """
    began = time.monotonic()
    while not event.wait(_LOOK_S):
        pass
    return time.monotonic() - began
