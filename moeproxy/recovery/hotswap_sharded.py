"""Hot swap of sharded state: FSDP2 on nvidia-resiliency-ext's in-process restart, and a copy of each shard next door.

Run by `moeproxy.recovery.hotswap`. Every rank owns a shard that no other has. A thread copies it (weights and Adam's
moments) beside the next step, to memory of the machine that outlives the process; with that the step is done. Then it
pushes the copy into the right neighbour's memory, over a group of its own. When a rank dies, the engine lets the living
ones start over within their processes and gives the dead one's number to a spare, which takes the shard from the
machine's memory, or from the neighbour where that died with it. If a neighbour's machine died, too, all go back to the
newest checkpoint that every shard has on disk.
"""

from __future__ import annotations

import datetime
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.exception import RestartAbort
from nvidia_resiliency_ext.inprocess.initialize import Initialize
from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignment
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.links import Links
from moeproxy.recovery.loopback import LOOPBACK, listening_store
from moeproxy.recovery.packing import unpack
from moeproxy.recovery.priority import made_to_give_way
from moeproxy.recovery.proxied import NETWORK, ProxiedStore, fail
from moeproxy.recovery.pushing import Pusher
from moeproxy.recovery.shards import Memory, Shard, choose, place
from moeproxy.recovery.swap_member import SwapMember, lighthouse_address, say_address
from moeproxy.recovery.swap_plan import shard_folder
from moeproxy.recovery.swap_processes import LIGHTHOUSE, outliving

_TRIES = 5
_STARTING_S = 120.0


class Rank:
    """What a process keeps over restarts within it.

    Args:
        me: events, mishaps, program.
        port: of the job's store.
    """

    def __init__(self, me: SwapMember, port: int) -> None:
        self.me, self.memory, self.links = me, Memory(outliving()), Links()
        self.store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            LOOPBACK, port, is_master=False, wait_for_workers=False
        )
        self.pusher: Pusher | None = None
        self.iteration, self.step, self._stood, self._tries = 0, 0, -1, 0

    def give_up(self, ranks: int, training: bool) -> str:
        """Return why it is no use to start over, or "".

        Args:
            ranks: number of those that would train.
            training: whether this is one of them.
        """
        if ranks < self.me.plan.active:
            return f"failed: {ranks} of {self.me.plan.active} ranks are left and no spare"
        if not training:
            return ""
        self._tries = self._tries + 1 if self.step == self._stood else 0
        self._stood = self.step
        return f"failed: {_TRIES} restarts in a row without a finished step" if self._tries > _TRIES else ""

    def leave(self) -> None:
        """Cut the connections to the other ranks: who waits on one of them goes on at once."""
        self.links.cut()
        if dist.is_initialized():
            dist.destroy_process_group()

    def train(self, iteration: int) -> None:
        """Train as one rank, from the start or from what the living ranks remember."""
        if self.pusher is not None:
            self.pusher.drop()  # of the iteration before: it must not write to what is read now
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        limit = datetime.timedelta(seconds=self.me.plan.timeout)
        self.iteration = iteration
        prefixed: Any = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            f"ranks-{iteration}", self.store
        )
        if any(item.kind in NETWORK for item in self.me.plan.mishaps):
            prefixed = ProxiedStore(prefixed, self.me.folder, rank, iteration)
        with self.links.watched():
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=limit)
            with made_to_give_way():
                beside = dist.new_group(backend="gloo")  # snapshots must not wait for training, nor it for them
        model = _sharded(self.me, world)
        optimizer = self.me.optimizer(model)
        _warmed(optimizer)
        shard = Shard(model, optimizer)
        self.memory.become(rank, shard.numel)
        step = self._recovered(shard, rank, world) if iteration else 0
        sizes: list[Any] = [None] * world
        dist.all_gather_object(sizes, shard.numel)
        self.pusher = Pusher(self.me, self.memory, shard, beside, rank, sizes)
        if step:
            self.pusher.put(step)  # a spare knows nothing of its neighbour's shard yet
        self.me.say(ev.CONNECTED, step, rank=rank)
        self._steps(model, optimizer, self.pusher, step, rank)
        self.pusher.close()
        dist.barrier()
        if rank == 0:
            self.me.finish()

    def _steps(self, model: Any, optimizer: Any, pusher: Pusher, step: int, rank: int) -> None:
        """Train to the end; a step is said to be done once it is copied, beside the next forward and backward pass."""
        plan, beside, said = self.me.plan, bool(step), _Said(self.me, pusher, rank, step)
        while step < plan.steps:
            step += 1
            began = time.monotonic()
            loss = self.me.loss(model, step, rank)
            said.begin(step, wait=False)  # the copy must not hold training up
            loss.backward()
            blocked = pusher.arrived()
            said.begin(step)
            mishap = self.me.suffer("update", step)
            if mishap and mishap.kind in NETWORK:
                fail(self.me.folder, self.iteration, rank, mishap.kind)
            optimizer.step()
            optimizer.zero_grad()
            due = step % plan.snapshot_every == 0 or step % plan.checkpoint_every == 0
            if due:
                pusher.put(step)
            self.step = max(self.step, step)
            # `beside`: the step after a snapshot is the one beside which it is copied and pushed, and so pays for it.
            said.done(step, seconds=time.monotonic() - began, blocked=blocked, beside=beside)
            beside = due
        said.begin(plan.steps)

    def _recovered(self, shard: Shard, rank: int, world: int) -> int:
        """Restore the newest step that every shard can be had of, and return it; 0 when there is none."""
        self.me.suffer("recover", 0)
        disk = Checkpoints(shard_folder(self.me.folder, rank))
        infos: list[Any] = [None] * world
        dist.all_gather_object(infos, {**self.memory.steps(), "disk": disk.whole()})
        step, needy = choose(infos)
        source = "memory" if step is not None else "disk"
        if step is not None:
            self._share(shard, rank, world, step, needy)
            shard.restore(self.memory.own[step], step)
        else:
            step = max(set.intersection(*[set(info["disk"]) for info in infos]), default=0)
            if found := disk.newest(at_most=step) if step else None:
                shard.restore(unpack(found.payload)["shard"], step)
        self.memory.cut(step)
        self.step = max(self.step, step)
        self.me.say(ev.READY, step, source=source if step else "start", moved=needy)
        return step

    def _share(self, shard: Shard, rank: int, world: int, step: int, needy: list[int]) -> None:
        """Give those that have no copy of their shard the one that is kept next door."""
        for lost in needy:
            helper = (lost + 1) % world
            if rank == helper:
                dist.send(self.memory.peer[step], lost)
            elif rank == lost:
                flat = self.memory.own.room(shard.numel)
                dist.recv(flat, helper)
                self.memory.own.keep(step, flat)


class _Said:
    """Logs steps: that one is done once its copy is whole, and only then that the next has begun.

    Args:
        me: logs.
        pusher: takes the copies.
        rank: of this process.
        step: the last one that was done before.
    """

    def __init__(self, me: SwapMember, pusher: Pusher, rank: int, step: int) -> None:
        self._me, self._pusher, self._rank = me, pusher, rank
        self._done: tuple[int, dict[str, Any]] | None = None
        self._begun = step

    def done(self, step: int, **info: Any) -> None:
        """Note a step that is done but for its copy, and what is to be said of it."""
        self._done = step, info

    def begin(self, step: int, *, wait: bool = True) -> None:
        """Say that the step before is done and this one has begun, unless that was said, or has to wait and may not."""
        if self._done is not None and self._pusher.copied(wait=wait):
            before, info = self._done
            self._me.say(ev.STEP_COMMIT, before, rank=self._rank, **info)
            self._done, self._begun = None, max(self._begun, before)
        if self._done is None and step > self._begun:
            self._me.say(ev.STEP_BEGIN, step, rank=self._rank)
            self._begun = step


def _sharded(me: SwapMember, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = me.model(), init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _warmed(optimizer: Any) -> None:
    """Let the optimizer make its state without changing anything."""
    for group in optimizer.param_groups:
        rate, group["lr"] = group["lr"], 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        group["lr"] = rate
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()


class _Store(dist.TCPStore, StoreMixin):  # pyright: ignore[reportPrivateImportUsage]
    """The engine's store, which the lighthouse holds: the engine's own dies with rank 0."""

    def __init__(self, port: int) -> None:
        super().__init__(LOOPBACK, port, is_master=False, wait_for_workers=False)


class _Places(RankAssignment):
    """Fills gaps as `place` says. The engine's `FillGaps` (0.4.1) leaves one when an active rank and a spare die."""

    def __call__(self, ctx: Any) -> Any:
        state, dead = ctx.state, ctx.terminated_ranks
        if state.rank in dead:
            raise inprocess.rank_assignment.RankDiscarded(f"rank {state.rank} counts as dead")
        state.rank, state.world_size = place(state.rank, state.world_size, dead), state.world_size - len(dead)
        ctx.terminated_ranks = set()
        return ctx


class _Leave(Abort):
    """The engine's own aborts NCCL only."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __call__(self, state: Any) -> Any:
        self._rank.leave()
        return state


class _Worth(Initialize):
    """Ends the job when ranks are missing, and when an ordinary bug would let it start over for ever."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __call__(self, state: Any) -> Any:
        if why := self._rank.give_up(state.active_world_size, state.active_rank is not None):
            raise RestartAbort(why)
        return state


def wrapped(rank: Rank, port: int) -> Any:
    """Return `rank.train` as the engine runs it, over and over until it ends in good order."""

    def seconds(value: float) -> datetime.timedelta:
        return datetime.timedelta(seconds=value)

    plan = rank.me.plan
    wrap = inprocess.Wrapper(
        abort=_Leave(rank),
        store_factory=_Store,
        store_kwargs={"port": port},
        rank_assignment=inprocess.Compose(inprocess.rank_assignment.MaxActiveWorldSize(plan.active), _Places()),
        initialize=_Worth(rank),
        monitor_thread_interval=seconds(0.5),
        monitor_process_interval=seconds(0.05),
        heartbeat_interval=seconds(0.5),
        heartbeat_timeout=seconds(max(10.0, plan.heartbeat)),  # of a machine; a process is watched from beside it
        progress_watchdog_interval=seconds(0.1),
        soft_timeout=seconds(5 * plan.timeout),
        hard_timeout=seconds(8 * plan.timeout),
        barrier_timeout=seconds(8 * plan.timeout + _STARTING_S),
        completion_timeout=seconds(_STARTING_S),
        last_call_wait=seconds(0.05),
        termination_grace_time=seconds(0.5),
    )

    def run(call_wrapper: inprocess.CallWrapper = None) -> None:  # pyright: ignore[reportArgumentType]
        rank.train(call_wrapper.iteration)

    # The engine looks for a parameter of this very type, and finds none behind annotations that are text.
    run.__annotations__["call_wrapper"] = inprocess.CallWrapper
    return wrap(run)


def lighthouse(folder: Path) -> None:
    """Hold the job's store until the parent ends."""
    store = listening_store()
    say_address(folder, f"{LOOPBACK}:{store.port}")
    while True:
        time.sleep(3600)


def member(folder: Path, name: str) -> None:
    """Be one rank, or a spare, to the job's end."""
    me = SwapMember(folder, name)
    me.loss(me.model(), 1, 0).backward()  # what a spare has done before, it need not learn when it takes over
    number, port = me.plan.members.index(name), int(lighthouse_address(folder).rpartition(":")[2])
    if any((item.member, item.phase) == (name, "wait") for item in me.plan.mishaps):
        threading.Thread(target=_suffer_waiting, args=(me,), daemon=True).start()
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(len(me.plan.members)))
    try:
        wrapped(Rank(me, port), port)()
    except RestartAbort as why:
        me.finish(str(why))


def _suffer_waiting(me: SwapMember) -> None:
    """Suffer what the plan has for a spare that waits, as soon as the others are in that step."""
    for item in me.plan.mishaps:
        if (item.member, item.phase) == (me.name, "wait"):
            me.wait_for(ev.STEP_BEGIN, me.plan.members[:1], item.step, patience=math.inf)
            me.suffer("wait", item.step)


def serve(folder: Path, name: str) -> None:
    """Be the lighthouse, or a rank."""
    lighthouse(folder) if name == LIGHTHOUSE else member(folder, name)
