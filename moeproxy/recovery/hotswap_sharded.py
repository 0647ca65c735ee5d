"""Hot swap of sharded state: FSDP2 on nvidia-resiliency-ext's in-process restart, and a copy of each shard next door.

Run by `moeproxy.recovery.hotswap`. Every rank owns a shard that no other has. After each step it copies it (weights and
Adam's moments) and a thread pushes the copy into its right neighbour's memory over a group of its own, so training does
not wait. The two newest copies are kept: the newest may be incomplete when somebody dies. When a rank dies, the engine
lets the living ones start over within their processes and gives the dead one's number to a spare, which takes the shard
from the neighbour. If a neighbour died too, all go back to the newest checkpoint that every shard has on disk.
"""

from __future__ import annotations

import datetime
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeproxy.errors import RecoveryError
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.hotswap import shard_folder
from moeproxy.recovery.packing import pack, unpack
from moeproxy.recovery.swap_member import SwapMember, end_with_parent

_KEPT = 2
_MOMENTS = ("exp_avg", "exp_avg_sq")
_END = object()


class Memory:
    """What a process keeps over restarts within it: copies of its own shard and of its left neighbour's, by step."""

    def __init__(self) -> None:
        self.own: dict[int, torch.Tensor] = {}
        self.peer: dict[int, torch.Tensor] = {}

    def keep(self, step: int, own: torch.Tensor, peer: torch.Tensor) -> None:
        """Keep a pair, and of older ones the newest."""
        for store, shard in ((self.own, own), (self.peer, peer)):
            store[step] = shard
            for old in sorted(store)[:-_KEPT]:
                del store[old]

    def only(self, step: int, own: torch.Tensor) -> None:
        """Forget all but one step: the ring has changed."""
        self.own, self.peer = {step: own}, {}


def flat(model: Any, optimizer: Any) -> torch.Tensor:
    """Return a copy of this rank's shard as one vector: weights, then Adam's moments."""
    parameters = list(model.parameters())
    parts = [p.to_local() for p in parameters]
    parts += [optimizer.state[p][name].to_local() for p in parameters for name in _MOMENTS]
    return torch.cat([part.detach().reshape(-1) for part in parts])


@torch.no_grad()
def restore(model: Any, optimizer: Any, shard: torch.Tensor, step: int) -> None:
    """Put a shard back that `flat` returned after `step` steps."""
    parameters = list(model.parameters())
    places = [p.to_local() for p in parameters]
    places += [optimizer.state[p][name].to_local() for p in parameters for name in _MOMENTS]
    at = 0
    for place in places:
        place.copy_(shard[at : at + place.numel()].view_as(place))
        at += place.numel()
    for p in parameters:
        optimizer.state[p]["step"].fill_(float(step))


class Ring:
    """Pushes copies of shards to the right neighbour, in a thread.

    Args:
        memory: takes what arrives.
        rank, world: of this process.
        sizes: of every rank's shard: FSDP pads unevenly.
    """

    def __init__(self, member: SwapMember, memory: Memory, rank: int, world: int, sizes: list[int]) -> None:
        self._member, self._memory, self._rank, self._world = member, memory, rank, world
        self._left = sizes[(rank - 1) % world]
        self._group: Any = dist.new_group(
            backend="gloo"
        )  # its own: snapshots must not wait for training, nor it for them
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def put(self, step: int, shard: torch.Tensor) -> None:
        """Push a copy; waits only while the one of the step before is under way."""
        self._queue.put((step, shard))

    def close(self) -> None:
        """Let what is under way arrive."""
        self._queue.put(_END)
        self._thread.join(30)

    def _push(self) -> None:
        while (item := self._queue.get()) is not _END:
            step, shard = item
            arrived = torch.empty(self._left)
            self._member.suffer("publish", step)
            try:
                moves: list[Any] = [
                    dist.isend(shard, (self._rank + 1) % self._world, group=self._group),
                    dist.irecv(arrived, (self._rank - 1) % self._world, group=self._group),
                ]
                for move in moves:
                    move.wait()
            except RuntimeError:  # a neighbour is gone: training will hear of it
                continue
            self._memory.keep(step, shard, arrived)


def train(me: SwapMember, memory: Memory, iteration: int) -> None:
    """Train as one rank, from the start or from what the living ranks remember."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = str(me.folder / f"store-{iteration}")
    store = dist.FileStore(place, world)  # pyright: ignore[reportPrivateImportUsage]
    limit = datetime.timedelta(seconds=me.plan.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    model = _sharded(me, world)
    optimizer = me.optimizer(model)
    _warmed(optimizer)
    step = _recovered(me, memory, model, optimizer, rank, world) if iteration else 0
    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, flat(model, optimizer).numel())
    ring = Ring(me, memory, rank, world, sizes)
    disk = Checkpoints(shard_folder(me.folder, rank))
    me.say("connected", step)
    while step < me.plan.steps:
        step += 1
        _step(me, model, optimizer, ring, disk, step, rank)
    ring.close()
    dist.barrier()
    if rank == 0:
        me.finish()
    dist.destroy_process_group()


def _step(me: SwapMember, model: Any, optimizer: Any, ring: Ring, disk: Checkpoints, step: int, rank: int) -> None:
    began = time.monotonic()
    me.say("step_begin", step)
    me.loss(model, step, rank).backward()
    me.suffer("update", step)
    optimizer.step()
    optimizer.zero_grad()
    shard, blocked = flat(model, optimizer), None
    if me.plan.snapshot:
        copying = time.monotonic()
        ring.put(step, flat(model, optimizer))
        blocked = time.monotonic() - copying
    seconds = time.monotonic() - began
    if step % me.plan.checkpoint_every == 0:
        disk.save(step, pack({"shard": shard}))
    me.done(step, {"weights": {f"shard-{rank}": shard}}, seconds=seconds, blocked=blocked)


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


def _recovered(me: SwapMember, memory: Memory, model: Any, optimizer: Any, rank: int, world: int) -> int:
    """Restore the newest step that every shard can be had of, and return it; 0 when there is none."""
    me.suffer("recover", 0)
    disk = Checkpoints(shard_folder(me.folder, rank))
    mine = {"own": sorted(memory.own), "peer": sorted(memory.peer), "disk": disk.whole()}
    infos: list[Any] = [None] * world
    dist.all_gather_object(infos, mine)
    step, fresh = choose(infos)
    if step is not None:
        shard = memory.own.get(step)
        for lost in fresh:
            helper = (lost + 1) % world
            if rank == helper:
                dist.send(memory.peer[step], lost)
            elif rank == lost:
                shard = torch.empty_like(flat(model, optimizer))
                dist.recv(shard, helper)
    else:
        step = max(set.intersection(*[set(info["disk"]) for info in infos]), default=0)
        found = disk.newest(at_most=step) if step else None
        shard = unpack(found.payload)["shard"] if found else None
    if shard is not None:
        restore(model, optimizer, shard, step)
        memory.only(step, shard)
    me.say("ready", step, fresh=fresh)
    return step


def choose(infos: list[dict[str, list[int]]]) -> tuple[int | None, list[int]]:
    """Return (newest step that can be had from memory, ranks that have nothing), or (None, them) when there is none.

    Args:
        infos: for every rank the steps of its own copies and of those that it keeps for its left neighbour.
    """
    fresh = [rank for rank, info in enumerate(infos) if not info["own"]]
    sets = [set(info["own"]) for info in infos if info["own"]]
    sets += [set(infos[(rank + 1) % len(infos)]["peer"]) for rank in fresh]
    return max(set.intersection(*sets), default=None) if sets else None, fresh


def main() -> None:
    """Be one rank, or a spare: `python -m moeproxy.recovery.hotswap_sharded FOLDER NAME`."""
    end_with_parent()
    folder, name = Path(sys.argv[1]), sys.argv[2]
    me, memory = SwapMember(folder, name), Memory()
    number = int(name.rpartition("-")[2])
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(len(me.plan.members)))
    if "MASTER_PORT" not in os.environ:
        raise RecoveryError("no port to meet at", expected="MASTER_PORT, as hot_swap sets it")
    _wrapped(me, memory)()
    os._exit(0)


def _wrapped(me: SwapMember, memory: Memory) -> Any:
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.abort import Abort

    def seconds(value: float) -> datetime.timedelta:
        return datetime.timedelta(seconds=value)

    class AbortGloo(Abort):
        """The engine's own aborts NCCL only."""

        def __call__(self, state: Any) -> Any:
            if dist.is_initialized():
                dist.destroy_process_group()
            return state

    assignment = inprocess.rank_assignment
    wrap = inprocess.Wrapper(
        abort=AbortGloo(),
        store_kwargs={"port": int(os.environ["MASTER_PORT"])},
        rank_assignment=inprocess.Compose(assignment.MaxActiveWorldSize(me.plan.active), assignment.FillGaps()),
        # An ordinary bug would otherwise restart for ever.
        initialize=inprocess.initialize.RetryController(max_iterations=2 * len(me.plan.members)),
        monitor_thread_interval=seconds(0.05),
        monitor_process_interval=seconds(0.05),
        heartbeat_interval=seconds(0.1),
        heartbeat_timeout=seconds(max(3.0, me.plan.heartbeat)),
        progress_watchdog_interval=seconds(0.1),
        soft_timeout=seconds(20),
        hard_timeout=seconds(40),
        last_call_wait=seconds(0.05),
        termination_grace_time=seconds(0.5),
    )

    def run(call_wrapper: inprocess.CallWrapper = None) -> None:  # pyright: ignore[reportArgumentType]
        train(me, memory, call_wrapper.iteration)

    # The engine looks for a parameter of this very type, and finds none behind annotations that are text.
    run.__annotations__["call_wrapper"] = inprocess.CallWrapper
    return wrap(run)


if __name__ == "__main__":
    main()
