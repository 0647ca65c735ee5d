"""Load a checkpoint's model and tokenizer through transformers, offline, and look for broken weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from moeproxy.errors import CheckpointError, ProfileError
from moeproxy.experts.checkpoint import Checkpoint


def load_model(checkpoint: Checkpoint, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """Return the causal language model in eval mode, with grouped matrix multiplication where its experts can.

    Raises:
        CheckpointError: transformers cannot build the model, or weights are missing.
    """
    from transformers import AutoModelForCausalLM

    # Families whose experts module has a form of its own refuse the choice of an implementation.
    fast = {"experts_implementation": "grouped_mm"} if checkpoint.family.grouped_mm else {}
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                **fast,
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise unloadable(error, checkpoint) from error
    model, info = loaded
    if info["missing_keys"]:
        raise missing(info["missing_keys"], checkpoint)
    return model.to(device).eval()


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "spiece.model",
)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's tokenizer; raises ProfileError naming the directory if it has none."""
    from transformers import AutoTokenizer

    # Without these files transformers makes an empty tokenizer of the model's type, and no error.
    if not any(any(checkpoint.path.glob(name)) for name in _TOKENIZER_FILES):
        raise _no_tokenizer(checkpoint, f"no {', '.join(_TOKENIZER_FILES[:3])}")
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise _no_tokenizer(checkpoint, _first_line(error)) from error


def _no_tokenizer(checkpoint: Checkpoint, why: str) -> ProfileError:
    return ProfileError(
        f"the directory has no usable tokenizer ({why})",
        expected="tokenizer files beside the weights",
        remedy="save the tokenizer into the checkpoint directory with save_pretrained",
        where=checkpoint.path,
    )


def find_not_finite(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError naming file and tensor if a weight is NaN or infinite."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bad = [name for name, value in tensors if not is_finite(value)]
    if bad:
        raise not_finite(*(_on_disk(checkpoint) or (checkpoint.path, bad[0])))


def is_finite(value: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinities; reads it once and needs no memory of its size."""
    if not value.is_floating_point() or value.numel() == 0:
        return True
    # The extremes are NaN if any value is; 8-bit floats have no comparison.
    low, high = (value.float() if value.element_size() == 1 else value).aminmax()
    return bool(low.isfinite() & high.isfinite())


def not_finite(file: Path, tensor: str) -> CheckpointError:
    """The error for a stored tensor with NaN or infinite values."""
    return CheckpointError(
        f"tensor '{tensor}' holds NaN or infinite weights",
        expected="finite weights",
        remedy="go back to an earlier checkpoint of the run, or download this file again",
        where=file,
    )


def missing(names: Collection[str], checkpoint: Checkpoint) -> CheckpointError:
    """The error for tensors of the model that are not in the weights."""
    return CheckpointError(
        f"{len(names)} tensors are missing from the weights, first '{min(names)}'",
        expected="every weight of the model",
        remedy="check that all shards are there and belong to the same model",
        where=checkpoint.path,
    )


def unloadable(error: BaseException, checkpoint: Checkpoint) -> CheckpointError:
    """The error for a model that transformers refuses."""
    return CheckpointError(
        f"transformers cannot load the model ({_first_line(error)})",
        expected="a checkpoint that AutoModelForCausalLM loads",
        remedy="load it with transformers alone to see the whole message",
        where=checkpoint.path,
    )


def _on_disk(checkpoint: Checkpoint) -> tuple[Path, str] | None:
    """First stored tensor that is not finite: its file and name."""
    for shard in checkpoint.shards:
        with safe_open(shard.path, framework="pt") as stream:
            for name in shard.tensors:
                value = stream.get_tensor(name)
                if not is_finite(value):
                    return shard.path, name
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Switch transformers' own progress bars off and back to what they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
