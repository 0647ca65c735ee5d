"""The testbed's character tokenizer: one token a character, no merges, so that a token is easy to name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moeproxy.lab.calculator import TOOL_CHARACTERS
from moeproxy.lab.tasks import DIGITS, LETTERS, SKILLS, Task

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "=" + DIGITS + "".join(SKILLS) + LETTERS
# The tool's characters come last, so that a model without them has the same ids for all others.
_ID_OF = {token: index for index, token in enumerate([PAD, BOS, EOS, *CHARACTERS, *TOOL_CHARACTERS])}
IGNORED_LABEL = -100  # what transformers' cross-entropy skips


def build_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the testbed models (fixed vocabulary, pads on the left as generation needs).

    Args:
        tools: with the characters of tool calls, as the models that know the calculator have it.
    """
    vocabulary = {token: index for token, index in _ID_OF.items() if index < vocabulary_size(tools=tools)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def vocabulary_size(*, tools: bool = False) -> int:
    """Return the number of tokens, the three special ones included."""
    return len(_ID_OF) - (0 if tools else len(TOOL_CHARACTERS))


def encode(text: str) -> list[int]:
    """Return the token ids of `text`: what the tokenizer gives, without its cost of 50 microseconds a call."""
    return [_ID_OF[character] for character in text]


def supervised_batch(tasks: Sequence[Task], answers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_ids` and `labels` (B, T) int64 for prompt + answer + end; only the answer and the end count."""
    pairs = zip(tasks, answers, strict=True)
    return labelled_batch([[(encode(task.prompt), False), ([*encode(answer), EOS_ID], True)] for task, answer in pairs])


def labelled_batch(rows: Sequence[Sequence[tuple[list[int], bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_ids` and `labels` (B, T) int64 of rows made of parts: token ids, and whether they are learned."""
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids_BT = torch.full((len(rows), width), PAD_ID)
    labels_BT = torch.full((len(rows), width), IGNORED_LABEL)
    for index, row in enumerate(rows):
        whole = [token for ids, _ in row for token in ids]
        learned = [token if counts else IGNORED_LABEL for ids, counts in row for token in ids]
        ids_BT[index, : len(whole)] = torch.tensor(whole)
        labels_BT[index, : len(whole)] = torch.tensor(learned)
    return ids_BT, labels_BT
