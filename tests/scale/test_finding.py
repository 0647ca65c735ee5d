"""The fullest rank is found: bounds are the peaks to the byte, and the one found has the largest of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import moeproxy.scale.finding as finding
from moeproxy.errors import ScaleError
from moeproxy.scale import GRPOProgram, Layout, Routing, emulate, find_hottest, fullest_by_sum, rank_peaks
from moeproxy.scale.hottest import peaks_of
from tests.scale.conftest import TINY
from tests.scale.made import made_emulation

DEEP = {**TINY, "num_hidden_layers": 4, "moe_intermediate_size": 128, "vocab_size": 64}
PROGRAM = GRPOProgram(DEEP, sequences=4, prompt=127, completion=1)
LAST = [[0.32, 0.165, 0.2575, 0.2575]] * 3 + [[0.04, 0.50, 0.23, 0.23]]
"""Rank 0 gets most over all layers, but rank 1 in the last one, whose rows are there twice at the peak."""


def drawn(seed: int) -> Routing:
    """Shares of 8 experts in 4 layers that differ much; none above half, with 2 experts a token."""
    share_LE = np.random.default_rng(seed).dirichlet(np.ones(8), size=4).clip(max=0.4)
    return Routing("drawn", share_LE + (1 - share_LE.sum(axis=1, keepdims=True)) / 8)


def skewed_in_the_last() -> Routing:
    return Routing("made up", np.repeat(np.array(LAST) / 2, 2, axis=1))


def check(program: GRPOProgram, routing: Routing, patch: pytest.MonkeyPatch, ranks: int = 4) -> None:
    """Emulate all ranks; the bounds must be their peaks, and the one found the fullest."""
    made = [emulate(program, ranks, ranks, rank, routing) for rank in range(ranks)]
    peaks = [one.peak_bytes for one in made]
    bounds = rank_peaks(program, ranks, ranks, routing)
    assert bounds.tolist() == peaks
    assert len(set(peaks)) > 1
    patch.setattr(finding, "emulate", lambda _program, _world, _ep, rank, *_, **__: made[rank])  # known already
    patch.setattr(finding, "call", lambda *_, **__: [bounds])
    assert find_hottest(program, ranks, ranks, routing).rank == int(np.argmax(peaks))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bounds_are_the_peaks_and_the_largest_is_found(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers on two ranks: each is the busier one in one of them."""
    program = replace(PROGRAM.sliced(2), checkpointing=checkpointing)
    routing = Routing("made up", np.repeat([[0.15, 0.10], [0.09, 0.16]], 4, axis=1))
    check(program, routing, monkeypatch, ranks=2)


@pytest.mark.slow
def test_the_fullest_is_found_where_the_last_layer_is_skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    check(PROGRAM, skewed_in_the_last(), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_fullest_of_drawn_routings_is_found(
    seed: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(replace(PROGRAM, checkpointing=checkpointing), drawn(seed), monkeypatch)


def test_later_groups_are_not_fuller() -> None:
    """4 experts lie on 8 ranks: those of the last group hold none."""
    routing = Routing("drawn", drawn(3).share_LE[:2])
    program = GRPOProgram(TINY, sequences=4, prompt=128, completion=128)
    found = find_hottest(program, 16, 2, routing)
    assert found.rank < 2
    assert found.peak_bytes > emulate(program, 16, 2, 14 + found.rank, routing).peak_bytes


class Emulator:
    """Stands for `emulate` and for the bounds: peaks by rank; notes who was emulated."""

    def __init__(self, peaks: list[int], bounds: list[int], full_shards: bool = False) -> None:
        self.peaks, self.bounds, self.full_shards = peaks, bounds, full_shards
        self.asked: list[int] = []

    def emulate(self, _program: Any, _world: int, _ep: int, rank: int, _routing: Any, **_: Any) -> Any:
        self.asked.append(rank)
        return made_emulation(rank=rank, peak_bytes=self.peaks[rank], full_shards=self.full_shards)

    def call(self, task: str, _requests: Any, **_: Any) -> list[np.ndarray]:
        assert task == "peaks"
        return [np.array(self.bounds)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Emulator]:
    def made(peaks: list[int], bounds: list[int], full_shards: bool = False) -> Emulator:
        emulator = Emulator(peaks, bounds, full_shards)
        monkeypatch.setattr(finding, "emulate", emulator.emulate)
        monkeypatch.setattr(finding, "call", emulator.call)
        return emulator

    return made


UNKNOWN = [2**63 - 1] * 4


@pytest.mark.parametrize(
    ("peaks", "bounds", "asked"),
    [
        ([5, 9, 7, 8], [5, 9, 7, 8], [1]),
        ([5, 8, 9, 3], [5, 10, 9, 3], [1, 2]),
        ([5, 8, 8, 3], [5, 9, 9, 3], [1, 2]),
        ([5, 8, 9, 3], UNKNOWN, [0, 1, 2, 3]),
    ],
    ids=["exact", "smaller shards", "a tie", "no bounds"],
)
def test_ranks_are_emulated_until_no_bound_is_larger(
    stand_in: Callable[..., Emulator], peaks: list[int], bounds: list[int], asked: list[int]
) -> None:
    emulator = stand_in(peaks, bounds)
    assert find_hottest(PROGRAM, 4, 4, drawn(0)).rank == int(np.argmax(peaks))
    assert emulator.asked == asked


def test_equal_ranks_are_emulated_once_and_a_certain_one_needs_no_bounds(stand_in: Callable[..., Emulator]) -> None:
    share_LE = np.array([[0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.15, 0.15, 0.15, 0.15, 0.1, 0.1]])
    emulator = stand_in([5, 9, 9, 3], UNKNOWN)
    find_hottest(PROGRAM, 4, 4, Routing("made up", share_LE))
    assert emulator.asked == [0, 1, 3], "ranks 1 and 2 get the same"
    emulator = stand_in([5, 9, 9, 3], [], full_shards=True)
    assert find_hottest(PROGRAM, 4, 4, Routing.skewed(8, 2.0, ep=4, ep_rank=3)).rank == 3
    assert emulator.asked == [3]


def test_with_most_rows_but_smaller_shards_a_rank_is_not_certain(stand_in: Callable[..., Emulator]) -> None:
    emulator = stand_in([9, 6, 6, 8], [9, 9, 9, 9])
    assert find_hottest(PROGRAM, 4, 4, Routing.skewed(8, 2.0, ep=4, ep_rank=3)).rank == 0
    assert emulator.asked == [3, 0]


def test_smaller_shards_of_the_last_rank_outweigh_its_rows() -> None:
    """641 rows of 256 values over 16 ranks: 41 for rank 0, 26 for the last one."""
    wide = {"hidden_size": 256, "num_experts": 16, "intermediate_size": 16, "moe_intermediate_size": 8}
    config = {**TINY, **wide, "num_hidden_layers": 1, "vocab_size": 641}
    program = GRPOProgram(config, prompt=8, completion=120, checkpointing=True)
    found = find_hottest(program, 16, 16, Routing.skewed(16, 1.06, ep=16, ep_rank=15))
    last = emulate(program, 16, 16, 15, Routing.skewed(16, 1.06, ep=16, ep_rank=15))
    assert (found.rank, found.full_shards, last.full_shards) == (0, True, False)
    assert found.peak_bytes > last.peak_bytes


def test_bounds_hold_where_a_rank_gets_no_rows() -> None:
    routing = Routing("made up", np.repeat([[0.0, 0.25], [0.225, 0.025]], 4, axis=1))
    program = PROGRAM.sliced(2)
    made = [emulate(program, 2, 2, rank, routing).peak_bytes for rank in range(2)]
    assert rank_peaks(program, 2, 2, routing).tolist() == made


def test_the_sum_alone_may_name_another_rank(stand_in: Callable[..., Emulator]) -> None:
    stand_in([9, 7, 5, 3], [9, 7, 5, 3])
    routing = skewed_in_the_last()
    assert fullest_by_sum(routing, Layout(4, 4), n_layers=4) == 1
    assert find_hottest(PROGRAM, 4, 4, routing).rank == 0


def test_counts_of_one_rank_are_refused() -> None:
    with pytest.raises(ScaleError, match="belong to one rank"):
        find_hottest(PROGRAM, 4, 4, Routing.recorded(8, [[([1], [1])]]))


def test_peaks_by_hand() -> None:
    # A tensor of 10 bytes, then one of 4 bytes for each of layer 0's 3 rows, then one of 2 for each of layer 1's 5.
    usual = np.array([10, 4 * 3, -10, 2 * 5, -4 * 3, -2 * 5])
    one = usual + np.array([0, 4, 0, 2, -4, -2])
    numbered = usual + np.array([0, 4, 0, 2 * 2, -4, -2 * 2])
    more_LR = np.array([[0, -3, 0], [0, 0, 20]])
    found = peaks_of([usual, one, numbered], more_LR)
    assert found is not None
    assert found.tolist() == [22, 10, 62]
    odd = numbered + np.array([0, 1, 0, 0, -1, 0])
    assert peaks_of([usual, one, odd], more_LR) is None, "a size that is of no layer's rows"
