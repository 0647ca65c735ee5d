"""Every fault in the real loop, on both layouts: healthy before its onset, its first tell-tale after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeproxy.lab.faults import FAULTS, TellTale
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.traces.trace import Trace
from tests.lab.conftest import MODELS

pytestmark = pytest.mark.slow

ONSET = 3
SHORT = GRPOSettings(steps=6, prompts=8, samples=4, tasks=256)
# Faults whose first tell-tale takes many updates to show; a higher learning rate makes them fewer.
SLOW = {"kl_sign", "delayed_credit", "expert_collapse"}
LONG = GRPOSettings(steps=16, prompts=8, samples=4, tasks=256, learning_rate=1e-3)


@pytest.fixture(scope="module")
def healthy() -> dict[tuple[str, bool], Trace]:
    return {}


def _run(model: Path, name: str | None, slow: bool) -> Trace:
    injection = Injection(name, 1.0, ONSET) if name else None
    return run(RunSpec(model, seed=1, settings=LONG if slow else SHORT, injection=injection))


def _signal(trace: Trace, name: str) -> np.ndarray:
    """A signal by step, a mean over layers where there is one a layer."""
    columns = [column for column in trace.signals if column.partition("/")[0] == name]
    return np.mean([trace.values(column) for column in columns], axis=0)


def _moves(tale: TellTale, broken: Trace, twin: Trace) -> bool:
    after = broken.steps.index > ONSET  # an update made at the onset shows one step later
    values, expected = _signal(broken, tale.signal)[after], _signal(twin, tale.signal)[after]
    if tale.direction == 0:
        return bool(np.isnan(values).any())
    return bool(np.sign(values.mean() - expected.mean()) == tale.direction)


@pytest.mark.parametrize("layout", MODELS)
@pytest.mark.parametrize("name", list(FAULTS))
def test_fault_acts_from_its_onset(
    name: str, layout: str, shipped_models: Path, healthy: dict[tuple[str, bool], Trace]
) -> None:
    slow = name in SLOW
    if (layout, slow) not in healthy:
        healthy[layout, slow] = _run(shipped_models / layout, None, slow)
    twin, broken = healthy[layout, slow], _run(shipped_models / layout, name, slow)
    before = twin.steps.index < ONSET
    for column in set(twin.signals) - {"seconds_per_step"}:
        assert np.array_equal(broken.values(column)[before], twin.values(column)[before]), column
    assert _moves(FAULTS[name].tell_tales[0], broken, twin)
