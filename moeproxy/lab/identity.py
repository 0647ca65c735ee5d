"""What a run's model is: an MoE checkpoint, or, as a control only, a small dense model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from transformers import AutoConfig

from moeproxy.errors import CheckpointError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.files import sha256_file

DENSE = "dense"
"""The method that traces of a dense control name; only with it a model without experts is run."""


@dataclass(frozen=True)
class Identity:
    """What a trace says of its model: routed experts in each layer (0 when dense) and the checkpoint's fingerprint."""

    n_experts: int
    fingerprint: str


def identify(path: Path, method: str) -> Identity:
    """Return the identity of the checkpoint at `path`.

    Raises:
        CheckpointError: it is no usable MoE checkpoint; or, for the method `dense`, it has experts.
    """
    if method != DENSE:
        checkpoint = Checkpoint.open(path)
        return Identity(checkpoint.n_experts, checkpoint.fingerprint)
    config = AutoConfig.from_pretrained(path)
    if any("expert" in name for name in config.to_dict()):
        raise CheckpointError(
            "the model has experts", where=path, expected=f"a dense model, as the method {DENSE!r} says"
        )
    return Identity(0, model_hash(path)[:16])


def model_hash(path: Path) -> str:
    """Return a hash of a checkpoint's config and weights (all bytes: proxies of equal shape differ only there)."""
    files = [Path(path) / "config.json", *sorted(Path(path).glob("*.safetensors"))]
    # A sweep asks for the same few models a thousand times; a file that changed is hashed again.
    return _hash(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=64)
def _hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    return hashlib.sha256("".join(sha256_file(file) for file, _, _ in files).encode()).hexdigest()
