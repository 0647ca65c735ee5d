"""Plan which bytes of a checkpoint's shards become which tensors of a proxy; `shard_writer` then writes them.

Works on bytes: a kept expert's rows are the same bytes in any dtype, quantised ones included. Only merged experts are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.places import Place
from moeproxy.experts.shards import Shard, TensorInfo
from moeproxy.proxy.merge import Member, Mixed, Part, same_form
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.remap import remap_ids


@dataclass(frozen=True)
class Copy:
    """One output tensor: new name and shape, and the byte ranges (offset, length) of its source, in order.

    `change` turns the bytes of a small table into as many others; where it is set, the tensor is read as a whole.
    `mixed` says what the tensor is computed from if experts are merged, stretch after stretch.
    """

    name: str
    source: str
    info: TensorInfo
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    change: Callable[[bytes], bytes] | None = None
    mixed: tuple[Mixed, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the new tensor."""
        return sum(length for _, length in self.ranges)

    @property
    def n_params(self) -> int:
        """Elements of the new tensor."""
        return math.prod(self.shape)


def planned_copies(checkpoint: Checkpoint, plan: KeepPlan, shard: Shard, mtp_from: int | None = None) -> list[Copy]:
    """Return what of `shard` goes into the proxy, in the order of its bytes.

    Args:
        checkpoint: the original.
        plan: experts to keep in the decoder's layers.
        shard: the file to look at.
        mtp_from: decoder layer whose experts multi-token-prediction layers keep; None leaves those layers out.
    """
    items = sorted(shard.tensors.items(), key=lambda item: item[1].offset)
    if mtp_from is None and checkpoint.extra_layers:
        items = [item for item in items if not checkpoint.is_extra(item[0])]
    copies = (_copy(checkpoint, plan, mtp_from, name, info) for name, info in items)
    return [copy for copy in copies if copy is not None]


def _copy(checkpoint: Checkpoint, plan: KeepPlan, mtp_from: int | None, name: str, info: TensorInfo) -> Copy | None:
    place = checkpoint.places.get(name)
    whole = ((info.offset, info.nbytes),)
    if place is None or place.kind == "unknown":
        return Copy(name, name, info, info.shape, whole)
    layer = place.layer if place.layer in plan.keep or mtp_from is None else mtp_from
    keep = plan.keep[layer]
    if place.kind == "ids":
        return Copy(name, name, info, info.shape, whole, _table(name, info, keep, plan.label_of(layer)))
    members = plan.members_of(layer)
    if place.kind == "each":
        new = _new_id(place.expert or 0, keep, checkpoint.n_experts)
        if new is None:
            return None
        mixed = _mixed_each(checkpoint, place, members[new], name, info) if members and new < len(keep) else ()
        return Copy(_renumbered(name, place, new), name, info, info.shape, whole, mixed=mixed)
    return _sliced(checkpoint, place, keep, name, info, members if place.kind == "stacked" else None)


def _new_id(expert: int, keep: tuple[int, ...], n_experts: int) -> int | None:
    """New number of an expert, None if it goes; experts after the routed ones stay after them."""
    if expert >= n_experts:
        return len(keep) + expert - n_experts
    return keep.index(expert) if expert in keep else None


def _renumbered(name: str, place: Place, new: int) -> str:
    start, stop = place.digits
    return f"{name[:start]}{new}{name[stop:]}"


def _mixed_each(
    checkpoint: Checkpoint, place: Place, members: list[Member], name: str, info: TensorInfo
) -> tuple[Mixed, ...]:
    """The tensors, of any shard, that are averaged into the tensor `name` of a representative."""
    parts = []
    for expert, share in members:
        member = _renumbered(name, place, expert)
        found = checkpoint.tensors[member]
        same_form(found, info, member)
        parts.append(Part(checkpoint.path / found.file, member, found.offset, share))
    return (Mixed(info.nbytes, tuple(parts)),)


_TABLE_DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1"}


def _table(name: str, info: TensorInfo, keep: tuple[int, ...], label_E: np.ndarray) -> Callable[[bytes], bytes]:
    """A function that renumbers the bytes of a table of expert ids."""
    dtype = _TABLE_DTYPES.get(info.dtype)
    if dtype is None:
        raise _no_ids(name, info, f"of dtype {info.dtype}")

    def change(data: bytes) -> bytes:
        ids_VK = np.frombuffer(data, dtype=dtype).reshape(-1, info.shape[-1])
        if ids_VK.size and not 0 <= int(ids_VK.min()) <= int(ids_VK.max()) < len(label_E):
            raise _no_ids(name, info, f"with values from {ids_VK.min()} to {ids_VK.max()}")
        return remap_ids(ids_VK, keep, label_E).tobytes()

    return change


def _no_ids(name: str, info: TensorInfo, what: str) -> ProxyError:
    return ProxyError(
        f"'{name}' {list(info.shape)} is no table of expert ids: it is {what}",
        expected="integers below the number of experts",
        remedy="check that weights and config.json belong together",
        where=info.file,
    )


def _sliced(
    checkpoint: Checkpoint,
    place: Place,
    keep: tuple[int, ...],
    name: str,
    info: TensorInfo,
    members: list[list[Member]] | None,
) -> Copy:
    """Keep the rows of kept experts (or their means), and the tail, along the tensor's expert axis."""
    axis = place.rule.axis if place.rule else 0
    tail = checkpoint.tail(place.rule) if place.rule else 0
    per_expert = (info.shape[axis] - tail) // checkpoint.n_experts
    stretches = [([(expert * per_expert, 1.0)], per_expert) for expert in keep]
    if members:
        stretches = [([(e * per_expert, share) for e, share in group], per_expert) for group in members]
    if tail:
        stretches.append(([(checkpoint.n_experts * per_expert, 1.0)], tail))
    mixed = _mixed_rows(checkpoint.path / info.file, name, info, axis, stretches)
    shape = (*info.shape[:axis], len(keep) * per_expert + tail, *info.shape[axis + 1 :])
    ranges = [(stretch.parts[0].offset, stretch.nbytes) for stretch in mixed]
    return Copy(name, name, info, shape, tuple(_joined(ranges)), mixed=tuple(mixed) if members else ())


def _mixed_rows(
    path: Path, name: str, info: TensorInfo, axis: int, stretches: list[tuple[list[tuple[int, float]], int]]
) -> list[Mixed]:
    """Stretches of an output tensor from ([(first row, share)], rows) along its expert axis."""
    row_bytes = info.nbytes // math.prod(info.shape[: axis + 1])
    slab_bytes = row_bytes * info.shape[axis]
    starts = [info.offset + slab * slab_bytes for slab in range(math.prod(info.shape[:axis]))]
    return [
        Mixed(count * row_bytes, tuple(Part(path, name, start + row * row_bytes, share) for row, share in group))
        for start in starts
        for group, count in stretches
    ]


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge byte ranges that touch, so that neighbours are read at once."""
    start, length = ranges[0]
    for offset, size in ranges[1:]:
        if offset == start + length:
            length += size
            continue
        yield start, length
        start, length = offset, size
    yield start, length
