"""The key maps are data: they name known signals, and tell the frameworks apart."""

from __future__ import annotations

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces.keys import FRAMEWORKS, GENERIC, custom, recognised, scores
from moeproxy.traces.keys.page import PAGE, page
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS, signal_of

ALL = (*FRAMEWORKS.values(), GENERIC)


@pytest.mark.parametrize("framework", ALL, ids=lambda framework: framework.name)
def test_maps_name_known_signals_once_a_key(framework) -> None:
    names = [key.name for key in framework.keys]
    assert len(names) == len(set(names))
    for key in framework.keys:
        assert not signal_of(key.signal).per_layer
        assert key.divisor > 0
    assert framework.steps
    assert set(framework.infinite) <= set(names)
    if framework.hides_nan is not None:
        assert set(framework.hides_nan) <= set(names)


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
def test_a_log_with_all_keys_and_marks_is_recognised(framework) -> None:
    marks = [part.replace("*", "x") for mark in framework.marks for part in mark.split("&")]
    assert recognised([*(key.name for key in framework.keys), *marks], framework.hints[:1]) is framework


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["step", "loss"], "unknown"),
        (["step", "train/loss", "train/grad_norm"], "unknown"),
        (["loss", "grad_norm", "learning_rate", "epoch"], "transformers"),
        (["train/loss", "train/epoch", "train/global_step"], "transformers"),
        (["loss", "reward", "reward_std", "completion_length", "epoch"], "trl"),
        (["train/loss", "train/reward", "train/reward_std", "train/completions/mean_length"], "trl"),
        (["step", "critic/score/mean", "actor/ppo_kl", "response_length/mean"], "verl"),
        (["step", "critic/score/mean", "actor/total_loss", "actor/ppo_ratio_clipfrac"], "roll"),
        (["iteration", "lm loss", "grad norm"], "megatron-lm"),
        (["loss", "epoch"], "unknown"),
        ([], "unknown"),
    ],
)
def test_recognised(columns: list[str], name: str) -> None:
    assert recognised(columns).name == name


def test_the_page_of_signals_is_up_to_date() -> None:
    said = "run python -m moeproxy.traces.keys.page"
    assert PAGE.read_text(encoding="utf-8") == page(), said
    assert "| verl | `training/rollout_probs_diff_mean` | of probabilities, not of log-probs" in page()


def test_probabilities_never_become_log_probs() -> None:
    for framework in ALL:
        for key in framework.keys:
            if "prob" in key.name and "logprob" not in key.name and "probs_ratio" not in key.name:
                assert key.signal.startswith("prob_")
            if key.signal.startswith("logprob_diff"):
                assert "rollout_probs_diff" not in key.name


def test_log_signals_are_apart_from_those_of_the_lab() -> None:
    assert not set(SIGNALS) & set(LOG_SIGNALS)
    assert signal_of("prob_diff_mean").unit == "probability"
    with pytest.raises(TraceError, match="prob_diff_mean"):
        signal_of("prob_diff_men")


def test_scores_need_a_mark_or_a_hint() -> None:
    assert set(scores(["loss", "grad_norm"]).values()) == {0}
    assert scores(["loss"], ["trainer state"])["transformers"] == 9


def test_custom() -> None:
    framework = custom({"my": "kl"}, "it", FRAMEWORKS["trl"])
    assert (framework.keys[0].name, framework.keys[0].signal, framework.steps) == ("my", "kl", ("it",))
    assert framework.hides_nan == ("loss", "grad_norm")
    with pytest.raises(TraceError, match=r"'my' is mapped to unknown signal 'kll'.*'kl'"):
        custom({"my": "kll"}, None, GENERIC)
