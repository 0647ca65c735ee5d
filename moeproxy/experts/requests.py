"""Check what a calibration pass is asked for before hours go into it: texts, lengths, dtype, device, scratch folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.families import lookup

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_LENGTH_KEYS = ("max_position_embeddings", "text_config.max_position_embeddings", "max_seq_len")


def check_request(batch_size: int, device: str, dtype: str, scratch: str | Path | None) -> None:
    """Raise ProfileError for a batch size, device, dtype or folder that cannot be used."""
    if batch_size < 1:
        raise ProfileError(f"batch_size is {batch_size}", expected="1 or more", remedy="use 32")
    if dtype not in DTYPES:
        raise ProfileError(f"dtype '{dtype}' is unknown", expected=f"one of {', '.join(DTYPES)}", remedy="choose one")
    if scratch is not None and not Path(scratch).is_dir():
        raise ProfileError(
            "the scratch folder is not there",
            expected="an existing folder on a disk with space",
            remedy="make it first, or leave it out",
            where=scratch,
        )
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ProfileError(
            f"device '{device}' cannot be used ({reason})",
            expected="a device that this build of torch can compute on",
            remedy="use 'cpu', or 'cuda' with a CUDA build of torch on a machine with a GPU",
        ) from error


def check_texts(prompts: Sequence[str]) -> list[str]:
    """Return the texts as a list; raises ProfileError for one string or for items that are no text."""
    if isinstance(prompts, str):
        raise ProfileError("prompts is one string", expected="a list of texts", remedy="put it into a list")
    texts = list(prompts)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ProfileError(
                f"text {number} is {type(text).__name__}, no text",
                expected="strings",
                remedy="leave out entries without text",
            )
    return texts


def fitted(ids: list[list[int]], checkpoint: Checkpoint, max_tokens: int | None) -> list[list[int]]:
    """Return token ids cut to `max_tokens`; raises ProfileError for texts longer than the model's positions."""
    if max_tokens is not None and max_tokens < 1:
        raise ProfileError(f"max_tokens is {max_tokens}", expected="1 or more", remedy="leave it out for whole texts")
    texts = [text[:max_tokens] for text in ids]
    found = (lookup(checkpoint.config, key) for key in _LENGTH_KEYS)
    limit = next((value for value in found if isinstance(value, int) and value > 0), None)
    longest = max(range(len(texts)), key=lambda number: len(texts[number]))
    if limit is not None and len(texts[longest]) > limit:
        raise ProfileError(
            f"text {longest} has {len(texts[longest]):,} tokens, but the model has {limit:,} positions",
            expected="texts as long as those of the training",
            remedy=f"cut them, or pass max_tokens={limit} (--max-tokens on the command line)",
            where=checkpoint.path,
        )
    return texts
