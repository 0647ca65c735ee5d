"""Merging: the weighted mean of a cluster's experts in its representative's place, on disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.shards import TensorInfo

__all__ = ["Member", "Mixed", "Part", "check_mergeable", "load_shares", "mean_bytes", "merge_rows", "stored_dtype"]

# What can be averaged; quantised weights cannot, since their scales differ.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Member = tuple[int, float]


@dataclass(frozen=True)
class Part:
    """A byte range of one tensor of a file, and its weight in the mean."""

    path: Path
    name: str
    offset: int
    share: float


@dataclass(frozen=True)
class Mixed:
    """One stretch of an output tensor: the weighted sum of equally long byte ranges, `nbytes` each."""

    nbytes: int
    parts: tuple[Part, ...]


def load_shares(
    owner_LE: Int[np.ndarray, "L E"], load_LE: Int[np.ndarray, "L E"], alone_LE: np.ndarray, never_LE: np.ndarray
) -> Float[np.ndarray, "L E"]:
    """Return each expert's share in the mean of its cluster: its share of the cluster's load.

    Args:
        owner_LE: the expert that represents each expert.
        load_LE: tokens routed to each expert.
        alone_LE: representatives that stay as they are (bool).
        never_LE: experts that are dropped in any case, which no mean takes in (bool).
    """
    experts = np.arange(owner_LE.shape[1])
    share_LE = np.zeros(owner_LE.shape)
    for row, owner_E in enumerate(owner_LE):
        load_E = np.where(never_LE[row] | (alone_LE[row, owner_E] & (owner_E != experts)), 0, load_LE[row])
        total_E = np.bincount(owner_E, load_E, len(owner_E))[owner_E]
        # A cluster that no token used keeps its representative as it is.
        share_LE[row] = np.where(total_E > 0, load_E / np.maximum(total_E, 1), owner_E == experts)
    return share_LE


def check_mergeable(checkpoint: Checkpoint) -> None:
    """Raise ProxyError if the experts' weights cannot be averaged: quantised, or of several dtypes."""
    expert = {n: checkpoint.tensors[n] for n, p in checkpoint.places.items() if p.kind in ("stacked", "each")}
    for name, info in expert.items():
        if info.dtype not in FLOATS:
            raise ProxyError(
                f"experts cannot be merged: tensor '{name}' is quantised or of integers ({info.dtype})",
                expected=f"expert weights in {', '.join(FLOATS)}",
                remedy="choose experts with method='cluster', or merge the checkpoint before it is quantised",
                where=checkpoint.path / info.file,
            )
    found = sorted({info.dtype for info in expert.values()})
    if len(found) > 1:
        raise ProxyError(
            f"experts cannot be merged: their weights have several dtypes ({', '.join(found)})",
            expected="one dtype for all expert weights",
            remedy="choose experts with method='cluster', or convert the checkpoint first",
            where=checkpoint.path,
        )


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Dtype of the experts' weights on disk; the checkpoint must be mergeable."""
    experts = (name for name, place in checkpoint.places.items() if place.kind in ("stacked", "each"))
    return FLOATS[checkpoint.tensors[next(experts)].dtype]


def same_form(member: TensorInfo, info: TensorInfo, name: str) -> None:
    """Raise ProxyError if a member's tensor has another shape than its representative's."""
    if member.shape != info.shape:
        raise ProxyError(
            f"experts cannot be merged: '{name}' is {list(member.shape)}, its representative {list(info.shape)}",
            expected="experts of one shape in a layer",
            remedy="choose experts with method='cluster'",
            where=member.file,
        )


def mean_bytes(mixed: Mixed, dtype: str, chunk: int, read: Callable[[Part, int, int], bytes]) -> Iterator[bytes]:
    """Yield the weighted sum of a stretch's parts, rounded once to `dtype`, in pieces of at most `chunk` bytes.

    Args:
        mixed: the byte ranges and their weights.
        dtype: safetensors name of the stored dtype.
        chunk: bytes, a multiple of 8.
        read: returns (of a part, from a position in it, so many) bytes.
    """
    stored = FLOATS[dtype]
    for start in range(0, mixed.nbytes, chunk):
        size = min(chunk, mixed.nbytes - start)
        # bytearray: torch warns of memory that it must not write to.
        pieces = (torch.frombuffer(bytearray(read(part, start, size)), dtype=stored) for part in mixed.parts)
        mean = _weighted(pieces, [part.share for part in mixed.parts], stored)
        yield mean.view(torch.uint8).numpy().tobytes()


def merge_rows(
    value: torch.Tensor,
    axis: int,
    members: Sequence[Sequence[Member]],
    n_experts: int,
    tail: int,
    stored: torch.dtype | None,
) -> torch.Tensor:
    """Return a tensor with an expert axis whose slots hold the weighted means of their members, and its tail.

    Args:
        value: the tensor with all experts.
        axis: its expert axis.
        members: (old expert, share) of every slot.
        n_experts: experts on the axis, equally many rows each.
        tail: rows after them, which stay.
        stored: dtype that the means are rounded to first, as when they are written to disk.
    """
    rows = (value.shape[axis] - tail) // n_experts
    slots = []
    for group in members:
        pieces = (value.narrow(axis, expert * rows, rows) for expert, _ in group)
        slots.append(_weighted(pieces, [share for _, share in group], stored or value.dtype).to(value.dtype))
    if tail:
        slots.append(value.narrow(axis, value.shape[axis] - tail, tail))
    return torch.cat(slots, dim=axis)


def _weighted(pieces: Iterable[torch.Tensor], shares: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Weighted sum in float32 (float64 stays), one piece at a time, rounded to `dtype` at the end."""
    total = None
    for piece, share in zip(pieces, shares, strict=True):
        # Multiplied and added in two steps: the same bits whatever the size of the pieces.
        term = piece.to(torch.promote_types(piece.dtype, torch.float32)) * share
        total = term if total is None else total + term
    if total is None:  # cannot happen: every slot has a member
        raise ProxyError("a merged expert has no member", remedy="choose experts again")
    return total.to(dtype)
