"""A meter of its own: the peak of torch's CPU allocator over real steps, from the profiler's memory events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def allocator_peak(step: Callable[[], Any]) -> int:
    """Return the most bytes that `step` held beyond what was allocated before it.

    Counts everything the allocator hands out in this process, kernels' own temporaries and gloo's buffers included.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step()
    results: Any = recorded.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def held(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of these tensors' storages, each counted once."""
    from torch.distributed._tools.common_utils import get_untyped_storages

    storages = {s._cdata: s.nbytes() for tensor in tensors for s in get_untyped_storages(tensor)}
    return sum(storages.values())
