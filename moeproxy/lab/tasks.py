"""Verifiable tasks of the testbed: sixteen skills on short character strings, and their reward.

Four arithmetic skills are the RL domain, as GSM8K is in arXiv 2608.10823. The other twelve stand for the rest of what a
general model was trained on: they give the experts something to specialise in that the RL domain does not need.
Prompts are split by a hash, so that training, calibration, validation, RL and test never share one.
"""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeproxy.errors import LabError

LETTERS = "abcdefghij"
DIGITS = "0123456789"
RL_SKILLS = ("+", "-", "*", "%")
BACKGROUND_SKILLS = ("R", "S", "M", "C", "D", "U", "F", "L", "T", "O", "G", "B")
SKILLS = RL_SKILLS + BACKGROUND_SKILLS
SPLITS = ("train", "calibration", "validation", "rl", "test")
MAX_ANSWER_CHARS = 10
_TRIES_PER_TASK = 40


@dataclass(frozen=True)
class Task:
    """One prompt with its only right answer.

    Args:
        skill: one of `SKILLS`.
        prompt: what the model reads, ending in `=`.
        answer: what it must write.
    """

    skill: str
    prompt: str
    answer: str


def split_of(prompt: str) -> str:
    """Return the split that a prompt belongs to, by CRC-32.

    70 % train (what the testbed models learned from), 5 % calibration, 5 % validation (choosing details of a method),
    10 % rl (prompts of the GRPO runs: unseen before, as RL prompts are), 10 % test (reported accuracy).
    """
    code = zlib.crc32(prompt.encode())
    bucket = code % 10
    if bucket == 7:
        return "calibration" if code // 10 % 2 else "validation"
    return {8: "rl", 9: "test"}.get(bucket, "train")


def sample(rng: random.Random, *, split: str = "train", skills: Sequence[str] = SKILLS) -> Task:
    """Draw one task of one of `skills` whose prompt lies in `split`."""
    skill = rng.choice(skills)
    while True:
        prompt, answer = _MAKERS[skill](rng)
        if split_of(prompt) == split:
            return Task(skill, prompt, answer)


def sample_many(
    n: int, *, seed: int, split: str = "train", skills: Sequence[str] = SKILLS, distinct: bool = False
) -> list[Task]:
    """Draw `n` tasks, the skills in turn; with `distinct` no prompt comes twice."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    seen: set[str] = set()
    tries = 0
    while len(tasks) < n:
        skill = skills[len(tasks) % len(skills)]
        task = sample(rng, split=split, skills=(skill,))
        tries += 1
        if distinct and task.prompt in seen:
            if tries > _TRIES_PER_TASK * n:
                raise LabError(
                    f"skill {skill!r} has too few distinct prompts in split {split!r} for {n} tasks",
                    remedy="ask for fewer tasks, or allow repeats",
                )
            continue
        seen.add(task.prompt)
        tasks.append(task)
    return tasks


def reward(completion: str, answer: str) -> float:
    """Return 1.0 for the right answer and 0.0 otherwise (spaces around it do not count)."""
    return float(completion.strip() == answer)


_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}


def _arithmetic(symbol: str) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        a = rng.randint(0, 99)
        b = rng.randint(2, 9) if symbol in "*%" else rng.randint(0, 99)
        if symbol == "-" and a < b:
            a, b = b, a
        return f"{a}{symbol}{b}=", str(_OPERATORS[symbol](a, b))

    return make


def _string(symbol: str, alphabet: str, answer: Callable[[str], str]) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 5)))
        return f"{symbol}{text}=", answer(text)

    return make


def _next_letter(text: str) -> str:
    return "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in text)


_MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    **{symbol: _arithmetic(symbol) for symbol in RL_SKILLS},
    "R": _string("R", LETTERS, lambda s: s[::-1]),
    "S": _string("S", LETTERS, lambda s: "".join(sorted(s))),
    "M": _string("M", LETTERS, max),
    "C": _string("C", LETTERS, _next_letter),
    "D": _string("D", LETTERS, lambda s: "".join(c + c for c in s)),
    "U": _string("U", LETTERS, lambda s: "".join(dict.fromkeys(s))),
    "F": _string("F", LETTERS, lambda s: s[0] + s[-1]),
    "L": _string("L", LETTERS, lambda s: str(len(s))),
    "T": _string("T", DIGITS, lambda s: s[::-1]),
    "O": _string("O", DIGITS, lambda s: "".join(sorted(s))),
    "G": _string("G", DIGITS, max),
    "B": _string("B", DIGITS, lambda s: str(sum(map(int, s)) % 10)),
}
