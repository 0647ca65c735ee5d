"""A fault acts at its seam, from its onset, and leaves no patch behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moeproxy.errors import FaultError
from moeproxy.lab.faults import FAULTS, fault, inject
from moeproxy.lab.faults.catalogue import FAMILIES, PAGE, page
from moeproxy.lab.faults.numeric import mantissa_bits, rounded
from moeproxy.lab.seams import SEAMS, Seams, Update
from moeproxy.lab.settings import Injection
from moeproxy.traces.signals import SIGNALS


@pytest.mark.parametrize("name", FAULTS)
def test_entry_is_complete(name: str) -> None:
    item = FAULTS[name]
    assert item.seam in SEAMS
    assert all((item.title, item.what, item.twin, item.check, item.remedy, item.tell_tales))
    for tale in item.tell_tales:
        assert tale.signal in SIGNALS
        assert tale.direction in (-1, 0, 1)


@pytest.mark.parametrize("name", FAULTS)
def test_strength_zero_patches_nothing(name: str) -> None:
    seams = Seams()
    with inject(seams, [Injection(name, 0.0, 1)], steps=5):
        assert vars(seams) == {}


@pytest.mark.parametrize("name", FAULTS)
def test_only_its_seam_is_patched_and_put_back_after_an_exception(name: str) -> None:
    seams = Seams()

    def fail() -> None:
        with inject(seams, [Injection(name, 1.0, 1)], steps=5):
            assert set(vars(seams)) == {FAULTS[name].seam}
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert vars(seams) == {}


def test_unknown_fault_lists_the_known_ones() -> None:
    with pytest.raises(FaultError, match="rollout_logp_precision"):
        fault("typo")


@pytest.mark.parametrize(("strength", "onset"), [(-0.1, 1), (1.1, 1), (math.nan, 1), (1, 0), (1, 6)])
def test_impossible_settings_are_refused(strength: float, onset: int) -> None:
    with (
        pytest.raises(FaultError, match="update_freeze"),
        inject(Seams(), [Injection("update_freeze", strength, onset)], steps=5),
    ):
        pass


def test_mantissa_bits_of_the_named_formats() -> None:
    assert [mantissa_bits(s) for s in (0, 0.25, 0.5, 0.75, 1)] == [23, 10, 7, 3, 0]
    bits = [mantissa_bits(s) for s in np.linspace(0, 1, 101)]
    assert bits == sorted(bits, reverse=True)


@pytest.mark.parametrize("value", [32**-0.5, 0.1, 1.0, 3.999, -0.7, 1e-3])
def test_rounding_equals_real_formats(value: float) -> None:
    assert rounded(value, 10) == float(np.float16(value))
    assert rounded(value, 7) == torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).item()
    assert rounded(value, 23) == float(np.float32(value))
    assert math.log2(abs(rounded(value, 0))) % 1 == 0


def test_scale_is_healthy_before_the_onset() -> None:
    seams = Seams()
    with inject(seams, [Injection("rollout_logp_precision", 1.0, 3)], steps=5):
        assert [seams.attention_scale(0.17, step=s) for s in (1, 2, 3, 4)] == [0.17, 0.17, 0.125, 0.125]


def _counting(done: list[int]) -> Update:
    return Update(lambda: done.append(1), torch.optim.SGD([torch.zeros(1, requires_grad=True)]))


@pytest.mark.parametrize(("strength", "applied"), [(1.0, 0), (0.5, 10), (0.25, 15), (0.0, 20)])
def test_freeze_skips_its_share_of_updates(strength: float, applied: int) -> None:
    seams, done = Seams(), []
    with inject(seams, [Injection("update_freeze", strength, 1)], steps=20):
        for step in range(1, 21):
            seams.optimizer_step(_counting(done), step=step)
    assert len(done) == applied


def test_two_faults_act_together() -> None:
    seams, done = Seams(), []
    both = [Injection("update_freeze", 1.0, 1), Injection("rollout_logp_precision", 1.0, 1)]
    with inject(seams, both, steps=2):
        seams.optimizer_step(_counting(done), step=1)
        assert seams.attention_scale(0.17, step=1) == 0.125
    assert not done


def test_two_faults_on_one_seam_act_in_the_order_given() -> None:
    spike, collapse = Injection("reward_spike", 1.0, 2), Injection("reward_collapse", 1.0, 3)
    seen = {}
    for order in ((spike, collapse), (collapse, spike)):
        seams = Seams()
        with inject(seams, order, steps=4):
            rewards = [seams.reward([1.0] * 64, [""] * 64, [""] * 64, step=step) for step in (1, 2, 3)]
        seen[order[0].fault] = [(min(row), max(row)) for row in rewards]
    assert seen == {
        "reward_spike": [(1.0, 1.0), (1.0, 6.0), (0.0, 0.0)],  # what the spike gave is lost afterwards
        "reward_collapse": [(1.0, 1.0), (1.0, 6.0), (0.0, 5.0)],
    }


def test_the_page_is_that_of_the_entries() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m moeproxy.lab.faults.catalogue"
    assert {item.family for item in FAULTS.values()} == set(FAMILIES)
    assert all(f"### `{name}`" in page() for name in FAULTS)
