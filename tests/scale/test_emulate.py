"""emulate: failures that only scale shows, the hot rank, real configurations, cancelling, errors."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import MoeproxyError, ScaleError
from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.scale import Emulation, GRPOProgram, Routing, emulate, estimate, record, run_real
from moeproxy.scale.emulation import CATEGORIES
from moeproxy.scale.processes import Cancelled
from tests.scale.conftest import TINY

MODELS = Path(__file__).resolve().parents[2] / "data" / "models"
LONG = GRPOProgram(TINY, sequences=4, prompt=128, completion=128)


@pytest.fixture(scope="module")
def balanced(program: GRPOProgram) -> Emulation:
    return emulate(program, 4, 2)


def test_the_result_adds_up(balanced: Emulation) -> None:
    assert sum(balanced.peak.values()) == balanced.peak_bytes
    assert int(balanced.timeline_PC.sum(axis=1).max()) == balanced.peak_bytes
    assert balanced.phases[1:] == ("old log-probs", "forward", "loss", "backward", "optimizer")
    assert (np.diff(balanced.phase_P) >= 0).all()
    assert sum(holder.nbytes for holder in balanced.holders) <= balanced.peak_bytes
    assert {holder.category for holder in balanced.holders} <= set(CATEGORIES)
    # Counted by hand: 27 float32 tensors, each cut for 4 ranks (the experts' for 2 expert-parallel times 2 others).
    experts = 2 * 8 * (2 * 32 * 64 + 64 * 32)
    dense = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 2 * 16 + 2 * 64 + 8 * 64) + 2 * 512 * 64 + 64
    buffers = 2 * 8 * 4  # the rotary embedding's frequencies, and their original values
    assert balanced.peak["parameters"] == (experts + dense) // 4 * 4 + buffers
    # Operations of the forward pass: projections, router, experts' rows, attention; then the head of 33 tokens each.
    tokens, rows = 128, 256
    layer = tokens * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 8) + rows * (64 * 64 + 32 * 64) + 2 * 8 * 64 * 64 * 16
    assert balanced.flops["forward"] == balanced.flops["old log-probs"] == 2 * (2 * layer + 2 * 33 * 64 * 512)
    attention = 2 * 2 * 2 * 8 * 64 * 64 * 16
    assert balanced.flops["backward"] == 2 * balanced.flops["forward"] + attention // 2, "scores are computed again"
    moments = 2 * (experts + dense)
    assert balanced.peak["optimizer"] == pytest.approx(moments, abs=4 * 27), "two moments and a step count each"


def test_a_result_survives_storage(balanced: Emulation, tmp_path: Path) -> None:
    again = Emulation.load(balanced.save(tmp_path / "result.json"))
    assert repr(again) == repr(balanced)
    assert again._repr_html_() == balanced._repr_html_()
    assert (again.timeline_PC == balanced.timeline_PC).all()
    assert (again.peak, again.traffic, again.holders) == (balanced.peak, balanced.traffic, balanced.holders)
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(ScaleError, match="emulate again"):
        Emulation.load(tmp_path / "cut.json")


def test_more_ranks_than_experts_pad_every_expert() -> None:
    """FSDP2 cuts expert weights by expert: 8 experts on 64 ranks are padded to 64, and whole weights grow with it."""
    few, many = (emulate(replace(LONG, sequences=1), world) for world in (8, 64))

    def gathered(result: Emulation) -> int:
        return max(item.nbytes for item in result.traffic if item.op == "all_gather")

    def padded(world: int) -> int:
        """Bytes of a layer's gathered buffer: every tensor's first axis padded to the world's size, in bfloat16."""
        shapes = [(8, 64, 64), (8, 64, 32), (8, 64), (64, 64), (32, 64), (32, 64), (64, 64), (16,), (16,), (64,), (64,)]
        return sum(math.ceil(s[0] / world) * world * math.prod(s[1:]) * 2 for s in shapes)

    assert gathered(few) == padded(8)
    assert gathered(many) == padded(64) > 5 * padded(8)
    assert many.peak["gathered"] + many.peak["communication"] > 4 * few.peak["gathered"]
    assert many.peak_bytes > few.peak_bytes, "more ranks, yet more memory on each"


@pytest.mark.parametrize("family", ["qwen3-moe-tiny", "deepseek-v3-tiny"])
def test_the_shipped_models_with_tied_weights(family: str) -> None:
    config = json.loads((MODELS / family / "config.json").read_text())
    assert config["tie_word_embeddings"]
    tied, apart = (
        emulate(GRPOProgram({**config, "tie_word_embeddings": one}, prompt=8, completion=8), 4, 2)
        for one in (True, False)
    )
    head = config["vocab_size"] * config["hidden_size"]
    assert apart.peak["parameters"] - tied.peak["parameters"] == head, "4 bytes a weight over 4 ranks"
    assert tied.flops == apart.flops


@pytest.mark.parametrize(("factor", "rank"), [(4.0, 1), (4.0, 0), (0.0, 0)])
def test_a_rank_without_rows_executes_as_it_pretends(factor: float, rank: int) -> None:
    program, routing = GRPOProgram(TINY, prompt=8, completion=8), Routing.skewed(8, factor, ep=4)
    fake, executed = (emulate(program, 4, 4, rank, routing, level, repeats=1) for level in ("fake", "exec"))
    assert (fake.timeline_PC == executed.timeline_PC).all()
    assert fake.traffic == executed.traffic
    assert len(executed.seconds) == 1


def test_recomputing_in_micro_batches_is_metered_as_the_allocator_sees_it(program: GRPOProgram) -> None:
    again = replace(program, checkpointing=True, micro_batches=4)
    executed = emulate(again, 4, 2, level="exec", repeats=1)
    assert executed.peak_phase == "backward", "where recomputed activations live"
    assert executed.allocator_bytes == (executed.peak_bytes,)


def test_skew_doubles_the_hot_ranks_peak() -> None:
    peaks = [emulate(LONG, 16, 4, 1, Routing.skewed(8, factor, ep=4, ep_rank=1)).peak_bytes for factor in (1.0, 4.0)]
    assert peaks[1] > 1.8 * peaks[0]


def test_recomputing_and_smaller_proxies_save_memory(program: GRPOProgram, balanced: Emulation) -> None:
    saved = emulate(replace(program, checkpointing=True), 4, 2)
    assert saved.peak["activations"] < 0.7 * balanced.peak["activations"]
    proxy = emulate(program.pruned(4), 4, 2)
    experts = 2 * 4 * (2 * 32 * 64 + 64 * 32)  # those the proxy does not have
    routers = 2 * 4 * 64
    assert balanced.peak["parameters"] - proxy.peak["parameters"] == experts + routers


@pytest.mark.slow
@pytest.mark.parametrize(("config", "world", "ep"), [(QWEN3_30B_A3B, 1024, 64), (DEEPSEEK_V3, 8192, 64)])
def test_a_slice_of_a_real_model_in_a_world_of_thousands(config: dict, world: int, ep: int) -> None:
    result = emulate(GRPOProgram(config, prompt=1024, completion=3072).sliced(4), world, ep, timeout=240)
    assert result.rss_bytes < 2**30
    assert result.peak_bytes > 2**30
    dispatched = 4096 * 8 * config["hidden_size"] * 2  # each token to 8 experts, in bfloat16
    assert dispatched in {item.nbytes for item in result.traffic if item.op == "all_to_all"}


def test_it_can_be_stopped() -> None:
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(Cancelled):  # or it would end, a minute later
        emulate(GRPOProgram(QWEN3_30B_A3B, prompt=512, completion=512), 1024, 64, cancel=stop)
    with pytest.raises(ScaleError, match=r"took too long: it was ended after 1 s.*take fewer layers"):
        emulate(GRPOProgram(QWEN3_30B_A3B, prompt=512, completion=512), 1024, 64, timeout=1.0)


def test_what_cannot_be_is_refused(program: GRPOProgram, tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="ep = 1, 2, 4"):
        emulate(program, 12, 12)
    with pytest.raises(ScaleError, match="profile the proxy"):
        emulate(program, 4, 2, routing=Routing.balanced(16))
    with pytest.raises(ScaleError, match=r"timeout is -1.*at least 0"):
        emulate(program, 4, 2, timeout=-1.0)
    with pytest.raises(ScaleError, match=r"and a routing.*leave out the routing"):
        emulate(program, 4, 2, 0, Routing.balanced(8), "replay", recording=tmp_path)
    with pytest.raises(ScaleError, match="no recording"):
        emulate(program, 4, 2, level="replay")
    with pytest.raises(ScaleError, match="no recording can be read"):
        emulate(program, 4, 2, level="replay", recording=tmp_path)
    with pytest.raises(ScaleError, match="repeats is 0"):
        emulate(program, 4, 2, level="exec", repeats=0)
    with pytest.raises(ScaleError, match="steps is 0"):
        run_real(program, 2, 2, steps=0)
    with pytest.raises(ScaleError, match="steps is 0"):
        record(program, 2, 2, tmp_path / "run", steps=0)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ScaleError, match="took too long"):
        emulate(program, 4, 2, timeout=0.0)


def test_what_would_take_minutes_is_refused_at_once(program: GRPOProgram) -> None:
    with pytest.raises(ScaleError, match=r"world of 10,000,000 ranks.*at most 1,048,576"):
        emulate(program, 10_000_000, 2)
    with pytest.raises(ScaleError, match=r"real run of 128 processes.*at most 64"):
        run_real(program, 128, 2)
    for wrong in ({"sequences": 10_000_000}, {"sequences": 65, "micro_batches": 64}):
        with pytest.raises(ScaleError, match=r"at most 4,096 sequences a step and rank.*take fewer"):
            replace(program, **wrong)


def test_a_large_world_has_its_groups(program: GRPOProgram) -> None:
    """A mesh asks every rank for the groups of all ranks; in a virtual world only its own are made."""
    few, many = (emulate(replace(program, sequences=1), world, 8, timeout=120) for world in (1024, 2**16))
    assert {item.group for item in few.traffic} == {8, 2**7, 2**10}
    assert {item.group for item in many.traffic} == {8, 2**13, 2**16}


@pytest.mark.parametrize("size", ["hidden_size", "vocab_size", "moe_intermediate_size", "num_attention_heads"])
def test_no_size_is_left_to_transformers(program: GRPOProgram, size: str) -> None:
    lacking = replace(program, config={key: value for key, value in TINY.items() if key != size})
    for ask in (lambda: emulate(lacking, 4, 2), lambda: estimate(lacking, 4, 2)):
        with pytest.raises(MoeproxyError, match=f"says no {size}.*add {size}"):
            ask()


def test_a_failure_in_the_process_is_told_with_its_place(program: GRPOProgram) -> None:
    broken = replace(program, config={**TINY, "hidden_act": "nope"})
    with pytest.raises(ScaleError, match=r"emulate: .*Error in .*, line \d+"):
        emulate(broken, 4, 2)
