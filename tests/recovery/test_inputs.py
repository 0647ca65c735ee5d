"""Values, models and folders that cannot work are refused at once: what was found, what was expected, no process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeproxy.errors import LabError, RecoveryError
from moeproxy.lab.prompts import pool
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.places import data_dir
from moeproxy.recovery import hotswap
from moeproxy.recovery.child import start_job
from moeproxy.recovery.feasible import check
from moeproxy.recovery.hotswap import SwapPlan, hot_swap
from moeproxy.recovery.inputs import positive, usable_model
from moeproxy.recovery.job import Job
from moeproxy.recovery.plan import Mishap, RolePlan

MODEL = data_dir() / "models" / "qwen3-moe-tiny"
SPEC = RunSpec(MODEL, settings=GRPOSettings(steps=10, prompts=4, samples=4, tasks=64))
NO_COUNT: tuple[Any, ...] = (-1, 1.5, "2", None, True, math.nan)
NO_TIME: tuple[Any, ...] = (0, -1.0, math.nan, math.inf, 10**400, "5", None)


def _given(made: Any, name: str, value: Any) -> None:
    """Check `made` with one field of any type: tests run with checks of types, which users do not have."""
    object.__setattr__(made, name, value)
    made.__post_init__()


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        pytest.fail("a process was about to start")

    monkeypatch.setattr(hotswap, "find_spec", lambda _: "installed")
    monkeypatch.setattr(hotswap, "Processes", started)
    monkeypatch.setattr("moeproxy.recovery.job.ray_running", started)


@pytest.mark.parametrize("value", NO_COUNT)
@pytest.mark.parametrize("name", ["rollouts", "shares", "lag", "holders", "checkpoint_every", "max_task_restarts"])
def test_counts_of_roles_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(RecoveryError, match=rf"^{name} is .*Expected: a whole number, at least \d"):
        _given(RolePlan(), name, value)


@pytest.mark.parametrize("value", NO_COUNT)
@pytest.mark.parametrize("name", ["steps", "active", "spares", "batch", "seed", "checkpoint_every", "snapshot_every"])
def test_counts_of_a_swap_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(RecoveryError, match=rf"^{name} is .*Expected: a whole number, at least \d"):
        _given(SwapPlan(MODEL), name, value)


@pytest.mark.parametrize("value", ["no", 1, None])
@pytest.mark.parametrize("made", [RolePlan(), SwapPlan(MODEL)])
def test_a_switch_is_on_or_off(made: Any, value: Any) -> None:
    for name in ("standby", "digests"):
        if hasattr(made, name):
            with pytest.raises(RecoveryError, match=f"^{name} is .*Expected: True or False"):
                _given(replace(made), name, value)


@pytest.mark.parametrize("value", NO_TIME)
def test_times_and_rates_are_finite_numbers(value: Any) -> None:
    for name in ("heartbeat", "trainer_hang", "rollout_hang", "answer"):
        with pytest.raises(RecoveryError, match=f"^{name} is .*more than 0"):
            _given(RolePlan(), name, value)
    for name in ("heartbeat", "timeout"):
        with pytest.raises(RecoveryError, match=f"^{name} is .*more than 0"):
            _given(SwapPlan(MODEL), name, value)
    if value != 0:
        with pytest.raises(RecoveryError, match=r"^learning_rate is .*0 or more"):
            _given(SwapPlan(MODEL), "learning_rate", value)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_is_above_zero_and_may_be_endless(limit: float, tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match=r"^limit is .*more than 0"):
        hot_swap(SwapPlan(MODEL), tmp_path / "a", limit=limit)
    with pytest.raises(RecoveryError, match=r"^limit is .*more than 0"):
        Job(SPEC, tmp_path / "b").run(limit=limit)
    for text in ("5", None):
        with pytest.raises(RecoveryError, match=r"^limit is .*more than 0"):
            positive("limit", text, endless=True)
    for endless in (math.inf, 10**400):
        positive("limit", endless, endless=True)


@pytest.mark.parametrize("step", [*NO_COUNT, 0])
@pytest.mark.parametrize(("member", "phase"), [("trainer", "update"), ("manager", "serve"), ("trainer-1", "wait")])
def test_a_mishap_has_a_step(member: str, phase: str, step: Any) -> None:
    with pytest.raises(RecoveryError, match=f"the step of a mishap of {member} in phase '{phase}' is .*at least 1"):
        _given(Mishap(member, 1, phase), "step", step)


@pytest.mark.parametrize(("member", "phase"), [("trainer", "recover"), ("trainer-2", "recover"), ("rollout-0", "idle")])
def test_a_mishap_between_steps_says_that_it_belongs_to_none(member: str, phase: str) -> None:
    assert Mishap(member, 0, phase).step == 0
    for step in (1, 5):
        with pytest.raises(RecoveryError, match=rf"phase '{phase}' is {step}.*Expected: 0.*What to do: give step 0"):
            Mishap(member, step, phase)


def test_a_mishap_that_its_phase_never_makes_is_refused() -> None:
    for kind, member, phase in (
        ("disk_full", "trainer", "wait"),
        ("corrupt", "rollout-0", "deliver"),
        ("drop", "trainer-1", "publish"),
        ("mute", "trainer-1", "recover"),
    ):
        with pytest.raises(RecoveryError, match=f"kind '{kind}' of {member} in phase '{phase}'.*Expected: the trainer"):
            Mishap(member, 0 if phase == "recover" else 1, phase, kind)
    for seconds in (0.0, -3.0, math.nan, "1"):
        with pytest.raises(RecoveryError, match=r"^seconds of a mishap of trainer"):
            _given(Mishap("trainer", 1, "update", "slow", 1.0), "seconds", seconds)
    with pytest.raises(RecoveryError, match="a mishap of 7"):
        _given(Mishap("trainer", 1, "update"), "member", 7)


def test_a_mishap_that_the_job_never_comes_to_is_refused(tmp_path: Path) -> None:
    late = Mishap("trainer", 11, "update")
    with pytest.raises(RecoveryError, match=r"beyond the last step.*at most step 10"):
        check(SPEC, RolePlan(mishaps=(late,)), tmp_path / "a")
    for kind, step in (("disk_full", 3), ("corrupt", 9)):
        with pytest.raises(RecoveryError, match=r"would never happen.*a step with a checkpoint"):
            check(SPEC, RolePlan(checkpoint_every=4, mishaps=(Mishap("trainer", step, "publish", kind),)), tmp_path)
    good = (Mishap("trainer", 4, "publish", "corrupt"), Mishap("trainer", 10, "publish", "disk_full"))
    check(SPEC, RolePlan(checkpoint_every=4, mishaps=(*good, Mishap("trainer", 3, "publish"))), tmp_path)
    with pytest.raises(RecoveryError, match=r"beyond the last step.*at most step 3"):
        SwapPlan(MODEL, steps=3, mishaps=(Mishap("trainer-0", 4, "update"),))
    with pytest.raises(RecoveryError, match="would never happen"):
        SwapPlan(MODEL, mishaps=(Mishap("trainer-0", 4, "publish"),))
    with pytest.raises(RecoveryError, match="would never happen"):
        SwapPlan(MODEL, driver="sharded", snapshot_every=2, mishaps=(Mishap("trainer-0", 3, "publish"),))
    SwapPlan(MODEL, driver="sharded", mishaps=(Mishap("trainer-0", 3, "publish"),))
    with pytest.raises(RecoveryError, match=r"phase wait of trainer-1.*of a spare"):
        SwapPlan(MODEL, driver="sharded", mishaps=(Mishap("trainer-1", 3, "wait"), Mishap("trainer-2", 3, "wait")))
    for driver, kind in (("replicated", "kill"), ("sharded", "hang")):
        with pytest.raises(RecoveryError, match=r"mishaps in phase wait.*Expected: kind kill, driver sharded"):
            SwapPlan(MODEL, driver=driver, mishaps=(Mishap("trainer-2", 3, "wait", kind),))


def _models(tmp_path: Path) -> dict[str, Path]:
    for name, config in (("none", None), ("broken", "{"), ("list", "[]"), ("weightless", "{}")):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
    for name, damage in (("cut off", lambda weights: weights[:-100]), ("overwritten", lambda weights: b"x" * 64)):
        weights = damage((MODEL / "model.safetensors").read_bytes())
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((MODEL / "config.json").read_bytes())
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    return {
        r"weights that cannot be read.*truncated": tmp_path / "cut off",
        r"weights that cannot be read": tmp_path / "overwritten",
        "no such directory": tmp_path / "nowhere",
        "no readable config.json": tmp_path / "none",
        r"no readable config.json \(Expecting": tmp_path / "broken",
        "no JSON object": tmp_path / "list",
        "no weights": tmp_path / "weightless",
    }


def test_a_wrong_model_is_refused_and_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, model in _models(tmp_path).items():
        refused = pytest.raises(RecoveryError, match=f"{words}.*Expected: the directory of a checkpoint.*What to do")
        with refused:
            hot_swap(SwapPlan(model), out)
        with refused:
            Job(RunSpec(model, settings=SPEC.settings), out)
    assert not out.exists()
    with pytest.raises(RecoveryError, match=r"None: a model that is no path"):
        usable_model(None)
    check(SPEC, RolePlan(), out)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        refused = pytest.raises(RecoveryError, match=r"no folder for a job.*new or empty.*choose another")
        with refused:
            hot_swap(SwapPlan(MODEL), place)
        with refused:
            Job(SPEC, place)
    assert (tmp_path / "file").read_text() == "mine"


def _few(environment: str, steps: int, tmp_path: Path) -> RunSpec:
    """A run of 4 prompts a step that has 11 prompts (10 of the calculator, whose halves are equal)."""
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "1+1=", "answer": 2}\n' * 11)
    file = {"environment": "file", "task_file": str(own), "tasks": 4000}
    changes = file if environment == "file" else {"environment": environment, "tasks": 11}
    return replace(SPEC, settings=replace(SPEC.settings, steps=steps, **changes))


@pytest.mark.parametrize("environment", ["arithmetic", "calculator", "file"])
def test_a_run_that_goes_over_its_prompts_twice_is_refused(environment: str, tmp_path: Path) -> None:
    remedy = r"add prompts to \S+own.jsonl, or" if environment == "file" else "raise tasks, or"
    found = len(pool(_few(environment, 2, tmp_path).settings, 3))  # what the trainer will have
    assert found == (10 if environment == "calculator" else 11)
    words = rf"3 steps of 4 prompts go over {found} prompts more than once.*at most one pass: 2 steps.*{remedy} lower"
    out = tmp_path / "out"
    for made in (Job, start_job):
        with pytest.raises(RecoveryError, match=words):
            made(_few(environment, 3, tmp_path), out)
    assert not out.exists()
    Job(_few(environment, 2, tmp_path), out)


def test_a_file_of_prompts_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such file"):
        Job(replace(SPEC, settings=replace(SPEC.settings, environment="file", task_file="none")), tmp_path / "out")
