"""Read single tensors of a checkpoint by their place in the file; values that are not finite are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from moeproxy.errors import CheckpointError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import is_finite, not_finite

# Types by safetensors' names; the sub-byte ones are quantised and not read here.
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_MOST = 1 << 26  # bytes a read call asks for


class TensorReader:
    """Reads tensors with plain file reads, so that a file of any size takes no address space.

    A context manager: files stay open within the block.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def read(self, name: str) -> Tensor:
        """A stored tensor in its own dtype, on the CPU.

        Raises:
            CheckpointError: it holds NaN or infinite values, or its file is shorter than its header says.
        """
        value = torch.empty(self._checkpoint.tensors[name].shape, dtype=self._type(name))
        self._fill(name, value)
        return value

    def read_into(self, name: str, place: Tensor) -> None:
        """Read a stored tensor into memory of its shape, converting dtype and device where they differ."""
        same = _TYPES.get(self._checkpoint.tensors[name].dtype) == place.dtype
        if same and place.device.type == "cpu" and place.is_contiguous():
            self._fill(name, place)
        else:
            place.copy_(self.read(name))

    def check(self, names: Iterable[str]) -> None:
        """Read tensors piece by piece only to see that they are finite."""
        for name in names:
            info = self._checkpoint.tensors[name]
            size, kind = info.n_params, self._type(name)
            buffer = torch.empty(min(size, _MOST // 4), dtype=kind)
            for start in range(0, size, max(len(buffer), 1)):
                self._fill(name, buffer[: size - start], start)

    def _fill(self, name: str, value: Tensor, start: int = 0) -> None:
        """Read elements from number `start` on into contiguous memory."""
        info = self._checkpoint.tensors[name]
        array: Any = value.view(-1).view(torch.uint8).numpy()
        view, place = memoryview(array), info.offset + start * value.element_size()
        handle, done = self._open(info.file), 0
        while done < len(view):
            got = os.preadv(handle, [view[done : done + _MOST]], place + done)
            if got == 0:
                raise self._error(name, f"the file ends within tensor '{name}'", "a complete file")
            done += got
        if not is_finite(value):
            raise not_finite(self._checkpoint.path / info.file, name)

    def _type(self, name: str) -> torch.dtype:
        stored = self._checkpoint.tensors[name].dtype
        if stored not in _TYPES:
            raise self._error(name, f"tensor '{name}' has the dtype {stored}", "a dtype that torch has")
        return _TYPES[stored]

    def _open(self, file: str) -> int:
        if file not in self._files:
            path = self._checkpoint.path / file
            try:
                self._files[file] = os.open(path, os.O_RDONLY)
            except OSError as error:
                found = f"the file cannot be read ({error.strerror or error})"
                remedy = "restore it, or give yourself the right to read it"
                raise CheckpointError(found, expected="the weights", remedy=remedy, where=path) from error
        return self._files[file]

    def _error(self, name: str, found: str, expected: str) -> CheckpointError:
        file = self._checkpoint.path / self._checkpoint.tensors[name].file
        return CheckpointError(found, expected=expected, remedy="download or copy this file again", where=file)
