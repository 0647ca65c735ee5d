"""The sum for a rank, and the single changes with which it would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeproxy.errors import ScaleError
from moeproxy.experts.published import QWEN3_30B_A3B
from moeproxy.scale import GRPOProgram, Layout, estimate
from moeproxy.scale.estimate import ways_to_fit

PROGRAM = GRPOProgram(QWEN3_30B_A3B, sequences=2, prompt=1024, completion=3072)
GIB = 2**30


def test_categories_add_up_and_padding_is_known() -> None:
    spread, padded = estimate(PROGRAM, 128, 8), estimate(PROGRAM, 1024, 1)
    assert sum(spread.peak.values()) == spread.peak_bytes
    layer = 1024 * 3 * 2048 * 768 * 2  # 128 experts padded to one for each of 1,024 ranks, in bfloat16
    assert padded.peak["gathered"] == pytest.approx(layer, rel=0.02)
    assert padded.peak_bytes > 2 * layer
    assert padded.phase == "backward"
    # One whole expert in each of 48 layers, and a share of the rest, 4 bytes a weight.
    held = 48 * (3 * 2048 * 768 + 2048) + (30_532_122_624 - 48 * 128 * (3 * 2048 * 768 + 2048)) / 1024
    assert padded.peak["parameters"] == pytest.approx(4 * held)


def test_a_hot_rank_holds_more() -> None:
    even, hot = estimate(PROGRAM, 128, 8), estimate(PROGRAM, 128, 8, load=4.0)
    assert hot.peak["activations"] > 2 * even.peak["activations"]
    assert hot.peak["optimizer"] == even.peak["optimizer"]


def test_every_way_to_fit_fits() -> None:
    layout, load, room = Layout(16, 16), 2.0, 70 * GIB
    assert estimate(PROGRAM, 16, 16, load).peak_bytes > room
    ways = ways_to_fit(PROGRAM, layout, load, room)
    assert any(way.startswith("recompute activations") for way in ways)
    assert any("tokens a sequence" in way for way in ways)
    assert all("GiB" in way and float(way.rsplit("(", 1)[1].split()[0]) <= 70 for way in ways)
    assert len({way.lstrip("0123456789,").split("(")[0] for way in ways}) == len(ways), "one of each kind"
    assert ways_to_fit(PROGRAM, layout, load, 0.1 * GIB) == []


def test_the_smallest_change_of_a_kind_is_named() -> None:
    wide = GRPOProgram(QWEN3_30B_A3B, sequences=64, prompt=128, completion=384, checkpointing=True)
    ways = ways_to_fit(wide, Layout(1024, 16), 1.0, 20 * GIB)
    batch = next(way for way in ways if "sequences" in way)
    enough = int(batch.split()[0])
    assert estimate(replace(wide, sequences=enough), 1024, 16).peak_bytes <= 20 * GIB
    assert estimate(replace(wide, sequences=2 * enough), 1024, 16).peak_bytes > 20 * GIB
    # Padded experts: fewer ranks help.
    padded = GRPOProgram(QWEN3_30B_A3B, prompt=128, completion=384, checkpointing=True)
    room = 0.5 * estimate(padded, 1024).peak_bytes
    assert any(way.startswith("256 ranks (") for way in ways_to_fit(padded, Layout(1024, 1), 1.0, room))


def test_impossible_worlds_are_refused() -> None:
    with pytest.raises(ScaleError, match="load of 100 x the mean over 16 ranks"):
        estimate(GRPOProgram(QWEN3_30B_A3B), 64, 16, load=100.0)
    with pytest.raises(ScaleError, match="does not divide"):
        estimate(PROGRAM, 1024, 12)
