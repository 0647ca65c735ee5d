"""The two-turn calculator: tasks, the tool, demonstrations, episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moeproxy.errors import LabError
from moeproxy.lab import calculator
from moeproxy.lab.calculator import ERROR, ToolTurn, answer_call, right_call
from moeproxy.lab.episode import Turn, play
from moeproxy.lab.tasks import Task, sample_many, split_of
from moeproxy.lab.tokens import EOS, EOS_ID, IGNORED_LABEL, build_tokenizer, encode, labelled_batch, vocabulary_size
from moeproxy.lab.tool_testbed import RECIPES, demonstration


def test_answers_are_what_python_computes_and_splits_hold() -> None:
    for task in calculator.sample_calculators(200, seed=1, split="rl"):
        assert int(task.answer) == eval(task.prompt.removesuffix("="))
        assert split_of(task.prompt) == "rl"
    assert calculator.sample_calculators(9, seed=1, split="test") == calculator.sample_calculators(
        9, seed=1, split="test"
    )
    with pytest.raises(LabError, match="validation"):
        calculator.sample_calculators(1, seed=1, split="typo")


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("[47*8]", "376"),
        ("[1+2]", "3"),
        ("[5-9]", "-4"),
        ("[47*]", ERROR),
        ("]", ERROR),
        ("[4=7*8]", ERROR),
        ("", ERROR),
    ],
)
def test_the_tool_answers_every_call(call: str, result: str) -> None:
    turn = answer_call(call)
    assert (turn.result, turn.failed, turn.done) == (result, result == ERROR, False)
    assert turn.text == f">{result}="


def test_tool_characters_come_after_all_others() -> None:
    plain, tools = build_tokenizer().get_vocab(), build_tokenizer(tools=True).get_vocab()
    assert {token: index for token, index in tools.items() if token in plain} == plain
    assert vocabulary_size(tools=True) == len(tools) == len(plain) + 4
    assert encode("[1*2]>2=") == build_tokenizer(tools=True)("[1*2]>2=")["input_ids"]


def test_labels_cover_what_is_learned_only() -> None:
    ids, labels = labelled_batch([[([5, 6], False), ([7], True), ([8], False), ([9, 2], True)], [([5], True)]])
    assert ids.tolist() == [[5, 6, 7, 8, 9, 2], [5, 0, 0, 0, 0, 0]]
    ignored = IGNORED_LABEL
    assert labels.tolist() == [[ignored, ignored, 7, ignored, 9, 2], [5, *[ignored] * 5]]


def test_a_clean_demonstration_is_right_and_noise_stays_in_its_place() -> None:
    task = Task(calculator.SKILL, "47*8+36=", "412")
    clean = replace(RECIPES["qwen3-moe-tools"], call_noise=0.0, answer_noise=0.0, tool_failures=0.0)
    tokenizer = build_tokenizer(tools=True)

    def text(recipe, seed: int) -> list[str]:
        return [tokenizer.decode(ids) for ids, _ in demonstration(task, recipe, random.Random(seed))]

    assert text(clean, 0) == ["47*8+36=", "[47*8]", ">376=", "412" + EOS]
    assert [learned for _, learned in demonstration(task, clean, random.Random(0))] == [False, True, False, True]
    for seed in range(30):
        _, call, result, answer = text(replace(clean, call_noise=1.0), seed)
        # The answer follows from the result, so a wrong call is what makes it wrong.
        assert result == answer_call(call).text
        assert answer == str(int(result[1:-1]) + 36) + EOS
    failed = text(replace(clean, tool_failures=1.0), 0)
    assert failed[2:] == [">!=", "412" + EOS]


class Script:
    """A sampler that writes what it is told to, and remembers what it was asked to continue."""

    def __init__(self, *rounds: Sequence[str]) -> None:
        self._rounds = [[self._ids(text) for text in texts] for texts in rounds]
        self.asked: list[list[str]] = []

    @staticmethod
    def _ids(text: str) -> list[int]:
        whole = text.removesuffix(EOS)
        return [*encode(whole), *([EOS_ID] if whole != text else [])]

    def __call__(self, contexts: Sequence[list[int]], _stops: Sequence[int]) -> Turn:
        tokenizer = build_tokenizer(tools=True)
        self.asked.append([tokenizer.decode(ids) for ids in contexts])
        ids = self._rounds[len(self.asked) - 1]
        read = [
            torch.full((len(c) + len(row) - 1, 1, 1), len(self.asked)) for c, row in zip(contexts, ids, strict=True)
        ]
        return Turn(ids, [[-1.0] * len(row) for row in ids], read)


PROMPTS = ["47*8+36=", "12+3=", "20*2+1=", "9*9+9="]


def episode(script: Script, answer_calls=lambda turns: turns):
    return play(script, build_tokenizer(tools=True), [encode(p) for p in PROMPTS], answer_calls)


def test_an_episode_is_call_result_answer() -> None:
    script = Script(["[47*8]", "15" + EOS, "[20*]", "123456"], ["412" + EOS, "5"])
    made = episode(script)
    assert script.asked == [PROMPTS, ["47*8+36=[47*8]>376=", "20*2+1=[20*]>!="]]
    assert made.final == ["412", "15", "5", "123456"]
    texts = [build_tokenizer(tools=True).decode(ids, skip_special_tokens=True) for ids in made.completion_ids]
    assert texts == ["[47*8]>376=412", "15", "[20*]>!=5", "123456"]
    assert made.env_mask is not None
    assert made.turns is not None
    assert made.choices is not None
    assert made.env_mask[0] == [1] * 6 + [0] * 5 + [1] * 4
    assert made.logprobs[0] == [-1.0] * 6 + [0.0] * 5 + [-1.0] * 4
    assert [turn is not None and turn.failed for turn in made.turns] == [False, False, True, False]
    # Choices cover every token that was read: all but the last; those of the second turn where there was one.
    wholes = [len(p) + len(c) - 1 for p, c in zip(made.prompt_ids, made.completion_ids, strict=True)]
    assert [len(read) for read in made.choices] == wholes
    assert [int(read[0]) for read in made.choices] == [2, 1, 2, 1]


def test_an_ended_episode_has_no_answer() -> None:
    def end(turns: Sequence[ToolTurn]) -> list[ToolTurn]:
        return [replace(turn, done=True) for turn in turns]

    script = Script(["[47*8]", "15" + EOS, "[20*2]", "1" + EOS])
    made = episode(script, end)
    assert made.final == ["", "15", "", "1"]
    assert len(script.asked) == 1
    assert made.env_mask is not None
    assert made.env_mask[0] == [1] * 6


def test_tasks_are_mixed_in_equal_parts_by_seed() -> None:
    plain, tools = sample_many(20, seed=0), calculator.sample_calculators(20, seed=0, split="rl")
    mixed = calculator.interleaved(plain, tools, 1)
    assert [task.skill == calculator.SKILL for task in mixed] == [False, True] * 20
    assert sorted(map(repr, mixed)) == sorted(map(repr, [*plain, *tools]))
    assert mixed == calculator.interleaved(plain, tools, 1) != calculator.interleaved(plain, tools, 2)


def test_a_right_call_gives_the_product() -> None:
    task = Task(calculator.SKILL, "47*8+36=", "412")
    assert answer_call(right_call(task)).result == "376"
