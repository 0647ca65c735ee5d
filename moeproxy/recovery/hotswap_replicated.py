"""Hot swap of replicated state on torchft: a fixed world with spares. Run by `moeproxy.recovery.hotswap`.

A spare takes part in every step with gradients that do not count, so it has the state already when a rank dies. One
that starts later heals from a living rank's memory. All of that is torchft's; this file says what is trained, logged,
checked and saved.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from moeproxy.recovery.loopback import LOOPBACK, listening_store, torchft_here, transport
from moeproxy.recovery.swap_member import SwapMember, lighthouse_address, say_address
from moeproxy.recovery.swap_plan import read_plan
from moeproxy.recovery.swap_processes import LIGHTHOUSE

_SPARES_S = 30.0


def lighthouse(folder: Path) -> None:
    """Serve the quorum of a job until the parent ends."""
    import socket

    from torchft.coordination import LighthouseServer

    plan = read_plan(folder)
    server = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=plan.active,
        # A living rank that is slow is waited for; without it, it would have to heal. A dead one misses its heartbeats.
        join_timeout_ms=int(1000 * max(plan.timeout, 4 * plan.heartbeat)),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * plan.heartbeat),
    )
    say_address(folder, server.address().replace(socket.gethostname(), LOOPBACK))
    while True:
        time.sleep(3600)


def member(folder: Path, name: str) -> None:
    """Train as one replica to the job's end."""
    import torch
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    me = SwapMember(folder, name)
    _logged(folder / f"{name}.torchft.log")
    model = me.model()
    inner = me.optimizer(model)
    _warmed(model, inner)
    active, spares = me.plan.members[: me.plan.active], me.plan.members[me.plan.active :]
    if name in spares:
        me.wait_for("step_commit", active)  # so that the active ranks have the first numbers
    store, limit = listening_store(), timedelta(seconds=10 * me.plan.timeout)

    def healed(state: dict[str, Any]) -> None:
        me.suffer("recover", 0)
        model.load_state_dict(state["weights"])
        inner.load_state_dict(state["optimizer"])
        me.say("connected")

    with torchft_here():
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=me.plan.timeout)),
            min_replica_size=me.plan.active,
            load_state_dict=healed,
            state_dict=lambda: {"weights": model.state_dict(), "optimizer": inner.state_dict()},
            replica_id=name,
            rank=0,
            world_size=1,
            store_addr=LOOPBACK,
            store_port=store.port,
            lighthouse_addr=lighthouse_address(folder),
            use_async_quorum=False,  # the batch depends on the rank, which is known after the quorum
            world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
            timeout=limit,
            quorum_timeout=timedelta(seconds=60),
            hostname=LOOPBACK,
            checkpoint_transport=transport(limit),
        )
    parallel, optimizer = _parallel(manager, model), Optimizer(manager, inner)
    me.say("ready")
    torch.manual_seed(0)
    while manager.current_step() < me.plan.steps:
        _step(me, manager, parallel, optimizer, model, inner)
        if name in active and manager.current_step() == 1:
            # A real job's spares are there long before the first fault; it goes on without one that does not come.
            me.wait_for("ready", spares, patience=_SPARES_S)
    _settle(me, model, inner)
    me.finish()


def _settle(me: SwapMember, model: Any, inner: Any) -> None:
    """See to it that the checkpoint of the last step is on disk: with the job's end all processes are ended.

    Whoever had to write it may have died, or be frozen, and all have the same state.
    """
    last = me.plan.steps
    if last % me.plan.checkpoint_every == 0 and not me.saved(last, patience=10 * me.plan.timeout):
        me.checkpoint(last, _state(last, model, inner))


def _parallel(manager: Any, model: Any) -> Any:
    """Return the model with gradients that are averaged over the replicas."""
    from torchft import DistributedDataParallel

    class Parallel(DistributedDataParallel):
        @staticmethod
        def _comm_hook(state, bucket):  # torch looks at annotations here and takes its own only
            return _averaged(state, bucket.buffer())

    return Parallel(manager, model)


def _averaged(manager: Any, gradients: Any) -> Any:
    """Return a future of the averaged gradients; of these as they are, when a peer died meanwhile.

    Such a step is not committed. torchft 0.2 has an assertion here, which would end the survivors as well.
    """
    import torch

    work = manager.allreduce(gradients)
    work.wait()
    future = getattr(work.get_future(), "_fut", None)
    if future is None:
        future = torch.futures.Future()
        future.set_result(gradients)
    return future


def _logged(path: Path) -> None:
    """Let torchft's records of quorums and commits go to a file, as its console exporter writes them."""
    from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
    from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter, SimpleLogRecordProcessor

    provider = LoggerProvider()
    stream = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    provider.add_log_record_processor(SimpleLogRecordProcessor(ConsoleLogRecordExporter(out=stream)))
    for name in ("torchft_quorums", "torchft_commits"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(LoggingHandler(level=logging.NOTSET, logger_provider=provider))


def _step(me: SwapMember, manager: Any, parallel: Any, optimizer: Any, model: Any, inner: Any) -> None:
    """Try one step; it counts when the quorum commits it."""
    began = time.monotonic()
    optimizer.zero_grad()  # waits for the quorum, and heals
    step, rank = manager.current_step() + 1, manager.participating_rank()
    me.say("step_begin", step)
    me.loss(parallel, step, me.plan.active if rank is None else rank).backward()
    me.suffer("update", step)
    optimizer.step()
    if manager.current_step() != step:
        return
    state = _state(step, model, inner)
    me.done(step, state, seconds=time.monotonic() - began)
    if rank == 0 and step % me.plan.checkpoint_every == 0:
        me.checkpoint(step, state)


def _state(step: int, model: Any, inner: Any) -> dict[str, Any]:
    return {"step": step, "weights": model.state_dict(), "optimizer": inner.state_dict()}


def _warmed(model: Any, optimizer: Any) -> None:
    """Let the optimizer make its state without changing anything: a state that is healed has to be there before."""
    rates = [group["lr"] for group in optimizer.param_groups]
    import torch

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def serve(folder: Path, name: str) -> None:
    """Be the lighthouse, or a replica."""
    lighthouse(folder) if name == LIGHTHOUSE else member(folder, name)
