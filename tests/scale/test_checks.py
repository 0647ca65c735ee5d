"""Wrong types at the public functions: one clear refusal each, in a process without the suite's own type checks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from moeproxy.errors import ScaleError
from moeproxy.scale import checks
from tests.scale.conftest import TINY

ASKED = """
import json, sys
import numpy as np
from moeproxy.errors import MoeproxyError
from moeproxy.scale import GRPOProgram, Layout, Routing, emulate, estimate, find_hottest, fullest_by_sum
from moeproxy.scale import device_time, record, run_real, write_chakra
from moeproxy.proxy.hardware import Device
from moeproxy.proxy.planner import plan_devices
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape
C = json.loads(sys.argv[1])
P = GRPOProgram(C, prompt=8, completion=8)
S = ModelShape.of(C)
nan = float("nan")
calls = {
    "world str": lambda: emulate(P, "4"),
    "world None": lambda: emulate(P, None),
    "world nan": lambda: emulate(P, nan),
    "world float": lambda: emulate(P, 4.0),
    "ep float": lambda: emulate(P, 4, 2.0),
    "rank str": lambda: emulate(P, 4, 2, "0"),
    "rank float": lambda: emulate(P, 4, 2, 1.5),
    "routing str": lambda: emulate(P, 4, 2, 0, "balanced"),
    "program dict": lambda: emulate(C, 4, 2),
    "timeout str": lambda: emulate(P, 4, 2, timeout="1"),
    "repeats float": lambda: emulate(P, 4, 2, level="exec", repeats=1.5),
    "steps str": lambda: run_real(P, 2, 2, steps="2"),
    "record program": lambda: record(None, 2, 2, "nowhere"),
    "balanced 0": lambda: Routing.balanced(0),
    "balanced str": lambda: Routing.balanced("8"),
    "skew str": lambda: Routing.skewed(8, "2", ep=4),
    "shares 1-D": lambda: Routing("mine", np.full(8, 1 / 8)),
    "shares list": lambda: Routing("mine", [[0.5, 0.5]]),
    "config None": lambda: GRPOProgram(None),
    "config path": lambda: GRPOProgram("config.json"),
    "prompt str": lambda: GRPOProgram(C, prompt="8"),
    "prompt nan": lambda: GRPOProgram(C, prompt=nan),
    "prompt float": lambda: GRPOProgram(C, prompt=1.5),
    "seed str": lambda: GRPOProgram(C, prompt=8, completion=8, seed="0"),
    "sliced float": lambda: P.sliced(1.5),
    "pruned str": lambda: P.pruned("4"),
    "load str": lambda: estimate(P, 4, 2, "1"),
    "hottest str": lambda: fullest_by_sum("balanced", Layout(4, 2), n_layers=2),
    "hottest 0": lambda: fullest_by_sum(Routing.balanced(8), Layout(4, 2), n_layers=0),
    "find routing": lambda: find_hottest(P, 4, 2, "balanced"),
    "find world": lambda: find_hottest(P, "4", 2),
    "profile None": lambda: Routing.from_profile(None),
    "trace None": lambda: Routing.from_trace(None),
    "shares of words": lambda: Routing("mine", np.array([["a", "b"]])),
    "stretched str": lambda: Routing.balanced(8).stretched("x"),
    "chakra path": lambda: write_chakra("somewhere", "nowhere"),
    "layout None": lambda: plan_devices(S, None, "H100"),
    "on None": lambda: plan_devices(S, RLLayout(), None),
    "memory str": lambda: Device("x", "80", 1, 1, 1, 1, 8, "me"),
    "memory -5": lambda: Device("x", -5, 1, 1, 1, 1, 8, "me"),
    "per_node 0": lambda: Device("x", 80, 1, 1, 1, 1, 0, "me"),
    "time of None": lambda: device_time(None, "H100"),
    "experts str": lambda: GRPOProgram({**C, "num_experts": "8"}, prompt=8, completion=8),
    "experts 0": lambda: GRPOProgram({**C, "num_experts": 0}, prompt=8, completion=8),
    "experts True": lambda: GRPOProgram({**C, "num_experts": True}, prompt=8, completion=8),
    "exact group": lambda: emulate(P, 4, 4, 0, Routing.recorded(8, [[([16, 16], [16, 16])]] * 2)),
    "exact layers": lambda: emulate(P, 4, 2, 0, Routing.recorded(8, [[([16, 16], [16, 16])]])),
    "exact sum": lambda: emulate(P, 4, 2, 0, Routing.recorded(8, [[([1, 1], [16, 16])]] * 2)),
    "exact negative": lambda: emulate(P, 4, 2, 0, Routing.recorded(8, [[([33, -1], [16, 16])]] * 2)),
}
said = {}
for name, call in calls.items():
    try:
        said[name] = ["none", repr(call()), "", ""]
    except Exception as error:
        told = [getattr(error, part, "") for part in ("found", "expected", "remedy")]
        said[name] = [type(error).__name__, *told]
print(json.dumps(said))
"""


def test_wrong_types_are_refused_with_what_was_found_and_expected() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED, json.dumps(TINY)], capture_output=True, text=True, check=True)
    said: dict[str, list[str]] = json.loads(done.stdout)
    assert len(said) == 49
    wrong = {
        name: told for name, told in said.items() if told[0] not in ("ScaleError", "ProxyError") or not all(told[1:])
    }
    assert wrong == {}


@pytest.mark.parametrize("value", [True, 2.0, "2", None, float("nan"), 1])
def test_whole_numbers(value: Any) -> None:
    with pytest.raises(ScaleError, match=r"here is .*at least 2"):
        checks.whole(2, here=value)
    checks.whole(2, here=2)


@pytest.mark.parametrize("value", [True, "2", None, float("nan"), float("inf"), -1, 0])
def test_real_numbers(value: Any) -> None:
    with pytest.raises(ScaleError, match=r"here is .*a finite number above 0"):
        checks.real(0, above=True, here=value)
    checks.real(0, here=0)
