"""What the notebooks measure the shipped testbed models with: unseen texts, and accuracy on unseen tasks."""

from __future__ import annotations

from transformers import PreTrainedModel

from moeproxy.lab.pruning_study import N_EVALUATED
from moeproxy.lab.scoring import TEST_SEED, accuracy
from moeproxy.lab.tasks import RL_SKILLS, Task, sample_many


def unseen_texts(n: int = N_EVALUATED["test"]) -> list[str]:
    """Return `n` arithmetic tasks of the test split with their answers; no calibration text is among them."""
    return [task.prompt + task.answer for task in _unseen(n)]


def unseen_prompts(n: int = N_EVALUATED["test"]) -> list[str]:
    """Return the same tasks without their answers: random numbers, which no model can predict."""
    return [task.prompt for task in _unseen(n)]


def _unseen(n: int) -> list[Task]:
    return sample_many(n, seed=TEST_SEED, split="test", skills=RL_SKILLS, distinct=True)


def task_accuracy(model: PreTrainedModel) -> float:
    """Return the greedy accuracy of a model on the same tasks (mean of the skills)."""
    return accuracy(model, RL_SKILLS, n=N_EVALUATED["test"], split="test").mean
