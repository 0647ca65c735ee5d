"""The controls of the fault panel: what a change of one means for the others."""

from __future__ import annotations

import pytest

from moeproxy.errors import FaultError, MoeproxyError
from moeproxy.view.apps.fault_controls import FaultControls, parse_seeds
from moeproxy.view.apps.ui import Status
from tests.view.apps.made_runs import recordings


class _Changes:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> None:
        self.n += 1


@pytest.fixture
def status() -> Status:
    return Status()


@pytest.fixture
def controls(status: Status) -> FaultControls:
    return FaultControls(recordings(), "update_freeze", ("cluster-16", "random-16"), status, _Changes())


def test_recorded_strength_seeds_and_onsets_are_chosen_at_first(controls: FaultControls) -> None:
    asked = controls.asked()
    assert (asked.fault, asked.strength, dict(asked.onsets)) == ("update_freeze", 1.0, {0: 10, 1: 10})
    assert (asked.models, asked.steps, asked.live) == (("original", "cluster-16"), 40, True)
    assert controls.as_recorded.value
    assert controls.onset.value == 10


def test_another_fault_brings_its_own_onsets(controls: FaultControls) -> None:
    controls.choose("kl_sign")
    assert controls.family.value == "FA"
    assert dict(controls.asked().onsets) == {0: 12, 1: 20}
    controls.family.value = "OD"
    assert controls.fault.value in {fault for _, fault in controls.fault.options}
    with pytest.raises(FaultError):
        controls.choose("typo")


def test_a_fault_that_is_not_recorded_keeps_the_seeds_and_takes_the_slider(controls: FaultControls) -> None:
    controls.choose("entropy_collapse")
    assert controls.as_recorded.disabled
    assert not controls.as_recorded.value
    controls.onset.value = 7
    assert dict(controls.asked().onsets) == {0: 7, 1: 7}
    controls.choose("update_freeze")
    assert not controls.as_recorded.disabled
    assert dict(controls.asked().onsets) == {0: 10, 1: 10}


def test_a_moved_onset_is_no_longer_the_recorded_one(controls: FaultControls) -> None:
    controls.choose("kl_sign")
    controls.onset.value = 15
    assert not controls.as_recorded.value
    assert dict(controls.asked().onsets) == {0: 15, 1: 15}
    controls.as_recorded.value = True
    assert dict(controls.asked().onsets) == {0: 12, 1: 20}
    controls.seeds.value = "1, 7"
    assert dict(controls.asked().onsets) == {1: 20, 7: 15}, "a seed that is not recorded takes the slider's onset"


def test_strengths_are_percents_and_only_recorded_ones_bring_onsets(controls: FaultControls) -> None:
    assert controls.strength.options == list(range(5, 101, 5))
    controls.strength.value = 30
    assert controls.asked().strength == 0.3
    assert not controls.as_recorded.value
    controls.strength.value = 100
    assert controls.as_recorded.value


def test_longer_runs_offer_later_onsets(controls: FaultControls) -> None:
    controls.steps.value = 90
    assert controls.onset.options[-1] == 90
    assert controls.onset.value == 10
    controls.onset.value = 80
    controls.steps.value = 5
    assert controls.onset.options[-1] == 40, "the recorded runs are longer"
    assert controls.onset.value == 40


def test_models_are_drawn_once_each(controls: FaultControls) -> None:
    controls.second.value = "random-16"
    assert controls.asked().models == ("original", "cluster-16", "random-16")
    controls.second.value = "cluster-16"
    assert controls.asked().models == ("original", "cluster-16")


def test_every_change_is_told_and_a_wrong_seed_is_refused(controls: FaultControls, status: Status) -> None:
    changes = controls._on_change
    assert isinstance(changes, _Changes)
    for control, name, value in (
        (controls.strength, "index", 3),
        (controls.onset, "index", 3),
        (controls.as_recorded, "value", True),
        (controls.seeds, "value", "3"),
        (controls.proxy, "value", "random-16"),
        (controls.second, "value", "cluster-16"),
        (controls.shown, "value", False),
        (controls.steps, "value", 7),
        (controls.fault, "value", controls.fault.options[-1][1]),
    ):
        before = changes.n
        setattr(control, name, value)
        assert changes.n > before, control
    controls.seeds.value = "1, x"
    assert status.is_error
    assert "'x' is no seed" in status.text


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", (0,)), ("2, 1,1", (1, 2)), ("5-7, 0", (0, 5, 6, 7)), (" 3 - 4 ,", (3, 4))]
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", ",", "a", "-1", "1-", "1-2-3", "7-5", "0-20", "0-99999999999", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(MoeproxyError):
        parse_seeds(text)
