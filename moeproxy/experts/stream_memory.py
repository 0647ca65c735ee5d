"""Memory for a streamed pass: how much is free, and tensors that live in a file instead."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint

MOST = 0.7  # share of the free memory that the weights of an ordinary pass may take
_SMALL = 1 << 16  # bytes of a tensor that is not worth a file
_GROUPS = Path("/proc/self/cgroup")
# Where the two versions of control groups are, and the files with limit and use.
_VERSIONS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def should_stream(checkpoint: Checkpoint, dtype: str, device: str) -> bool:
    """Whether the weights, in the dtype asked for, would take more than MOST of the memory that is free.

    Quantised checkpoints are not streamed (`stream_weights`), so for them the answer is no.
    """
    free = free_bytes(device)
    return not is_quantised(checkpoint) and free is not None and weight_bytes(checkpoint, dtype) > MOST * free


def is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether the config says that weights are stored quantised."""
    parts = (checkpoint.config, checkpoint.config.get("text_config") or {})
    return any(part.get("quantization_config") for part in parts)


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of all weights in a dtype ("auto": as stored)."""
    if dtype == "auto":
        return checkpoint.nbytes
    return checkpoint.n_params * getattr(torch, dtype).itemsize


def free_bytes(device: str) -> int | None:
    """Memory that a process may still take, in bytes; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    found = [_proc_available(), *_groups_left()]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _proc_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _groups_left() -> list[int | None]:
    """What is left under the limits of this process's control groups (containers, batch systems)."""
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:  # "4:memory:/path" in version 1, "0::/path" in version 2
        _, controllers, path = line.split(":", 2)
        root, limit, usage = _VERSIONS.get(controllers, (None, "", ""))
        if root is not None:
            # In a container the path may be the one outside, and the container's own group is the root.
            left += [_group_left(folder, limit, usage) for folder in (root / path.lstrip("/"), root)]
    return left


def _group_left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such control group, or its limit is "max"
        return None
    # Cached files count as used, but make room when it is needed.
    cached = sum(int(facts.get(name, 0)) for name in ("active_file", "inactive_file"))
    return most - used + cached


def mapped(tensor: Tensor, scratch: str | Path | None) -> Tensor:
    """Copy a tensor into a file that is mapped into memory and has no name; small tensors are returned as they are.

    The system writes its pages out when memory is short. The file is gone when the last use of the tensor is.

    Raises:
        ProfileError: there is no space for it, or `scratch` is no folder that can be written to.
    """
    if tensor.nbytes < _SMALL:
        return tensor.cpu()
    folder = str(scratch or tempfile.gettempdir())
    try:
        copy = _file_tensor(tensor, folder)
    except OSError as error:
        raise ProfileError(
            f"no room for {tensor.nbytes:,} bytes of hidden states ({error.strerror or error})",
            expected="a folder on a disk with space for the hidden states of all calibration tokens",
            remedy="pass another folder as scratch, or fewer calibration texts",
            where=folder,
        ) from error
    return copy.copy_(tensor)


def _file_tensor(like: Tensor, folder: str) -> Tensor:
    handle, name = tempfile.mkstemp(dir=folder, prefix="moeproxy-")
    try:
        # Space is taken now: a full disk would otherwise kill the process when it writes to the mapping.
        getattr(os, "posix_fallocate", lambda file, start, size: os.truncate(file, size))(handle, 0, like.nbytes)
        return torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    finally:
        os.close(handle)
        os.unlink(name)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists and dicts; anything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(each_tensor(part, change) for part in value)
    if type(value) is dict:
        return {name: each_tensor(part, change) for name, part in value.items()}
    return value
