"""Digests of a training state: one short hash for each tensor, so that two runs can be compared without keeping either.

A line of the log is one step. A step that was done again after a restart has several lines, and all of them count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.recovery.events import is_torn, mend

FORMAT = "moeproxy.digests"
VERSION = 1
FILE = "digests.jsonl"

PARTS = ("random", "batch", "optimizer", "weights")
"""The parts of a step, causes first: generators, what was generated, the optimizer's moments, the weights."""

Digests = dict[str, str]
"""Name of each tensor ("weights/model.norm.weight") -> 16 hex digits."""


def digest(value: Any) -> str:
    """Return 16 hex digits that are equal for equal dtype, shape and bits (NaN equals the same NaN, -0 is not 0)."""
    hashed = hashlib.blake2b(digest_size=8)
    if _is_tensor(value):
        import torch  # here: comparing two logs needs no torch

        hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        hashed.update(flat.view(torch.uint8).numpy())
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or plain value) of nested mappings; a list of numbers is one value."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}/{key}" if name else str(key))
    elif isinstance(state, (list, tuple)) and any(isinstance(item, Mapping) or _is_tensor(item) for item in state):
        for number, value in enumerate(state):
            yield from leaves(value, f"{name}/{number}")
    else:
        yield name, state


def digests(state: Mapping[str, Any]) -> Digests:
    """Return the digest of every tensor and value of a state.

    Args:
        state: nested mappings; those parts that `PARTS` names are taken, in that order.
    """
    return {name: digest(value) for part in PARTS if part in state for name, value in leaves(state[part], part)}


class DigestLog:
    """Writer of a digest log; every line is written at once and whole, so a killed run loses none that it finished.

    Args:
        path: of the file, `digests.jsonl` in a run's folder; lines are added to one that exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        mend(path)

    def add(self, step: int, found: Mapping[str, str]) -> None:
        """Append the digests after a step."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"format": FORMAT, "version": VERSION, "step": step, "digests": dict(found)}
        with open(self._path, "ab", buffering=0) as stream:
            stream.write((json.dumps(line) + "\n").encode())


def read_digests(path: Path) -> dict[int, list[Digests]]:
    """Return the digests of every step, several where a step was done more than once.

    A last line that a crash cut short is left out.

    Raises:
        RecoveryError: the file is absent or something else.
    """
    found: dict[int, list[Digests]] = {}
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            if is_torn(line):
                continue
            stored = json.loads(line)
            if (stored["format"], stored["version"]) != (FORMAT, VERSION):
                raise ValueError(f"a line of {stored['format']!r}, version {stored['version']!r}")
            found.setdefault(int(stored["step"]), []).append(dict(stored["digests"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecoveryError(
            f"no log of digests ({error})", where=path, expected=f"{FORMAT}, version {VERSION}"
        ) from error
    return found
