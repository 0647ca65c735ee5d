"""Score a model on the testbed's tasks: greedy accuracy, chance level, sampled reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from moeproxy.lab.calculator import CALL_END, answer_call, right_call, sample_calculators
from moeproxy.lab.tasks import MAX_ANSWER_CHARS, Task, reward, sample_many
from moeproxy.lab.tokens import EOS_ID, PAD_ID, build_tokenizer, encode

TEST_SEED = 7


@dataclass(frozen=True)
class Accuracy:
    """Greedy accuracy on a set of tasks.

    Args:
        mean: mean over skills, 0 to 1.
        by_skill: accuracy of each skill.
        chance: mean over skills of the best constant answer's accuracy on the same tasks.
        n: number of tasks.
    """

    mean: float
    by_skill: dict[str, float]
    chance: float
    n: int

    @property
    def above_chance(self) -> float:
        """Accuracy minus chance."""
        return self.mean - self.chance


def accuracy(model: PreTrainedModel, skills: Sequence[str], *, n: int, split: str, seed: int = TEST_SEED) -> Accuracy:
    """Return the greedy accuracy of `model` on `n` distinct tasks of `split`, the skills in equal parts."""
    tasks = sample_many(n, seed=seed, split=split, skills=skills, distinct=True)
    right = [reward(text, task.answer) for text, task in zip(answer(model, tasks), tasks, strict=True)]
    by_skill, chance = {}, []
    for skill in skills:
        mine = [(r, t.answer) for r, t in zip(right, tasks, strict=True) if t.skill == skill]
        by_skill[skill] = sum(r for r, _ in mine) / len(mine)
        chance.append(Counter(a for _, a in mine).most_common(1)[0][1] / len(mine))
    return Accuracy(sum(by_skill.values()) / len(skills), by_skill, sum(chance) / len(skills), n)


def sampled_reward(model: PreTrainedModel, skills: Sequence[str], *, n: int, split: str, seed: int) -> float:
    """Return the mean reward of one sample at temperature 1 for each of `n` tasks (what GRPO sees at step 0)."""
    tasks = sample_many(n, seed=TEST_SEED, split=split, skills=skills)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        texts = answer(model, tasks, do_sample=True)
    return sum(reward(text, task.answer) for text, task in zip(texts, tasks, strict=True)) / n


def tool_accuracy(
    model: PreTrainedModel, *, n: int = 280, split: str = "test", sampled: bool = True
) -> dict[str, float]:
    """Return how a model does on `n` calculator tasks: shares of right answers and right calls, greedy and sampled.

    Returns:
        `accuracy` and `right_calls` of greedy decoding; with `sampled` also `sampled_reward` at temperature 1.
    """
    tasks = sample_calculators(n, seed=TEST_SEED, split=split)
    greedy = converse(model, [task.prompt for task in tasks])
    measured = {
        "accuracy": _share(reward(final, task.answer) for (_, final), task in zip(greedy, tasks, strict=True)),
        "right_calls": _share(call == right_call(task) for (call, _), task in zip(greedy, tasks, strict=True)),
    }
    if sampled:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = converse(model, [task.prompt for task in tasks], do_sample=True)
        measured["sampled_reward"] = _share(reward(f, t.answer) for (_, f), t in zip(drawn, tasks, strict=True))
    return {name: round(value, 4) for name, value in measured.items()}


def _share(hits: Iterable[float]) -> float:
    values = list(hits)
    return sum(values) / len(values)


def converse(model: PreTrainedModel, prompts: Sequence[str], *, do_sample: bool = False) -> list[tuple[str, str]]:
    """Return (call, answer) of each prompt of the calculator; the call is empty where the model made none."""
    end = encode(CALL_END)[0]
    first = _continue(model, prompts, do_sample=do_sample, stops=(EOS_ID, end))
    calling = [i for i, text in enumerate(first) if text.endswith(CALL_END)]
    seconds = [prompts[i] + first[i] + answer_call(first[i]).text for i in calling]
    answers = dict(zip(calling, _continue(model, seconds, do_sample=do_sample) if seconds else [], strict=True))
    return [(text, answers[i]) if i in answers else ("", text) for i, text in enumerate(first)]


def answer(model: Any, tasks: Sequence[Task], *, batch: int = 256, do_sample: bool = False) -> list[str]:
    """Return the model's answer to every task, greedy unless `do_sample`."""
    return _continue(model, [task.prompt for task in tasks], batch=batch, do_sample=do_sample)


@torch.no_grad()
def _continue(
    model: Any, prompts: Sequence[str], *, batch: int = 256, do_sample: bool = False, stops: Sequence[int] = (EOS_ID,)
) -> list[str]:
    tokenizer = build_tokenizer(tools=True)
    texts: list[str] = []
    for start in range(0, len(prompts), batch):
        encoded = tokenizer(list(prompts[start : start + batch]), padding=True, return_tensors="pt")
        written = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=MAX_ANSWER_CHARS + 1,
            do_sample=do_sample,
            top_k=0 if do_sample else None,
            temperature=1.0 if do_sample else None,
            pad_token_id=PAD_ID,
            eos_token_id=list(stops),
        )
        texts += tokenizer.batch_decode(written[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
