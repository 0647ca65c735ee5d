"""A world of which only one rank exists: torch's `fake` process group, with or without real tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import transformers.masking_utils
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeproxy.scale.layout import Layout

_MESH_METHODS = ("__getitem__", "__init__", "_flatten", "_unflatten", "get_coordinate")


def join_virtual(layout: Layout, backend: str = "fake") -> None:
    """Make this process one rank of a world whose other ranks answer nothing and cost nothing.

    Args:
        layout: world and rank.
        backend: torch's own, or for real tensors `backends.VIRTUAL`.
    """
    dist.init_process_group(backend, rank=layout.rank, world_size=layout.world, store=FakeStore())
    _fsdp_param._chunk_with_empty = _Chunks  # pyright: ignore[reportPrivateImportUsage]
    device_mesh.new_group = _own_groups(layout.rank)  # pyright: ignore[reportPrivateImportUsage]


def _own_groups(rank: int) -> Any:
    """Return torch's `new_group` for one rank: groups of others are not made.

    A mesh asks every rank to help to make every group, since real ones are made together. In a world of 2^20 ranks that
    is five million groups and most of a minute, and nobody is there who waits.
    """

    def new_group(ranks: Any = None, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return dist.new_group(ranks, **options)

    return new_group


class _Chunks:
    """The pieces of a tensor for all ranks, each made when it is asked for.

    FSDP2 cuts every weight into as many views as there are ranks and looks at two of them, which takes minutes in a
    world of thousands. Views are no memory, so nothing else changes.
    """

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._each = -(-tensor.size(dim) // number)

    def __getitem__(self, rank: int) -> torch.Tensor:
        start, whole = rank * self._each, self._tensor.size(self._dim)
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, whole - start))


def unpacked_only() -> None:
    """Skip transformers' search for packed sequences.

    It looks at values, which fake tensors have not; then transformers assumes packing and takes another attention
    path. The program's batches are never packed, so the answer is None. Real runs skip it too, to be alike.
    """
    transformers.masking_utils.find_packed_sequence_indices = lambda *_args, **_kw: None


@contextmanager
def tensors(fake: bool) -> Iterator[None]:
    """Within it tensors have no memory and no values, if `fake`; device meshes stay real."""
    if fake:
        _keep_meshes_real()
    with FakeTensorMode() if fake else nullcontext():
        yield


def _keep_meshes_real() -> None:
    """DeviceMesh calculates with small tensors and reads their values: step out of the fake mode for that.

    The change stays for the rest of the process, which does nothing else.
    """
    for name in _MESH_METHODS:
        if method := getattr(DeviceMesh, name, None):
            setattr(DeviceMesh, name, _outside(method))
    DeviceMesh._concatenate = staticmethod(_outside(DeviceMesh._concatenate))


def _outside(function: Any) -> Any:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside
