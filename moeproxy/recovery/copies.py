"""Copies of a shard by step: in the memory of a process, or in memory of its machine that outlives it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

KEPT = 3
"""Copies of a shard: one may be half written, and neighbours may be a step apart."""

_SLOTS = KEPT + 1  # one is written to
_HEAD = mmap.ALLOCATIONGRANULARITY


class Copies:
    """Copies in the memory of this process; vectors are used again, as new pages cost as much as a copy."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []

    @property
    def steps(self) -> list[int]:
        """Of which steps there are copies, in order."""
        return sorted(self._kept)

    def __getitem__(self, step: int) -> torch.Tensor:
        return self._kept[step]

    def room(self, numel: int) -> torch.Tensor:
        """Return a vector (numel,), float32, to write the next copy to."""
        for number, old in enumerate(self._free):
            if old.numel() == numel:
                return self._free.pop(number)
        return torch.empty(numel)

    def keep(self, step: int, flat: torch.Tensor) -> None:
        """Keep a copy, whole, that was written to a vector of `room`; of older ones the newest stay."""
        self._forget([step] if step in self._kept else [])
        self._kept[step] = flat
        self._forget(self.steps[:-KEPT])

    def cut(self, step: int) -> None:
        """Forget what came after a step: the job goes on from there."""
        self._forget([kept for kept in self.steps if kept > step])

    def _forget(self, steps: list[int]) -> None:
        self._free += [self._kept.pop(step) for step in steps]


class Outliving(Copies):
    """Copies in memory that the processes of a job share: who takes a dead one's place finds them there.

    The system frees it with the last of them. A copy has its step in the head only while it is whole, so a process may
    die at any moment.

    Args:
        place: of a file in memory, empty or of the same shard.
        numel: values of the shard.
    """

    def __init__(self, place: str | Path, numel: int) -> None:
        super().__init__()
        size = _HEAD + 4 * _SLOTS * numel
        with open(place, "r+b") as file:
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(0)
                file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
        self._head = torch.frombuffer(memory, dtype=torch.int64, count=_SLOTS)  # step + 1, or 0 for none
        whole = torch.frombuffer(memory, dtype=torch.float32, offset=_HEAD)
        self._slots = list(whole.split(numel))
        for number, stored in enumerate(self._head.tolist()):
            if stored - 1 in self._kept:  # its process died between two marks
                self._head[number] = 0
            elif stored:
                self._kept[stored - 1] = self._slots[number]
        self._forget(self.steps[:-KEPT])

    def room(self, numel: int) -> torch.Tensor:
        """Return a free slot.

        Raises:
            ValueError: of another size.
        """
        if numel != self._slots[0].numel():
            raise ValueError(f"slots of {self._slots[0].numel()} values, not {numel}")
        return self._slots[self._head.tolist().index(0)]

    def keep(self, step: int, flat: torch.Tensor) -> None:
        """Keep a copy, whole, that was written to a slot of `room`; of older ones the newest stay."""
        self._head[self._number(flat)] = step + 1  # before another copy of the step, or an older one, is given up
        super().keep(step, flat)

    def _forget(self, steps: list[int]) -> None:
        for step in steps:
            self._head[self._number(self._kept.pop(step))] = 0

    def _number(self, flat: torch.Tensor) -> int:
        return next(number for number, slot in enumerate(self._slots) if slot is flat)
