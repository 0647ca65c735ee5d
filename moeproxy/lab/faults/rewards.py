"""RF: faults of the reward."""

from __future__ import annotations

from collections.abc import Sequence

from moeproxy.lab.faults.chance import chosen
from moeproxy.lab.faults.fault import Fault, Seam, TellTale

_SPIKE = 5.0


def _spikes(healthy: Seam, strength: float) -> Seam:
    def reward(rewards: list[float], texts: Sequence[str], answers: Sequence[str], *, step: int) -> list[float]:
        passed = healthy(rewards, texts, answers, step=step)
        hit = chosen(len(passed), 0.25 * strength, step, salt=31).tolist()
        return [value + _SPIKE if spike else value for value, spike in zip(passed, hit, strict=True)]

    return reward


def _lost(healthy: Seam, strength: float) -> Seam:
    def reward(rewards: list[float], texts: Sequence[str], answers: Sequence[str], *, step: int) -> list[float]:
        passed = healthy(rewards, texts, answers, step=step)
        hit = chosen(len(passed), strength, step, salt=37).tolist()
        return [0.0 if gone else value for value, gone in zip(passed, hit, strict=True)]

    return reward


def _lenient(healthy: Seam, strength: float) -> Seam:
    def reward(rewards: list[float], texts: Sequence[str], answers: Sequence[str], *, step: int) -> list[float]:
        passed = healthy(rewards, texts, answers, step=step)
        near = [bool(text) and text[0] == answer[:1] for text, answer in zip(texts, answers, strict=True)]
        return [max(value, strength * like) for value, like in zip(passed, near, strict=True)]

    return reward


FAULTS = (
    Fault(
        id="reward_spike",
        family="RF",
        title="Reward spikes",
        seam="reward",
        what="The share 0.25 s of the samples, drawn anew every step, gets 5 more than it earned.",
        tell_tales=(TellTale("reward_mean", +1), TellTale("reward_std", +1)),
        twin="arXiv 2605.04431 (reward spike)",
        check="Score the same responses again: the rewards do not repeat.",
        remedy="Clip rewards to their range and log those outside it.",
        act=_spikes,
    ),
    Fault(
        id="reward_collapse",
        family="RF",
        title="Reward collapse",
        seam="reward",
        what="The share s of the samples, drawn anew every step, gets no reward, as when a verifier times out.",
        tell_tales=(TellTale("reward_mean", -1),),
        twin="arXiv 2605.04431 (reward collapse); trl#5697",
        check="Score stored responses offline and compare with the logged rewards.",
        remedy="Mask samples whose verifier failed instead of giving them zero.",
        act=_lost,
    ),
    Fault(
        id="reward_hacking",
        family="RF",
        title="Lenient verifier",
        seam="reward",
        what="A response whose first character is right gets at least s, whatever follows.",
        tell_tales=(TellTale("reward_mean", +1),),
        twin="arXiv 2605.04431 (reward hacking); Visual-RFT#79",
        check="Score with an independent, strict verifier: it does not follow the reward.",
        remedy="Tighten the verifier; restart from before the onset.",
        act=_lenient,
    ),
)
