"""Read safetensors headers and shard indexes, without loading weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 1 << 30
_PICKLE = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

# Bits an element takes, by safetensors dtype name.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: shard file name, dtype, shape, byte offset within the file and size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def n_params(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its header as bytes, size, tensors and free-text metadata."""

    path: Path
    header: bytes
    size: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_shard(path: Path) -> Shard:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file is missing, no safetensors file, or shorter or longer than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length <= min(size, _MAX_HEADER) else b""
    except OSError as error:
        raise _broken(path, f"the shard cannot be read ({error.strerror})") from error
    if size < 8 or len(header) != length:
        raise _broken(path, f"the shard is truncated: {size:,} bytes do not even hold its header")
    entries = _parse(path, header)
    metadata = entries.pop("__metadata__", {})
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((info.offset + info.nbytes for info in tensors.values()), default=8 + length)
    if size != end:
        kind = "truncated" if size < end else "longer than its header says"
        raise _broken(path, f"the shard is {kind}: {size:,} bytes instead of {end:,}")
    return Shard(path, header, size, tensors, metadata)


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise _broken(path, "the shard's header is no JSON") from error
    if not isinstance(entries, dict):
        raise _broken(path, "the shard's header is no JSON object")
    return entries


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        start, stop = entry["data_offsets"]
        shape = tuple(int(n) for n in entry["shape"])
        info = TensorInfo(path.name, entry["dtype"], shape, data_start + start, stop - start)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the shard's header has a bad entry for '{name}'") from error
    bits = DTYPE_BITS.get(info.dtype)
    if bits is not None and info.n_params * bits != info.nbytes * 8:
        raise _broken(path, f"'{name}' has {info.nbytes:,} bytes, which does not fit {info.dtype} {list(shape)}")
    return info


def _broken(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        found,
        expected="a complete safetensors file",
        remedy="download or copy this file again and compare its checksum with the source",
        where=path,
    )


def shard_paths(directory: Path) -> tuple[Path, ...]:
    """Return the weight files of a checkpoint directory, by its index if it has one.

    Raises:
        CheckpointError: no safetensors weights (pickled ones are refused), an unreadable index, or an index that
            names missing files.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return tuple(directory / name for name in _indexed_files(index))
    found = tuple(sorted(directory.glob("*.safetensors")))
    if not found and (pickled := sorted(item.name for item in directory.iterdir() if item.suffix in _PICKLE)):
        raise CheckpointError(
            f"the weights are pickle files ({pickled[0]}), which are not read: loading one can run any code in it",
            expected="safetensors files, which hold nothing but numbers",
            remedy="if you trust the source, load the model with transformers and save it again with save_pretrained",
            where=directory,
        )
    if not found:
        raise CheckpointError(
            "the directory has no safetensors weights",
            expected="model.safetensors, or shards with model.safetensors.index.json",
            remedy="load the model with transformers and save it again with save_pretrained",
            where=directory,
        )
    return found


def check_index(directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError if the directory's index places a tensor in a file that does not hold it."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"the index says that '{name}' is in {file}, which does not hold it",
                expected="an index that belongs to these shards",
                remedy="download or copy index and shards again",
                where=index,
            )


def _indexed_files(index: Path) -> list[str]:
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"the index names files that are not there: {', '.join(missing[:3])}",
            expected=f"all {len(names)} shards in the directory",
            remedy="finish the download or copy",
            where=index,
        )
    return names


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name; file names that leave the directory are refused."""
    try:
        stored = json.loads(index.read_text("utf-8"))["weight_map"]
        if all(Path(file).name == file for file in set(stored.values())):
            return dict(stored)
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise CheckpointError(
        "the shard index cannot be read",
        expected="JSON with a weight_map from tensor name to file name",
        remedy="download or copy this file again",
        where=index,
    )
