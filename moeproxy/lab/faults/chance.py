"""Seeded draws for faults: a fault must not disturb the random numbers of the loop."""

from __future__ import annotations

import math

import torch


def generator(step: int, salt: int) -> torch.Generator:
    """Return a generator that depends on the step and on which fault asks."""
    return torch.Generator().manual_seed(7_919 * step + salt)


def chosen(n: int, share: float, step: int, salt: int) -> torch.Tensor:
    """Return a bool tensor (n,) with round(share * n) entries true, drawn anew every step."""
    picked = torch.zeros(n, dtype=torch.bool)
    picked[torch.randperm(n, generator=generator(step, salt))[: round(share * n)]] = True
    return picked


def due(step: int, share: float) -> bool:
    """Whether the step is one of the share that are hit, evenly spread: of n steps, floor(n * share)."""
    return math.floor(step * share) > math.floor((step - 1) * share)
