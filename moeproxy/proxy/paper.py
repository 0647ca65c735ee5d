"""The planner beside the devices that arXiv 2608.10823 reports: which assumptions give them, and which do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.proxy.hardware import DEVICES
from moeproxy.proxy.planner import TooLarge, plan_devices
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape

if TYPE_CHECKING:
    import pandas as pd

REPORTED: Mapping[str, int] = {"Qwen3 128": 16, "Qwen3 48": 8, "DeepSeek 256": 512, "DeepSeek 16": 64}
"""Devices of the paper's table, by model and experts a layer (Ascend 910, 64 GiB each)."""
_ON = "Ascend-910C-die"
_NODE = RLLayout(rollout_devices=8)
_APART = RLLayout(colocated=False, rollout_devices=32, ep=32)
LAYOUTS: Mapping[str, RLLayout] = {
    "colocated, rollout instances of 8": _NODE,
    "colocated, instances of 4": RLLayout(rollout_devices=4),
    "colocated, instances of 4, whole nodes of 8": RLLayout(rollout_devices=4, steps="node"),
    "colocated, instances of 32": replace(_APART, colocated=True),
    "colocated, instances of 64": RLLayout(rollout_devices=64, ep=64),
    "half train, half generate, instances of 32": _APART,
    "the same, any number of devices": replace(_APART, steps="any"),
    "half train, half generate, instances of 8": RLLayout(colocated=False, rollout_devices=8),
    "instances of 8, weights and optimizer offloaded": replace(_NODE, offload_optimizer=True, offload_weights=True),
    "colocated, instances of 8, 8,192 response tokens": replace(_NODE, response=8192),
}
"""Assumptions tried; all others are those of `RLLayout` (512 + 1,024 tokens, recomputation, AdamW, powers of two)."""


def paper_table() -> pd.DataFrame:
    """Return the paper's devices, and those that the planner finds under each of `LAYOUTS`; "-" where nothing fits.

    DeepSeek-V3's shape stands for V3.2's. `_ON` has whole nodes of 16, so "whole nodes of 8" is tried on its sibling.
    """
    import pandas as pd

    shapes = {"Qwen3": ModelShape.of(QWEN3_30B_A3B), "DeepSeek": ModelShape.of(DEEPSEEK_V3)}
    rows = [{"assumptions": "the paper", **REPORTED, "agree": len(REPORTED)}]
    for name, layout in LAYOUTS.items():
        on = "Ascend-910B" if layout.steps == "node" else _ON
        found = {key: _fewest(shapes[key.split()[0]], layout, on, int(key.split()[1])) for key in REPORTED}
        agree = sum(found[key] == count for key, count in REPORTED.items())
        rows.append({"assumptions": name, **{key: count or "-" for key, count in found.items()}, "agree": agree})
    return pd.DataFrame(rows)


def _fewest(shape: ModelShape, layout: RLLayout, on: str, count: int) -> int | None:
    try:
        return plan_devices(shape, layout, on, count).devices
    except TooLarge:
        return None


def devices_table() -> pd.DataFrame:
    """Return the device types with their figures and sources."""
    import pandas as pd

    names = {
        "name": "device",
        "memory_gib": "GiB",
        "bf16_tflops": "bf16 TFLOP/s",
        "memory_tb_s": "memory, TB/s",
        "link_gb_s": "link in a node, GB/s",
        "network_gb_s": "network, GB/s",
        "per_node": "in a node",
        "source": "source",
    }
    return pd.DataFrame([{title: vars(one)[name] for name, title in names.items()} for one in DEVICES.values()])
