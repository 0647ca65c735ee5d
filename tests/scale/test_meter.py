"""Meter: known bytes of a hand-made step; the allocator's events beside it."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moeproxy.scale.allocator import allocator_peak, held
from moeproxy.scale.collectives import Collective
from moeproxy.scale.emulation import scratch, whole
from moeproxy.scale.meter import Course, Meter
from moeproxy.scale.summary import summarised


class Wide(nn.Module):
    """Makes a tensor of 1000 float32, then one of 500, while the first is alive."""

    def forward(self, _inputs: torch.Tensor) -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return second


def hand_made(fake: bool) -> tuple[Course, list[torch.Tensor]]:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad():
        model, inputs = Wide(), torch.empty(10)
        meter = Meter([], inputs=[inputs])
        with meter:
            meter.mark("forward")
            out = model(inputs)
            meter.mark("optimizer")
            state = torch.empty(100)
    return meter.course, [inputs, out, state]  # what lives on, or the course would end with nothing


def test_known_bytes() -> None:
    for fake in (False, True):
        course, alive = hand_made(fake)
        assert course.peak == 4 * (10 + 1000 + 500)
        found = summarised(course)
        assert (found["peak_phase"], found["peak_module"]) == ("forward", "Wide")
        assert found["peak"]["activations"] == course.peak
        assert found["phases"] == ("before", "forward", "optimizer")
        last = found["timeline_PC"][-1]
        assert last.sum() == 4 * (10 + 500 + 100) == sum(4 * tensor.numel() for tensor in alive)
        assert last[3] == 4 * 100, "what the optimizer's phase makes is the optimizer's"
        assert {(h.module, h.nbytes, h.tensors) for h in found["holders"]} == {("Wide", 6000, 2), ("", 40, 1)}


def test_the_allocator_sees_the_same_and_temporaries_too() -> None:
    def step() -> torch.Tensor:
        first = torch.empty(100_000)
        second = torch.empty(50_000)
        del first
        return second

    step()
    assert allocator_peak(step) == 4 * 150_000


def test_a_backends_copy_counts_while_its_collective_runs() -> None:
    copied = Collective("all_gather", 4, 100, "forward", live=250)
    alone = Collective("reduce_scatter", 1, 900, "backward", live=250)  # one rank copies nothing
    moved = Collective("all_to_all", 4, 900, "forward", live=300)
    assert scratch([copied, alone, moved]) == {"gloo": 100, "nccl": None}
    assert whole([copied, alone, moved], 320) == {"gloo": 350, "nccl": None}
    assert whole([copied, alone, moved], 400) == {"gloo": 400, "nccl": None}
    assert whole([], 7) == {"gloo": 7, "nccl": None}


def test_shared_storage_is_held_once() -> None:
    whole = torch.zeros(100)
    assert held([whole, whole[:10], torch.zeros(5)]) == 4 * 105
