"""The testbed's character tokenizer: one token a character, no merges, so that a token is easy to name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moeproxy.lab.tasks import DIGITS, LETTERS, SKILLS, Task

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "=" + DIGITS + "".join(SKILLS) + LETTERS
_ID_OF = {token: index for index, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
IGNORED_LABEL = -100  # what transformers' cross-entropy skips


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of every testbed model (fixed vocabulary, pads on the left as generation needs)."""
    inner = Tokenizer(models.WordLevel(_ID_OF, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def vocabulary_size() -> int:
    """Return the number of tokens, the three special ones included."""
    return len(_ID_OF)


def encode(text: str) -> list[int]:
    """Return the token ids of `text`: what the tokenizer gives, without its cost of 50 microseconds a call."""
    return [_ID_OF[character] for character in text]


def supervised_batch(tasks: Sequence[Task], answers: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_ids` and `labels` (B, T) int64 for prompt + answer + end; only the answer and the end count."""
    prompts = [encode(task.prompt) for task in tasks]
    targets = [[*encode(answer), EOS_ID] for answer in answers]
    width = max(len(p) + len(t) for p, t in zip(prompts, targets, strict=True))
    ids = torch.full((len(tasks), width), PAD_ID)
    labels = torch.full((len(tasks), width), IGNORED_LABEL)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        ids[row, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        labels[row, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
    return ids, labels
