"""Collective: one communication of a rank, as the dispatcher or a recording backend sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")
"""Namespaces of the operations that move data between ranks, or copy to and from what is moved."""

_OPS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """One collective of the rank looked at.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast.
        group: ranks that take part.
        nbytes: bytes of the larger side (what is gathered, or what is reduced).
        phase, module: where in the step.
        live: bytes of all tensors while it runs.
    """

    op: str
    group: int
    nbytes: int
    phase: str
    module: str = ""
    live: int = 0

    @property
    def gloo_copy(self) -> int:
        """Bytes that gloo takes beside tensors: it gathers and reduces in a copy of the whole buffer (torch 2.13)."""
        return self.nbytes if self.op in ("all_gather", "reduce_scatter") and self.group > 1 else 0


def seen(name: str, namespace: str, args: Any, result: Any, phase: str, module: str) -> Collective | None:
    """Return the collective that an operation of the dispatcher is, or None if it is none."""
    import torch
    from torch.utils._pytree import tree_leaves

    if name not in _OPS or namespace == "fsdp":
        return None
    leaves = tree_leaves((args, result))
    sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Collective(_OPS[name], _group_size(leaves), max(sizes, default=0), phase, module)


def _group_size(leaves: list[Any]) -> int:
    import torch
    from torch._C import _distributed_c10d
    from torch.distributed import ProcessGroup

    for leaf in leaves:
        if isinstance(leaf, ProcessGroup):
            return leaf.size()
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return ProcessGroup.unbox(leaf).size()
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    resolve: Any = _distributed_c10d._resolve_process_group
    return resolve(names[-1]).size() if names else 0
