"""The manager: hands out what is to be generated, and holds finished trajectories until the trainer has used them.

It keeps trajectories as the bytes that rollouts sent, so it needs no torch and starts in a second. What it forgets when
it dies can be made again: shares are generated the same whoever generates them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.recovery import events as ev
from moeproxy.recovery.detection import Progress
from moeproxy.recovery.events import EventLog
from moeproxy.recovery.plan import RolePlan, suffer


@dataclass(frozen=True)
class Order:
    """One share to generate.

    Args:
        step: for which it is.
        share: its number, from 0.
        prompts: of this share, samples of one prompt side by side.
        version: weights to use: those after this many updates.
        sources: addresses (host, port) of members that have those weights.
    """

    step: int
    share: int
    prompts: tuple[str, ...]
    version: int
    sources: tuple[tuple[str, int], ...]


class ManagerRole:
    """The manager of one job; an actor whose methods run on one event loop.

    Args:
        schedule: prompts of every step.
        plan: `RolePlan.to_dict()`.
        committed: the last step that the trainer has finished.
        folder: of the job, for events.
    """

    def __init__(
        self, schedule: Sequence[Sequence[str]], plan: Mapping[str, Any], committed: int, folder: Path | None = None
    ) -> None:
        self._plan, self._folder = RolePlan.from_dict(plan), folder
        self._schedule, self._committed = schedule, committed
        self._shares, self._lag = self._plan.shares, self._plan.lag
        self._done: dict[int, dict[int, bytes]] = {}
        self._assigned: dict[tuple[int, int], str] = {}
        self._asking: dict[str, object] = {}
        self._have: dict[int, dict[str, tuple[str, int]]] = {}
        self._changed = asyncio.Condition()
        self._log = EventLog(folder, ev.MANAGER, "manager") if folder else None
        self._say(ev.START, pid=os.getpid())
        self._say(ev.READY)

    def _say(self, event: str, **info: Any) -> None:
        if self._log:
            self._log.add(event, **info)

    def _suffer(self, step: int) -> None:
        if self._folder and self._log:
            suffer(self._plan.mishaps, self._folder, ev.MANAGER, "serve", step, self._log.add)

    async def pid(self) -> int:
        """Return the process number."""
        return os.getpid()

    async def serve(self) -> None:
        """Never return: whoever waits for this hears at once when the manager dies."""
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        """Answer a heartbeat."""
        whole = len(self._done.get(self._committed + 1, ())) == self._shares
        return Progress("serve", 0, self._committed + whole)

    async def next(self, member: str) -> Order | None:
        """Return the next share for a rollout, waiting for one; None when everything has been generated.

        A rollout that asks has nothing in hand: what is noted as its own goes out again. Only its last question is
        answered with a share, since the one before may be that of a process that died while it waited.
        """
        asking = object()
        async with self._changed:
            self._asking[member] = asking
            self._free(member)
        return await self._when(lambda: self._offer(member) if self._asking.get(member) is asking else _NOTHING)

    async def deliver(self, member: str, step: int, share: int, payload: bytes) -> None:
        """Take a finished share; one that is there already stays as it is."""
        async with self._changed:
            if step > self._committed:
                self._done.setdefault(step, {}).setdefault(share, payload)
            if self._assigned.get((step, share)) == member:
                del self._assigned[step, share]
            self._changed.notify_all()

    async def take(self, step: int) -> list[bytes]:
        """Return all shares of a step, in order, waiting for them. The trainer that asks is in this step."""
        async with self._changed:
            self._committed = step - 1  # it may have gone back
            self._changed.notify_all()
        self._suffer(step)
        found = await self._when(lambda: self._done[step] if len(self._done.get(step, ())) == self._shares else None)
        return [found[share] for share in range(self._shares)]

    async def available(self, member: str, address: tuple[str, int], version: int) -> None:
        """Take note that a member has the weights after `version` updates, to give to others."""
        async with self._changed:
            self._have.setdefault(version, {})[member] = address
            for old in [v for v in self._have if v < version - self._lag - 1]:
                del self._have[old]
            self._changed.notify_all()

    async def commit(self, step: int) -> None:
        """Take note that the trainer has finished a step; trajectories of the step before it are dropped."""
        async with self._changed:
            self._committed = max(self._committed, step)
            for old in [s for s in self._done if s < step]:
                del self._done[old]
            self._changed.notify_all()

    async def lost(self, member: str) -> None:
        """Hand out again what a failed rollout was at, and ask it for nothing any more, even if it had asked."""
        async with self._changed:
            self._asking.pop(member, None)
            self._free(member)
            for members in self._have.values():
                members.pop(member, None)

    async def look(self) -> Mapping[str, Any]:
        """Return what there is: finished shares a step, what each rollout is at, the last finished step."""
        return {
            "committed": self._committed,
            "held": {step: len(parts) for step, parts in sorted(self._done.items())},
            "at": {member: key for key, member in self._assigned.items()},
        }

    def _free(self, member: str) -> None:
        self._assigned = {key: who for key, who in self._assigned.items() if who != member}
        self._changed.notify_all()

    async def _when(self, find: Callable[[], Any]) -> Any:
        async with self._changed:
            while (found := find()) is None:
                await self._changed.wait()
            return None if found is _NOTHING else found

    def _offer(self, member: str) -> Order | object | None:
        last = len(self._schedule)
        if self._committed >= last:
            return _NOTHING
        for step in range(self._committed + 1, min(self._committed + 1 + self._lag, last) + 1):
            version = max(0, step - 1 - self._lag)
            have = self._have.get(version, {})
            if version and not have:
                continue
            for share in range(self._shares):
                free = share not in self._done.get(step, {}) and (step, share) not in self._assigned
                if free:
                    self._assigned[step, share] = member
                    # Its own copy first, then the others': a chain of relays instead of one overloaded trainer.
                    sources = sorted(have, key=lambda name: name != member)
                    return self._order(step, share, version, tuple(have[name] for name in sources))
        return None

    def _order(self, step: int, share: int, version: int, sources: tuple[tuple[str, int], ...]) -> Order:
        prompts = self._schedule[step - 1]
        begin, end = bounds(len(prompts), self._shares, share)
        return Order(step, share, tuple(prompts[begin:end]), version, sources)


_NOTHING = object()


def bounds(n: int, shares: int, share: int) -> tuple[int, int]:
    """Return where a share of `n` prompts begins and ends."""
    return n * share // shares, n * (share + 1) // shares
