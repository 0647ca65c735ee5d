"""Tasks have one right answer, splits never meet, the tokenizer is the character table."""

from __future__ import annotations

import random

import pytest

from moeproxy.errors import LabError
from moeproxy.lab import tasks
from moeproxy.lab.tokens import build_tokenizer, encode, supervised_batch


@pytest.mark.parametrize("symbol", tasks.RL_SKILLS)
def test_arithmetic_answers_are_what_python_computes(symbol: str) -> None:
    for task in tasks.sample_many(200, seed=1, skills=(symbol,)):
        assert int(task.answer) == eval(task.prompt.removesuffix("="))


@pytest.mark.parametrize(
    ("skill", "prompt", "answer"),
    [
        ("R", "Rabc=", "cba"),
        ("S", "Scab=", "abc"),
        ("M", "Mcab=", "c"),
        ("C", "Caj=", "ba"),
        ("D", "Dab=", "aabb"),
        ("U", "Uaba=", "ab"),
        ("F", "Fabc=", "ac"),
        ("L", "Labc=", "3"),
        ("T", "T120=", "021"),
        ("O", "O201=", "012"),
        ("G", "G291=", "9"),
        ("B", "B79=", "6"),
    ],
)
def test_string_skills_by_hand(skill: str, prompt: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt[1:-1]

    class Fixed(random.Random):
        def randint(self, a: int, b: int) -> int:
            return len(text)

        letters = iter(text)

        def choice(self, seq):
            return next(self.letters)

    assert tasks._MAKERS[skill](Fixed()) == (prompt, answer)


def test_splits_are_disjoint_and_complete() -> None:
    seen = {split: {t.prompt for t in tasks.sample_many(400, seed=0, split=split)} for split in tasks.SPLITS}
    for split, prompts in seen.items():
        assert {tasks.split_of(p) for p in prompts} == {split}


def test_same_seed_same_tasks() -> None:
    assert tasks.sample_many(50, seed=3) == tasks.sample_many(50, seed=3)
    assert tasks.sample_many(50, seed=3) != tasks.sample_many(50, seed=4)


def test_asking_for_more_distinct_prompts_than_exist_ends_with_an_error() -> None:
    with pytest.raises(LabError, match="too few distinct prompts"):
        tasks.sample_many(200, seed=0, split="test", skills=("*",), distinct=True)


@pytest.mark.parametrize(("text", "value"), [("12", 1.0), (" 12 ", 1.0), ("012", 0.0), ("", 0.0), ("121", 0.0)])
def test_reward_is_exact(text: str, value: float) -> None:
    assert tasks.reward(text, "12") == value


def test_fast_encoding_equals_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    for task in tasks.sample_many(64, seed=0):
        text = task.prompt + task.answer
        assert encode(text) == tokenizer(text)["input_ids"]
        assert tokenizer.decode(encode(text)) == text


def test_supervised_batch_scores_answer_and_end_only() -> None:
    sums = [tasks.Task("+", "1+1=", "2"), tasks.Task("+", "50+60=", "110")]
    ids, labels = supervised_batch(sums, [t.answer for t in sums])
    assert ids.shape == labels.shape == (2, 10)
    assert labels[0].tolist() == [-100] * 4 + [*encode("2"), 2] + [-100] * 4
    assert labels[1].tolist() == [-100] * 6 + [*encode("110"), 2]
