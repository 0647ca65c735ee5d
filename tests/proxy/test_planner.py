"""Device planner: hand-counted terms, the emulation of the same step, the paper's table, what binds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.proxy.cost import cost
from moeproxy.proxy.hardware import DEVICES, UNVERIFIED, device
from moeproxy.proxy.paper import LAYOUTS, REPORTED, devices_table, paper_table
from moeproxy.proxy.planner import TooLarge, device_hours, plan_devices, plan_table
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape
from moeproxy.proxy.terms import experts_a_device, rollout_terms, training_terms
from moeproxy.scale import GRPOProgram, emulate

MODELS = Path(__file__).resolve().parents[2] / "data" / "models"
NODE = RLLayout(rollout_devices=8)
"""Colocated, rollout instances of a node of 8: reproduces the paper's Qwen3 row."""
APART = RLLayout(colocated=False, rollout_devices=32, ep=32)
"""Half of the devices train, half generate in instances of 32: reproduces the paper's DeepSeek row."""


@pytest.fixture(scope="module")
def qwen3() -> ModelShape:
    return ModelShape.of(QWEN3_30B_A3B)


@pytest.fixture(scope="module")
def deepseek() -> ModelShape:
    return ModelShape.of(DEEPSEEK_V3)


def test_published_sizes(qwen3: ModelShape, deepseek: ModelShape) -> None:
    # The model cards say 30.5 B and 671 B.
    assert qwen3.params(128) == 30_532_122_624
    assert round(deepseek.params(256) / 1e9) == 671
    assert qwen3.per_expert == 48 * (3 * 2048 * 768 + 2048)
    assert deepseek.per_expert == 58 * (3 * 7168 * 2048 + 7168)
    assert (qwen3.kv_values, deepseek.kv_values) == (2 * 4 * 128, 512 + 64)
    assert (qwen3.normed_width, deepseek.normed_width) == ((32 + 4) * 128, 0)
    assert deepseek.counts == tuple(range(16, 257, 8)), "8 groups of at least 2"


@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "deepseek-v3-tiny"])
def test_a_checkpoint_and_its_config_have_the_same_shape(name: str) -> None:
    checkpoint = Checkpoint.open(MODELS / name)
    counted, built = ModelShape.of(checkpoint), ModelShape.of(checkpoint.config)
    # A tied head is stored once, and the correction bias is a weight on disk but a buffer in memory.
    bias = len(checkpoint.moe_layers) if name.startswith("deepseek") else 0
    assert counted == replace(built, per_expert=built.per_expert + bias)
    assert counted.params(8) == cost(checkpoint, 8).params


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ep": 12}, "128 experts cannot be spread evenly over 12 ranks.*ep = 1, 2, 4, 8"),
        ({"ep": 100}, "over 100 ranks"),
        ({"skew": 1000.0}, "skew is 1000 with ep 8.*at most 8"),
        ({"response": 40_449}, "40,961 tokens in a model with 40,960 positions"),
    ],
)
def test_impossible_layouts_are_refused(qwen3: ModelShape, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        plan_devices(qwen3, RLLayout(**wrong), "H100")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.5, "512", None, True])
def test_lengths_are_whole_numbers(number: Any) -> None:
    layout = object.__new__(RLLayout)  # past the test suite's own check of argument types
    object.__setattr__(layout, "prompt", number)
    with pytest.raises(ProxyError, match=r"prompt is .*a whole number, at least 1"):
        layout.__post_init__()


def test_sensitive_assumptions_behind_the_papers_pairs(qwen3: ModelShape, deepseek: ModelShape) -> None:
    """PLANNER.md's list: what moves the four numbers, and that both proxies' are one rollout instance."""
    pairs = ((qwen3, NODE, 128), (qwen3, NODE, 48), (deepseek, APART, 256), (deepseek, APART, 16))

    def devices(**changes: Any) -> list[int | None]:
        found: list[int | None] = []
        for shape, layout, count in pairs:
            try:
                found.append(plan_devices(shape, replace(layout, **changes), "Ascend-910C-die", count).devices)
            except TooLarge:
                found.append(None)
        return found

    assert devices() == devices(concurrent=128) == devices(ep=8) == devices(ep=64) == [16, 8, 512, 64]
    assert devices(usable=0.95) == [8, 8, 512, 64]
    assert devices(concurrent=256) == [32, 8, None, 64]
    assert devices(ep=1) == [16, 8, None, 64]
    for shape, layout, count in (pairs[1], pairs[3]):
        assert "the layout" in plan_devices(shape, layout, "Ascend-910C-die", count).binding


@pytest.mark.parametrize("size", ["hidden_size", "vocab_size", "moe_intermediate_size", "num_key_value_heads"])
@pytest.mark.parametrize("config", [QWEN3_30B_A3B, DEEPSEEK_V3], ids=["qwen3", "deepseek"])
def test_sizes_left_to_transformers_defaults_are_refused(config: dict[str, Any], size: str) -> None:
    with pytest.raises(ProxyError, match=f"says no {size}"):
        ModelShape.of({key: value for key, value in config.items() if key != size})


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (DEEPSEEK_V3, {"first_k_dense_replace": ...}, "says no first_k_dense_replace"),
        (DEEPSEEK_V3, {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "no layer of the deepseek_v3 model"),
        (DEEPSEEK_V3, {"q_lora_rank": ...}, "says no q_lora_rank"),
        (DEEPSEEK_V3, {"n_shared_experts": ...}, "says no n_shared_experts"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 100}, "no layer of the qwen3_moe model"),
        (QWEN3_30B_A3B, {"head_dim": 0}, "head_dim is 0"),
        (QWEN3_30B_A3B, {"head_dim": -1}, "head_dim is -1"),
        (QWEN3_30B_A3B, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (QWEN3_30B_A3B, {"num_key_value_heads": 3}, "32 attention heads and 3 key-value"),
        (QWEN3_30B_A3B, {"num_attention_heads": 33}, "33 attention heads and 4 key-value"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (QWEN3_30B_A3B, {"vocab_size": 10**13}, "vocab_size is 10000000000000"),
    ],
)
def test_sizes_that_cannot_be_are_refused(config: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ProxyError, match=f"{said}.*Expected: .*What to do: "):
        ModelShape.of({key: value for key, value in ({**config, **changes}).items() if value is not ...})


def test_terms_by_hand() -> None:
    shape = ModelShape(
        n_experts=8,
        top_k=2,
        n_layers=2,
        moe_layers=2,
        fixed=1000 + 2 * 50 * 10,
        per_expert=500,
        hidden=10,
        vocabulary=50,
        expert_width=4,
        attention_width=30,
        normed_width=20,
        kv_values=20,
        counts=(2, 4, 8),
    )
    layout = RLLayout(ep=4, sequences=2, prompt=3, response=5, concurrent=7, rollout_devices=2, skew=1.5)
    terms = training_terms(shape, layout, 8, 8)
    params, dense, experts, head = 6000, 500, 500 * 2 / 2, 500
    state = {"weights": params * 4 / 8, "optimizer": params * 8 / 8, "reference": 0.0}
    rows, inputs = 16 * 2 * 1.5, {"gradients": params * 4 / 8, "activations": 2 * 16 * 10 * 2}
    one = 16 * (16 * 10 + 5.5 * 30 + 6 * 20) + rows * (4 * 10 + 6 * 4)
    again = one + rows * 4 * (10 + 4)
    gathered = {"gathered weights": (dense + experts) * 2, "gradients to reduce": experts * 2 + dense * 4}
    assert terms == {
        "forward": {**state, **inputs, "gathered weights": head * 2, "logits": 2 * 5 * 50 * 6.2},
        "backward begins": {**state, **inputs, "gathered weights": dense * 2, "gradients to reduce": head * 6},
        "backward of experts": {**state, **inputs, "one layer": again, **gathered},
        "gradients summed": {
            **state,
            "gradients": params * 4 / 8,
            "one layer": one,
            "gathered weights": dense * 2,
            "gradients to reduce": experts * 4 + experts * 2,
        },
        "first layer's backward": {**state, "gradients": params * 4 / 8, "one layer": again, **gathered},
        "backward ends": {**state, "gradients": params * 4 / 8, "gradients to reduce": head * 8},
    }
    # Without expert parallelism a layer is one group: gathered, the next one gathered, the last one reduced.
    together = training_terms(shape, replace(layout, ep=1), 8, 8)["first layer's backward"]
    assert together["gathered weights"] == (dense + 8 * 250) * 2
    assert together["gradients to reduce"] == (dense + 8 * 250) * (2 + 4)
    alone = training_terms(shape, layout, 8, 1)
    assert all(moment.get("gathered weights", 0) == 0 for moment in alone.values()), "a single device gathers nothing"
    # 2 experts of a rank over 4 ranks: whole ones are padded to 4, of which the first ranks keep one each.
    assert experts_a_device(layout, 8, 16) == (0.5, 2)
    assert experts_a_device(replace(layout, whole_experts=True), 8, 16) == (1, 4)
    assert experts_a_device(replace(layout, whole_experts=True), 8, 4) == (2, 2)
    kept = training_terms(shape, replace(layout, checkpointing=False, accumulate=False), 8, 8)
    assert kept["forward"]["activations"] == 2 * one
    assert kept["backward of experts"]["one layer"] == rows * 4 * (10 + 4), "what is kept is not computed again"
    assert kept["forward"]["gradients"] == 0
    deeper = training_terms(replace(shape, n_layers=3), replace(layout, checkpointing=False), 8, 8)
    dense_layer = 16 * (16 * 10 + 5.5 * 30 + 6 * 20 + 4 * 10 + 6 * 4 * 2)
    assert deeper["forward"]["activations"] == 2 * one + dense_layer
    assert rollout_terms(shape, layout, 4, 4) == {
        "rollout weights": 4000 * 2 / 2,
        "key-value cache": 7 * 8 * 2 * 20 * 2,
        "sampling": 7 * 50 * 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("config", "checkpointing"), [(QWEN3_30B_A3B, False), (DEEPSEEK_V3, True)])
def test_the_sum_is_near_the_emulation(config: dict[str, Any], checkpointing: bool) -> None:
    """Not the sizes that the coefficients were measured on: other depth, sequence, world and batch."""
    program = GRPOProgram(config, sequences=2, prompt=256, completion=512, checkpointing=checkpointing).sliced(3)
    emulated = emulate(program, 128, 32, timeout=240)
    layout = RLLayout(
        ep=32,
        sequences=2,
        prompt=256,
        response=512,
        checkpointing=checkpointing,
        accumulate=False,
        rollout_devices=1,
        whole_experts=True,
    )
    terms = training_terms(ModelShape.of(program.config), layout, program.n_experts, 128)
    assert max(sum(moment.values()) for moment in terms.values()) == pytest.approx(emulated.peak_bytes, rel=0.1)


def test_the_papers_devices_and_hours(qwen3: ModelShape, deepseek: ModelShape) -> None:
    """arXiv 2608.10823: 16 -> 8 NPUs at 48 of 128, 512 -> 64 at 16 of 256, and the hours of a step."""
    on = "Ascend-910C-die"
    assert [plan_devices(qwen3, NODE, on, count).devices for count in (128, 48)] == [16, 8]
    assert [plan_devices(deepseek, APART, on, count).devices for count in (256, 16)] == [512, 64]
    assert round(device_hours(16, 128.93), 3) == 0.573
    assert round(device_hours(8, 114.83), 3) == 0.255
    assert round(device_hours(512, 50 * 60), 1) == 426.7
    assert round(device_hours(64, 12 * 60), 1) == 12.8


def test_no_single_layout_gives_all_of_the_papers_devices() -> None:
    table = paper_table().set_index("assumptions")
    assert table.loc["the paper", list(REPORTED)].tolist() == [16, 8, 512, 64]
    found = table.drop("the paper")
    assert len(found) == len(LAYOUTS)
    assert found["agree"].max() == 2
    assert found.loc["colocated, rollout instances of 8", list(REPORTED)].tolist() == [16, 8, "-", 32]
    assert found.loc["half train, half generate, instances of 32", list(REPORTED)].tolist() == [64, 64, 512, 64]


def test_a_size_that_fits_nowhere_is_a_row_not_an_error(deepseek: ModelShape) -> None:
    table = plan_table(deepseek, NODE, "Ascend-910B", counts=[16])
    assert table["model"].tolist() == ["original", "proxy-16"]
    assert table["devices"].isna().tolist() == [True, False]
    assert "rollout weights" in table["binding"][0]
    with pytest.raises(TooLarge, match="rollout weights"):
        plan_devices(deepseek, NODE, "Ascend-910B")


def test_the_binding_term_is_named_and_the_plan_is_the_fewest(qwen3: ModelShape) -> None:
    plan = plan_devices(qwen3, NODE, "H100")
    assert plan.fullest <= plan.room == 79.6 * 2**30 * 0.9
    assert plan.devices == 8
    assert plan.binding == "the layout: 8 devices a rollout instance, tp 1"
    plan = plan_devices(qwen3, NODE, "Ascend-910B")
    assert plan.devices == 16
    assert plan.binding.startswith("backward ends: optimizer (28.4 of")
    offloaded = plan_devices(qwen3, replace(NODE, offload_optimizer=True), "Ascend-910B")
    assert offloaded.devices == 8
    longer = plan_devices(qwen3, replace(NODE, response=8_000, checkpointing=False), "H200")
    assert longer.devices > 8
    assert "activations" in longer.binding or "logits" in longer.binding


def test_more_experts_never_need_fewer_devices(qwen3: ModelShape) -> None:
    table = plan_table(qwen3, RLLayout(steps="any", rollout_devices=1), "H100", counts=range(8, 128, 20))
    assert table["devices"].is_monotonic_decreasing
    assert table["model"].iloc[0] == "original"
    assert table["params"].iloc[0] == qwen3.params(128)
    assert len(plan_table(qwen3, NODE, "H100")) == len(qwen3.counts)


def test_skew_and_an_awake_rollout_cost_memory(qwen3: ModelShape) -> None:
    plain = plan_devices(qwen3, NODE, "H100")
    skewed = plan_devices(qwen3, replace(NODE, skew=4.0), "H100")
    awake = plan_devices(qwen3, replace(NODE, rollout_sleeps=False), "H100")
    assert skewed.terms["gradients summed"]["one layer"] > 1.5 * plain.terms["gradients summed"]["one layer"]
    assert sum(awake.terms["forward"].values()) - sum(plain.terms["forward"].values()) == pytest.approx(
        sum(plain.terms["rollout"][name] for name in ("rollout weights", "key-value cache"))
    )


def test_every_device_says_where_its_figures_come_from() -> None:
    assert {"A100-80GB", "H100", "H200", "H20", "Ascend-910B", "Ascend-910C"} <= set(DEVICES)
    assert all(one.source and one.memory_gib > 0 and one.bf16_tflops > 0 for one in DEVICES.values())
    for one in DEVICES.values():
        assert all(figure in one.source for figure in ("memory", "bf16", "memory's rate", "link", "network")), one
    assert [one.name for one in DEVICES.values() if UNVERIFIED in one.source] == ["H200", "H20", "Ascend-910B"]
    # What drivers report in MiB, as the sources quote it.
    for name, mib in {"H100": 81_559, "H200": 143_771, "H20": 97_871, "Ascend-910B": 65_536}.items():
        assert device(name).memory_gib == pytest.approx(mib / 1024, abs=0.06)
        assert f"{mib:,} MiB" in device(name).source
    table = devices_table()
    assert table["source"].tolist() == [one.source for one in DEVICES.values()]
    assert device("Ascend-910C").bf16_tflops == 2 * device("Ascend-910C-die").bf16_tflops


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda shape: plan_devices(shape, NODE, "H999"), "one of A100-80GB"),
        (lambda shape: plan_devices(shape, NODE, "H100", 7), "8 to 128"),
        (lambda shape: RLLayout(tp=0), "tp is 0"),
        (lambda shape: RLLayout(usable=1.5), "shares within"),
        (lambda shape: RLLayout(optimizer="lion"), "one of adamw"),
        (
            lambda shape: plan_devices(shape, replace(NODE, sequences=10_000), "H100"),
            "on 16384 x H100.*shorten sequences",
        ),
        (lambda shape: plan_devices(shape, replace(NODE, tp=3), "H100"), "multiples of tp 3 and of 8.*steps='any'"),
        (lambda shape: ModelShape.of({**QWEN3_30B_A3B, "num_attention_heads": "many"}), "config"),
    ],
)
def test_the_impossible_is_refused(qwen3: ModelShape, make: Any, words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        make(qwen3)
