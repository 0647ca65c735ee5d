"""Score a model on the testbed's tasks: greedy accuracy, chance level, sampled reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from moeproxy.lab.tasks import MAX_ANSWER_CHARS, Task, reward, sample_many
from moeproxy.lab.tokens import EOS_ID, PAD_ID, build_tokenizer

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


@torch.no_grad()
def answer(model: Any, tasks: Sequence[Task], *, batch: int = 256, do_sample: bool = False) -> list[str]:
    """Return the model's answer to every task, greedy unless `do_sample`."""
    tokenizer = build_tokenizer()
    texts: list[str] = []
    for start in range(0, len(tasks), batch):
        encoded = tokenizer([t.prompt for t in tasks[start : start + batch]], padding=True, return_tensors="pt")
        written = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=MAX_ANSWER_CHARS + 1,
            do_sample=do_sample,
            top_k=0 if do_sample else None,
            temperature=1.0 if do_sample else None,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
        )
        texts += tokenizer.batch_decode(written[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
