"""Two ways for tokens to reach their experts, registered with transformers beside its own.

`noted` is transformers' all-to-all with a note of how many rows a rank sent and got; `virtual` is the same exchange
with these numbers from a `Routing`, since virtual peers have no routers to ask.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EPImplementationInterface,
    _AllToAllState,
    _WaitTensor,  # pyright: ignore[reportPrivateImportUsage]
    all_to_all_single,  # pyright: ignore[reportPrivateImportUsage]
)

from moeproxy.scale.layout import Layout
from moeproxy.scale.routing import Counts, Routing


class _Numbered(AllToAllEP):
    """An exchange that knows which of the model's MoE layers it serves."""

    made: ClassVar[int] = 0
    num_local_experts: int

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.layer = _Numbered.made
        _Numbered.made += 1


class NotedExchange(_Numbered):
    """transformers' own exchange; `notes[layer]` takes what each call sent and received."""

    notes: ClassVar[dict[int, list[Counts]]] = {}

    def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        made = super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)
        sizes = made[-1]
        self.notes.setdefault(self.layer, []).append((list(sizes.send_sizes), list(sizes.recv_sizes)))
        return made


class VirtualExchange(_Numbered):
    """The same tensors and the same collectives as transformers' own, with the numbers of rows from `routing`."""

    routing: ClassVar[Routing | None] = None
    layout: ClassVar[Layout | None] = None
    calls: ClassVar[dict[int, int]] = {}

    def _counts(self, pairs: int, top_k: int) -> Counts:
        if self.routing is None or self.layout is None:
            raise RuntimeError("a virtual exchange without routing")
        call = self.calls.get(self.layer, 0)
        self.calls[self.layer] = call + 1
        return self.routing.counts(self.layer, call, self.layout, pairs, top_k)

    def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        # Names and order of the tensors are those of AllToAllEP: what is alive at the peak must be the same.
        group, size = self.ep_mesh.get_group(), self.ep_mesh.size()
        top_k, n_tokens, device = top_k_index.size(-1), hidden_states.size(0), hidden_states.device
        expert_ids = top_k_index.reshape(-1)
        order = torch.argsort(expert_ids)
        send_tokens = hidden_states[order // top_k]
        send_counts = torch.zeros(self.num_local_experts * size, dtype=torch.long, device=device)
        send_counts = send_counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        send_counts = send_counts.view(size, self.num_local_experts)
        recv_counts = torch.empty_like(send_counts)
        all_to_all_single(recv_counts, send_counts, group=group)
        send_sizes, recv_sizes = self._counts(n_tokens * top_k, top_k)
        recv_tokens = _WaitTensor.apply(all_to_all_single_autograd(send_tokens, recv_sizes, send_sizes, group))
        recv_expert_ids = self._expert_of_row(sum(recv_sizes), size, device).unsqueeze(-1)
        recv_weights = torch.ones_like(recv_expert_ids, dtype=recv_tokens.dtype)
        return (
            recv_tokens,
            recv_expert_ids,
            recv_weights,
            _AllToAllState(top_k_weights, order, send_sizes, recv_sizes, n_tokens),
        )

    def _expert_of_row(self, rows: int, size: int, device: Any) -> torch.Tensor:
        """Local expert of every received row (rows,), evenly spread: bytes do not depend on it."""
        local = self.num_local_experts
        ids = torch.arange(local, device=device).repeat(size)
        each = torch.full((local * size,), rows // (local * size), dtype=torch.long, device=device)
        each[: rows % (local * size)] += 1
        return ids.repeat_interleave(each, output_size=rows)


def register() -> None:
    """Make both ways known to transformers and forget what an earlier model numbered."""
    _Numbered.made = 0
    NotedExchange.notes.clear()
    VirtualExchange.calls.clear()
    EPImplementationInterface.register("noted", NotedExchange)
    EPImplementationInterface.register("virtual", VirtualExchange)
