"""Episodes: what the rollout engine generates in one turn, or in two with a tool between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moeproxy.lab.calculator import CALL_END, ToolTurn, answer_call


@dataclass(frozen=True)
class Turn:
    """What one round of sampling gives for B prompts, as lists without padding.

    Args:
        ids: token ids of each continuation, its stop token included when it was sampled.
        logprobs: log-probability in nats of each of these tokens, under the engine's weights and arithmetic.
        choices: experts that each prompt and written token was sent to, int16 (T, L, K); the last token was not read.
    """

    ids: list[list[int]]
    logprobs: list[list[float]]
    choices: list[torch.Tensor]


Sample = Callable[[Sequence[list[int]], Sequence[int]], Turn]
"""Continue token lists until one of the given stop tokens."""


@dataclass(frozen=True)
class Rollouts:
    """Whole responses for B*G prompts, as token lists without padding.

    Args:
        prompt_ids: token ids of each prompt.
        completion_ids: token ids of each response, the environment's tokens among them.
        logprobs: log-probability in nats of each response token; 0 for the environment's.
        env_mask: 1 for each token that the model wrote, 0 for the environment's; None where there is no environment.
        final: text of the last turn, which the reward looks at; None where there is one turn.
        turns: the tool call of each response, or None for a response without one.
        choices: experts that the rollout engine sent each token of prompt and response to (int16 (T, L, K)), but for
            the last, which it never read.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]] | None = None
    final: list[str] | None = None
    turns: list[ToolTurn | None] | None = None
    choices: list[torch.Tensor] | None = field(default=None, compare=False)  # tensors are neither equal nor not


def one_turn(prompt_ids: Sequence[list[int]], turn: Turn) -> Rollouts:
    """Return the rollouts of a task without tools."""
    return Rollouts([list(ids) for ids in prompt_ids], turn.ids, turn.logprobs, choices=turn.choices)


def play(
    sample: Sample,
    tokenizer: Any,
    prompt_ids: Sequence[list[int]],
    answer_calls: Callable[[Sequence[ToolTurn]], Sequence[ToolTurn]],
) -> Rollouts:
    """Let the model write, answer its tool calls, and let it write its answers.

    Args:
        sample: the engine's sampling.
        tokenizer: of the model.
        prompt_ids: token ids of the prompts.
        answer_calls: what lies between environment and engine; it passes the environment's turns on.
    """
    end, eos = tokenizer.convert_tokens_to_ids(CALL_END), tokenizer.eos_token_id
    first = sample(prompt_ids, (eos, end))
    calling = [i for i, ids in enumerate(first.ids) if ids[-1] == end]
    answered = answer_calls([answer_call(_text(tokenizer, first.ids[i])) for i in calling])
    turns = dict(zip(calling, answered, strict=True))
    results = {i: tokenizer(turn.text)["input_ids"] for i, turn in turns.items() if not turn.done}
    contexts = [[*prompt_ids[i], *first.ids[i], *result] for i, result in results.items()]
    second = sample(contexts, (eos,)) if contexts else Turn([], [], [])
    ids, logprobs, masks = list(first.ids), list(first.logprobs), [[1] * len(row) for row in first.ids]
    choices = list(first.choices)
    for (i, result), more, more_logprobs in zip(results.items(), second.ids, second.logprobs, strict=True):
        ids[i] = [*ids[i], *result, *more]
        logprobs[i] = [*logprobs[i], *[0.0] * len(result), *more_logprobs]
        masks[i] = [*masks[i], *[0] * len(result), *[1] * len(more)]
    for i, read in zip(results, second.choices, strict=True):
        choices[i] = read  # the second turn reads everything again
    # An episode that the environment ended at the call has no last turn, and so no answer.
    last = {i: row for i, row in enumerate(first.ids) if i not in turns} | dict(zip(results, second.ids, strict=True))
    final = [_text(tokenizer, last.get(i, [])) for i in range(len(ids))]
    calls = [turns.get(i) for i in range(len(ids))]
    return Rollouts([list(row) for row in prompt_ids], ids, logprobs, masks, final, calls, choices)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)
