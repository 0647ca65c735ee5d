"""Proposals for a mapping."""

from __future__ import annotations

import pytest

from moeproxy.traces import suggest


@pytest.mark.parametrize(
    ("column", "signal"),
    [
        ("actor/grad_norm", "grad_norm"),
        ("my_trainer/grad_norm", "grad_norm"),
        ("gradNorm", "grad_norm"),
        ("avg_reward", "reward_mean"),
        ("policyLoss", "policy_loss"),
        ("lr", "learning_rate"),
        ("train.learning_rate", "learning_rate"),
        ("mean_response_length", "response_length"),
        ("colour", None),
        ("eval/reward", None),
        ("max_grad_norm", None),
        ("router_z", None),
        ("", None),
        ("___", None),
    ],
)
def test_suggest(column: str, signal: str | None) -> None:
    found = suggest([column])
    assert (found[column].signal if found else None) == signal


def test_each_signal_once_and_the_surest_first() -> None:
    found = suggest(["x/grad_norm", "grad_norm", "gradnorm"])
    assert set(found) == {"grad_norm"}
    assert found["grad_norm"].score == 1


def test_the_sense_of_the_likeliest_framework() -> None:
    megatron = suggest(["iteration", "lm loss", "loss", "grad norm", "consumed samples"])
    assert megatron["lm loss"].signal == "lm_loss"
    assert suggest(["loss", "epoch", "learning_rate"])["loss"].signal == "total_loss"
