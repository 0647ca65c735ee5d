"""Layout: which rank of which world is looked at, and what it shares with whom."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeproxy.errors import ScaleError
from moeproxy.scale import checks

MOST_RANKS = 2**20
"""The largest world: a mesh lists all its ranks, which takes 1.4 GiB and a quarter of a minute for so many."""
_MOST = 16
"""Possible sizes that an error lists."""


@dataclass(frozen=True)
class Layout:
    """A rank's place in a world of FSDP2 and expert parallelism (no tensor or pipeline parallelism).

    Expert-parallel groups are consecutive ranks, as transformers lays them out: {0..ep-1}, {ep..2 ep-1}, ... Each
    group holds all experts once; ranks that hold the same experts shard them among themselves (`efsdp`).

    Args:
        world: ranks in all.
        ep: ranks over which the experts of a layer are spread; 1 for pure FSDP2.
        rank: the rank looked at.
    """

    world: int
    ep: int
    rank: int = 0

    def __post_init__(self) -> None:
        checks.whole(world=self.world, ep=self.ep, rank=self.rank)
        if self.world < 2:
            raise ScaleError(f"a world of {self.world}", expected="at least 2 ranks")
        if self.world > MOST_RANKS:
            raise ScaleError(
                f"a world of {self.world:,} ranks",
                expected=f"at most {MOST_RANKS:,}",
                remedy="choose a smaller world",
            )
        if self.ep < 1 or self.world % self.ep:
            raise ScaleError(
                f"expert parallelism over {self.ep} ranks does not divide a world of {self.world}",
                expected=f"one of {_listed(divisors(self.world))}",
            )
        if not 0 <= self.rank < self.world:
            raise ScaleError(f"rank {self.rank} in a world of {self.world}", expected=f"0 to {self.world - 1}")

    @property
    def ep_rank(self) -> int:
        """Place of the rank in its expert-parallel group: which experts it holds."""
        return self.rank % self.ep

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts and shard them."""
        return self.world // self.ep

    def check_experts(self, n_experts: int) -> None:
        """Raise ScaleError unless the experts can be spread evenly."""
        if n_experts % self.ep:
            possible = [n for n in divisors(self.world) if n_experts % n == 0]
            raise ScaleError(
                f"{n_experts} experts cannot be spread evenly over {self.ep} ranks",
                expected=f"in a world of {self.world}, ep = {_listed(possible)}",
                remedy=f"choose another ep, or a proxy whose experts are a multiple of {self.ep}",
            )


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _MOST} larger ones" if len(numbers) > _MOST else ""
    return ", ".join(map(str, numbers[:_MOST])) + more
