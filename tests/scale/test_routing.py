"""Routing: known counts, nothing lost, traces turned into loads that have the logged numbers, the hot rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.errors import ScaleError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.scale import Layout, Routing, fullest_by_sum
from moeproxy.scale.hottest import AGAIN, BESIDE, certain, rank_loads, rank_rows
from moeproxy.scale.rounding import integers
from moeproxy.scale.routing_trace import loads
from moeproxy.traces.trace import RunInfo, Trace, load_dir

DATA = Path(__file__).resolve().parents[2] / "data"
RUNS, MODELS = DATA / "runs", DATA / "models"


def test_balanced_sends_everybody_the_same() -> None:
    routing = Routing.balanced(8)
    assert routing.counts(0, 0, Layout(8, 4, 6), pairs=128, top_k=2) == ([32] * 4, [32] * 4)
    assert routing.counts(3, 1, Layout(8, 4, 6), pairs=130, top_k=2) == ([33, 33, 32, 32], [32] * 4)


def test_skew_reaches_the_rank_it_names() -> None:
    routing = Routing.skewed(8, 2.0, ep=4, ep_rank=1)
    sent, received = routing.counts(0, 0, Layout(4, 4, 1), pairs=120, top_k=2)
    assert sent == [20, 60, 20, 20]
    assert received == [60] * 4, "every peer sends twice the even share of 30"
    assert rank_loads(routing, 4, 1).max() == pytest.approx(2.0)
    assert routing.rank_shares(4).tolist() == [pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6])]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 10_000))
def test_rounding_loses_no_row(weights: list[float], total: int) -> None:
    shares = np.array(weights) + 1e-3
    exact = shares / shares.sum() * total
    rounded = integers(exact, total)
    assert sum(rounded) == total
    assert np.abs(np.array(rounded) - exact).max() < 1 + 1e-6


@given(st.integers(4, 64), st.floats(0, 1.5), st.floats(0.5, 0.99))
def test_loads_have_the_logged_numbers_where_they_fit_together(n_experts: int, violation: float, steep: float) -> None:
    # Numbers of real loads always fit together, so start from some.
    first = (1 + violation) / n_experts
    rest = steep ** np.arange(n_experts - 1)
    rest = rest / rest.sum() * (1 - first)
    if rest[0] > first:
        return
    share_E = np.concatenate([[first], rest])
    entropy = float(-(share_E * np.log(share_E)).sum() / np.log(n_experts))
    found = loads(n_experts, violation, entropy)
    assert found.sum() == pytest.approx(1)
    assert found[0] * n_experts - 1 == pytest.approx(violation)
    assert found.max() == pytest.approx(found[0])
    used = found[found > 0]
    assert -(used * np.log(used)).sum() / np.log(n_experts) == pytest.approx(entropy, abs=1e-6)


def test_even_loads_come_back_even() -> None:
    assert loads(8, 0.0, 1.0).tolist() == pytest.approx([1 / 8] * 8)


def test_a_recorded_run_gives_its_own_largest_load() -> None:
    trace = next(t for t in load_dir(RUNS) if t.provenance.model == "original" and t.provenance.healthy)
    layers = [name for name in trace.signals if name.startswith("router_max_violation/")]
    routing = Routing.from_trace(trace, step=5)
    row = [trace.values(name)[list(trace.steps.index).index(5)] for name in sorted(layers)]
    assert (routing.share_LE.max(axis=1) * 32 - 1).tolist() == pytest.approx(row)
    worst = Routing.from_trace(trace)
    assert worst.share_LE.max() * 32 - 1 == pytest.approx(max(trace.values(name).max() for name in layers))
    assert "original" in worst.source


def trace_of(**signals: list[float]) -> Trace:
    columns = {name.replace("__", "/"): values for name, values in signals.items()}
    return Trace(pd.DataFrame(columns), None, RunInfo("original", "original", 8, 0))


def test_a_trace_without_router_signals_is_refused() -> None:
    with pytest.raises(ScaleError, match="says nothing about its routers"):
        Routing.from_trace(trace_of(reward_mean=[0.1]))
    logged = trace_of(router_max_violation__0=[0.5, np.nan], router_load_entropy__0=[0.9, np.nan])
    with pytest.raises(ScaleError, match="step 1 has no router loads"):
        Routing.from_trace(logged, step=1)
    assert Routing.from_trace(logged).share_LE.max() == pytest.approx(1.5 / 8)


def test_a_profile_gives_its_loads() -> None:
    checkpoint = Checkpoint.open(MODELS / "qwen3-moe-tiny")
    measured = profile(checkpoint, ["12+7=", "3+4="], keep_choices=False)
    routing = Routing.from_profile(measured)
    assert routing.share_LE.shape == (4, 32)
    assert routing.share_LE * measured.n_tokens * measured.top_k == pytest.approx(measured.load_LE)


def test_the_hot_rank_is_that_of_the_sum_or_of_the_worst_layer() -> None:
    # Rank 1 has most over all layers (and again the last layer's), rank 0 the busiest single layer.
    share_LE = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.45, 0.2, 0.25], [0.1, 0.45, 0.2, 0.25]])
    routing = Routing("made up", share_LE)
    layout = Layout(8, 4, 6)
    assert fullest_by_sum(routing, layout, n_layers=3) == 1
    assert fullest_by_sum(routing, layout, n_layers=3, checkpointing=True) == 0
    assert fullest_by_sum(Routing.balanced(8), layout, n_layers=2) == 0, "the first group has the largest shards"
    last = [0.7 + 0.1 * AGAIN, 1.2 + 0.45 * AGAIN, 0.6 + 0.2 * AGAIN, 0.5 + 0.25 * AGAIN]
    assert rank_loads(routing, 4, 3).tolist() == pytest.approx([4 * one / (3 + AGAIN) for one in last])
    # A layer without any row: the peak is in the backward pass of the one before.
    early = Routing("early", np.array([[0.9, *[0.1 / 7] * 7], [0.0, *[1 / 7] * 7]]))
    first = 8 * 0.9 * (1 + AGAIN) - BESIDE
    assert first > 8 * 0.9, "more than what it still holds in the last layer"
    assert rank_loads(early, 8, 2)[0] == pytest.approx(first / (2 + AGAIN))
    assert rank_loads(early, 8, 2)[1] == pytest.approx(8 * (0.1 / 7 + (1 + AGAIN) / 7) / (2 + AGAIN))
    assert rank_loads(Routing.skewed(8, 3, ep=4), 4, 5).max() == pytest.approx(3.0), "all layers alike: a layer's load"
    assert rank_loads(routing, 4, 3, checkpointing=True).tolist() == pytest.approx([2.0, 1.8, 0.8, 1.0])
    exact = Routing.recorded(8, [[([1], [1])]])
    with pytest.raises(ScaleError, match="belong to one rank"):
        fullest_by_sum(exact, layout, n_layers=1)


def test_a_rank_that_gets_most_in_every_layer_is_certain() -> None:
    assert certain(np.array([[3, 5, 5], [1, 2, 2]])) == 1
    assert certain(np.array([[3, 5, 4], [1, 2, 3]])) is None
    assert certain(np.array([[2, 2], [2, 2]])) == 0
    share_LE = np.array([[0.5, 0.1, 0.2, 0.2], [0.25, 0.25, 0.0, 0.5]])
    rows_LR = rank_rows(Routing("made up", share_LE), 2, 3, pairs=101, top_k=1)
    assert rows_LR.tolist() == [[61, 40], [51, 50], [61, 40]], "the layers' shares in turn, no row lost"
    with pytest.raises(ScaleError, match="at most each token once"):
        rank_rows(Routing("made up", share_LE), 2, 3, pairs=101, top_k=3)


def test_stretching_keeps_the_unevenness_of_ranks() -> None:
    routing = Routing("made up", np.array([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]))
    assert routing.stretched(4) is routing
    assert routing.stretched(8).share_LE[0].tolist() == pytest.approx([0.2, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05, 0.05])
    assert routing.stretched(2).share_LE.tolist() == [pytest.approx([0.7, 0.3]), pytest.approx([0.5, 0.5])]
    # 6 experts of 2/3 of an old one each.
    sixths = [0.4 * 2 / 3, 0.4 / 3 + 0.1, 0.2, 0.4 / 3, 0.2 / 3 + 0.1 / 3, 0.1 * 2 / 3]
    assert routing.stretched(6).share_LE[0].tolist() == pytest.approx(sixths)
    hottest = [rank_loads(one, 4, 2, checkpointing=True).max() for one in (routing, routing.stretched(48))]
    assert hottest == [pytest.approx(1.6)] * 2
    with pytest.raises(ScaleError, match="its own model"):
        Routing.recorded(8, [[([1], [1])]]).stretched(16)


def test_exact_counts_are_used_as_they_are_and_survive_storage() -> None:
    routing = Routing.recorded(8, [[([1, 2], [3, 4]), ([5, 6], [7, 8])], [([9, 1], [2, 3])]])
    again = Routing.from_dict(routing.to_dict())
    for one in (routing, again):
        assert one.counts(0, 3, Layout(2, 2, 0), 10, 2) == ([5, 6], [7, 8])
        assert one.counts(1, 7, Layout(2, 2, 0), 10, 2) == ([9, 1], [2, 3])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Routing.skewed(8, 5.0, ep=4), "0 to 4"),
        (lambda: Routing.skewed(8, 1.0, ep=3), "over 3 ranks.*one of 1, 2, 4, 8"),
        (lambda: Routing.skewed(8, 1.0, ep=0), "over 0 ranks.*one of 1, 2, 4, 8"),
        (lambda: Routing.skewed(8, 1.0, ep=4, ep_rank=4), "0 to 3"),
        (lambda: Routing.skewed(8, 2.0, ep=1), "ep of at least 2"),
        (lambda: Routing("none", np.zeros((0, 8))), "(layers, experts)"),
        (lambda: Routing("odd", np.array([[0.5, 0.4]])), "sum to 0.9"),
        (lambda: Routing("odd", np.array([[1.5, -0.5]])), "shares of at least 0"),
        (lambda: Routing.skewed(8, 4.0, ep=4).rank_shares(4, top_k=4), "at most each token once"),
        (lambda: Routing.balanced(8).rank_shares(3), "over 3 ranks.*one of 1, 2, 4, 8"),
    ],
)
def test_impossible_routing_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ScaleError, match=words):
        make()
