"""The tool task: a two-turn calculator.

The prompt is a product and a sum, `47*8+36=`. The model calls the tool for the product, `[47*8]`; the environment
writes the result, `>376=`; the model writes the answer, `412`. What the environment wrote is masked from the loss.
A response without a call is an answer from memory, and a call that cannot be read is answered by an error, `>!=`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moeproxy.errors import LabError
from moeproxy.lab.tasks import SPLITS, Task, split_of

SKILL = "calculator"
CALL, CALL_END, RESULT, ERROR = "[", "]", ">", "!"
RESULT_END = "="
TOOL_CHARACTERS = CALL + CALL_END + RESULT + ERROR
_CALL = re.compile(r"\[(\d{1,3})([-+*])(\d{1,3})\]")
_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class ToolTurn:
    """One call and what the environment does next.

    Args:
        call: what the model wrote, up to and with `]`.
        result: what the tool returns; `!` is an error.
        done: whether the environment ends the episode here, so that the model cannot answer.
    """

    call: str
    result: str
    done: bool = False

    @property
    def failed(self) -> bool:
        """Whether the tool returned an error."""
        return self.result == ERROR

    @property
    def text(self) -> str:
        """What the environment appends to the response."""
        return f"{RESULT}{self.result}{RESULT_END}"


def answer_call(written: str) -> ToolTurn:
    """Return the environment's turn for a response that ends in a call; it never raises, as tools answer by errors."""
    match = _CALL.fullmatch(written)
    if match is None:
        return ToolTurn(written, ERROR)
    left, symbol, right = match.groups()
    return ToolTurn(written, str(_OPERATORS[symbol](int(left), int(right))))


def right_call(task: Task) -> str:
    """Return the call that solves a calculator task."""
    return f"{CALL}{task.prompt.partition('+')[0]}{CALL_END}"


def sample_calculator(rng: random.Random, *, split: str = "train") -> Task:
    """Draw one calculator task whose prompt lies in `split`."""
    while True:
        a, b, c = rng.randint(10, 99), rng.randint(2, 9), rng.randint(0, 99)
        prompt = f"{a}*{b}+{c}="
        if split_of(prompt) == split:
            return Task(SKILL, prompt, str(a * b + c))


def sample_calculators(n: int, *, seed: int, split: str) -> list[Task]:
    """Draw `n` calculator tasks of `split` (prompts may repeat).

    Raises:
        LabError: no such split.
    """
    if split not in SPLITS:
        raise LabError(f"unknown split {split!r}", expected=f"one of {', '.join(SPLITS)}")
    rng = random.Random(seed)
    return [sample_calculator(rng, split=split) for _ in range(n)]


def interleaved(first: Sequence[Task], second: Sequence[Task], seed: int) -> list[Task]:
    """Return both lists, each shuffled by `seed`, one task of each in turn: every step sees both in equal parts."""
    rng = random.Random(seed)
    parts = [rng.sample(list(tasks), len(tasks)) for tasks in (first, second)]
    return [task for pair in zip(*parts, strict=True) for task in pair]
