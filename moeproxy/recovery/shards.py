"""Shards of a training state in memory: copied beside training, kept here and next door, chosen after a fault.

Every rank owns a shard that no other has. It keeps the newest copies of its own and of its left neighbour's, so that a
shard is lost only when the machines of two neighbours die at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from moeproxy.errors import RecoveryError
from moeproxy.recovery.copies import Copies, Outliving

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Shard:
    """This rank's part of weights and Adam's moments, as places that a vector is copied from and to.

    Args:
        model: sharded by FSDP2, outside of a forward pass.
        optimizer: of its parameters, with its state made.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        named = list(model.named_parameters())
        self._places = {f"weights/{name}": p.to_local() for name, p in named}
        for moment in _MOMENTS:
            kept = {f"optimizer/{name}/{moment}": optimizer.state[p][moment].to_local() for name, p in named}
            self._places |= kept
        self._counters = [optimizer.state[p]["step"] for _, p in named]
        self.numel = sum(place.numel() for place in self._places.values())

    @torch.no_grad()
    def copy_to(self, flat: torch.Tensor) -> None:
        """Fill a vector of `numel` values."""
        for place, part in zip(self._places.values(), self._split(flat), strict=True):
            part.copy_(place)

    @torch.no_grad()
    def restore(self, flat: torch.Tensor, step: int) -> None:
        """Put values back that `copy_to` took after `step` steps.

        Raises:
            RecoveryError: they are those of another shard.
        """
        if flat.numel() != self.numel:
            raise RecoveryError(f"a shard of {flat.numel()} values", expected=f"{self.numel}, those of this rank")
        for place, part in zip(self._places.values(), self._split(flat), strict=True):
            place.copy_(part)
        for counter in self._counters:
            counter.fill_(float(step))

    @property
    def layout(self) -> dict[str, torch.Size]:
        """Name and shape of every part, in the order of the vector."""
        return {name: place.shape for name, place in self._places.items()}

    def named(self, flat: torch.Tensor, rank: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return a vector's parts by name, as digests are taken of them: ranks share a log, so each has its own."""
        found: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "optimizer": {}}
        for name, part in zip(self._places, self._split(flat), strict=True):
            if part.numel():  # with many ranks, some have nothing of a small tensor
                kind, _, rest = name.partition("/")
                found[kind][f"{rest}/shard-{rank}"] = part
        return found

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([place.numel() for place in self._places.values()])
        return [part.view_as(place) for part, place in zip(parts, self._places.values(), strict=True)]


class Memory:
    """What a process keeps over restarts within it: copies of its shard, `own`, and of its left neighbour's, `peer`.

    Args:
        places: for every rank, where copies of its shard outlive its process; without any they die with it.
    """

    def __init__(self, places: Sequence[str] = ()) -> None:
        self._places = places
        self.rank: int | None = None
        self.own, self.peer = Copies(), Copies()

    def become(self, rank: int, numel: int) -> None:
        """Belong to a rank with a shard of so many values: what was kept for another is worth nothing."""
        if rank != self.rank:
            self.rank, self.own, self.peer = rank, Copies(), Copies()
        if self._places:
            self.own = Outliving(self._places[rank], numel)

    def cut(self, step: int) -> None:
        """Forget what came after a step: the job goes on from there."""
        self.own.cut(step)
        self.peer.cut(step)

    def steps(self) -> dict[str, list[int]]:
        """Return of which steps there are copies."""
        return {"own": self.own.steps, "peer": self.peer.steps}


def choose(infos: Sequence[Mapping[str, Sequence[int]]]) -> tuple[int | None, list[int]]:
    """Return (newest step that every shard can be had of from memory, or None; ranks that need theirs from next door).

    Args:
        infos: for every rank the steps of its copies, as `Memory.steps` returns them.
    """
    world = len(infos)
    sets = [set(infos[rank]["own"]) | set(infos[(rank + 1) % world]["peer"]) for rank in range(world)]
    step = max(set.intersection(*sets), default=None)
    return step, [rank for rank in range(world) if step is not None and step not in infos[rank]["own"]]


def place(rank: int, world: int, dead: Collection[int]) -> int:
    """Return a living rank's number after others died: it keeps its own, and the last ones fill the gaps.

    Args:
        rank: of a living one.
        world: number of ranks before, spares last.
        dead: their numbers.
    """
    left = world - len(dead)
    if rank < left:
        return rank
    moving = [other for other in range(left, world) if other not in dead]
    return sorted(gap for gap in dead if gap < left)[moving.index(rank)]
