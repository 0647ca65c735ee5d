"""The prompts of a run and how their answers are judged: the testbed's tasks, or one's own file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.calculator import TOOL_CHARACTERS, interleaved, sample_calculators
from moeproxy.lab.settings import GRPOSettings
from moeproxy.lab.tasks import RL_SKILLS, Task, reward, sample_many

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_OWN = "own"


def pool(settings: GRPOSettings, seed: int) -> list[Task]:
    """Return the prompts of a run, in the order in which `calculator` runs see them (others are shuffled by TRL).

    Raises:
        LabError: the task file cannot be used.
    """
    if settings.environment == "file":
        return read_tasks(Path(settings.task_file))
    tools = settings.environment == "calculator"
    n = settings.tasks // 2 if tools else settings.tasks
    tasks = sample_many(n, seed=settings.task_seed, split="rl", skills=RL_SKILLS)
    if not tools:
        return tasks
    return interleaved(tasks, sample_calculators(n, seed=settings.task_seed, split="rl"), seed)


def read_tasks(path: Path) -> list[Task]:
    """Read tasks from JSON lines with the keys `prompt` and `answer` (text or a number).

    Raises:
        LabError: the file is missing or empty, or a line is no such object.
    """
    if not path.is_file():
        raise LabError("no such file", where=path, expected='JSON lines {"prompt": ..., "answer": ...}')
    lines = path.read_text("utf-8").splitlines()
    tasks = [_task(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise LabError("the file holds no task", where=path, expected='JSON lines {"prompt": ..., "answer": ...}')
    return tasks


def _task(line: str, path: Path, number: int) -> Task:
    try:
        row: Any = json.loads(line)
        prompt, answer = row["prompt"], row["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"line {number} is no task ({error})", where=path, expected='{"prompt": ..., "answer": ...}'
        ) from error
    usable = isinstance(answer, (str, int, float)) and not isinstance(answer, bool)
    if not isinstance(prompt, str) or not prompt or not usable:
        raise LabError(f"line {number}: the prompt is no text, or the answer neither text nor number", where=path)
    return Task(_OWN, prompt, str(answer))


def scorer(settings: GRPOSettings) -> Callable[[str, str], float]:
    """Return the reward function (text, answer) of a run's environment."""
    return number_reward if settings.environment == "file" else reward


def number_reward(text: str, answer: str) -> float:
    """Return 1.0 when the last number of `text` is that of `answer`, as GSM8K is scored; texts without one must agree.

    Thousands separators do not count; `#### 12` and `12.0` are both 12.
    """
    written, right = last_number(text), last_number(answer)
    if right is None:
        return float(text.strip() == answer.strip())
    return float(written == right)


def last_number(text: str) -> float | None:
    """Return the last number in `text`, or None."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def check_vocabulary(tasks: list[Task], settings: GRPOSettings, vocabulary: set[str], where: Path) -> None:
    """Refuse a model whose tokenizer lacks characters of the testbed's tasks; one's own prompts are not checked.

    Raises:
        LabError: characters are missing.
    """
    if settings.environment == "file":
        return
    tools = TOOL_CHARACTERS if settings.environment == "calculator" else ""
    unknown = {c for task in tasks for c in task.prompt} | set(tools)
    unknown -= vocabulary
    if unknown:
        raise LabError(
            f"the tokenizer lacks the characters {''.join(sorted(unknown))!r} of the testbed's tasks",
            where=where,
            expected="a testbed model that knows them (the calculator: those named -tools), or a proxy of one",
        )
