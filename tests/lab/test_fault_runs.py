"""Every fault in the real loop, on both layouts: healthy before its onset, its first tell-tale after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeproxy.lab.faults import FAULTS, TellTale
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.traces.trace import Trace
from tests.lab.conftest import MODELS, TOOL_MODELS

pytestmark = pytest.mark.slow

ONSET = 3
SHORT = GRPOSettings(steps=6, prompts=8, samples=4, tasks=256)
TOOLS = replace(SHORT, environment="calculator", max_new_tokens=8)
FAST = GRPOSettings(steps=12, prompts=8, samples=4, tasks=256, learning_rate=1e-3)
# Faults whose first tell-tale takes many updates to show; settings that make them fewer.
SLOW = {
    "kl_sign": replace(FAST, beta=0.5),
    "expert_collapse": FAST,
    "delayed_credit": replace(FAST, steps=30, prompts=16),
}


@pytest.fixture(scope="module")
def healthy() -> dict[tuple[str, GRPOSettings], Trace]:
    """Healthy twins by layout and settings, filled as tests need them."""
    return {}


def _run(model: Path, name: str | None, settings: GRPOSettings) -> Trace:
    injection = Injection(name, 1.0, ONSET) if name else None
    return run(RunSpec(model, seed=1, settings=settings, injection=injection))


def _signal(trace: Trace, name: str) -> np.ndarray:
    """A signal by step, a mean over layers where there is one a layer."""
    columns = [column for column in trace.signals if column.partition("/")[0] == name]
    return np.mean([trace.values(column) for column in columns], axis=0)


def _moves(tale: TellTale, broken: Trace, twin: Trace) -> bool:
    # An update made at the onset shows one step later; of a long run the last third is looked at.
    after = broken.steps.index > max(ONSET, 2 * len(broken.steps) // 3 if len(broken.steps) > SHORT.steps else 0)
    values, expected = _signal(broken, tale.signal)[after], _signal(twin, tale.signal)[after]
    if tale.direction == 0:
        return bool(np.isnan(values).any())
    return bool(np.sign(values.mean() - expected.mean()) == tale.direction)


@pytest.mark.parametrize("layout", TOOL_MODELS)
@pytest.mark.parametrize("name", [name for name, item in FAULTS.items() if item.family == "TE"])
def test_tool_fault_acts_from_its_onset(
    name: str, layout: str, shipped_models: Path, healthy: dict[tuple[str, GRPOSettings], Trace]
) -> None:
    if (layout, TOOLS) not in healthy:
        healthy[layout, TOOLS] = _run(shipped_models / layout, None, TOOLS)
    twin, broken = healthy[layout, TOOLS], _run(shipped_models / layout, name, TOOLS)
    _equal_before_the_onset(broken, twin)
    assert all(_moves(tale, broken, twin) for tale in FAULTS[name].tell_tales)


@pytest.mark.parametrize("layout", MODELS)
@pytest.mark.parametrize("name", [name for name, item in FAULTS.items() if item.family != "TE"])
def test_fault_acts_from_its_onset(
    name: str, layout: str, shipped_models: Path, healthy: dict[tuple[str, GRPOSettings], Trace]
) -> None:
    settings = SLOW.get(name, SHORT)
    if (layout, settings) not in healthy:
        healthy[layout, settings] = _run(shipped_models / layout, None, settings)
    twin, broken = healthy[layout, settings], _run(shipped_models / layout, name, settings)
    _equal_before_the_onset(broken, twin)
    assert _moves(FAULTS[name].tell_tales[0], broken, twin)


def _equal_before_the_onset(broken: Trace, twin: Trace) -> None:
    before = twin.steps.index < ONSET
    for column in set(twin.signals) - {"seconds_per_step"}:
        assert np.array_equal(broken.values(column)[before], twin.values(column)[before]), column
