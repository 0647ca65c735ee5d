"""Write a proxy's shards from byte ranges of the checkpoint's, without holding a tensor in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

import numpy as np

from moeproxy.errors import CheckpointError, ProxyError
from moeproxy.experts.shards import Shard
from moeproxy.proxy.merge import Part, mean_bytes
from moeproxy.proxy.rewrite import Copy

__all__ = ["write_shard"]

# Small enough to stay in a processor's cache between reading, checking and writing.
_CHUNK = 1 << 20
_ALIGN = 8


def write_shard(source: Shard, copies: list[Copy], out: Path, moved: Callable[[int], None]) -> None:
    """Write one safetensors file from byte ranges of another.

    Args:
        source: the shard to read.
        copies: what to write, in order.
        out: the new file.
        moved: called with the number of bytes after each chunk.

    Raises:
        ProxyError: a copied tensor holds NaN or infinite values.
    """
    with _Sources() as sources, out.open("wb") as writer:
        writer.write(_header(copies, source.metadata))
        reader = sources.open(source.path)
        for copy in copies:
            if copy.change:
                writer.write(copy.change(b"".join(sources.chunks(reader, source.path, *copy.ranges[0]))))
                moved(copy.nbytes)
                continue
            for chunk in _mixed_chunks(copy, sources) if copy.mixed else _plain_chunks(copy, sources, source.path):
                writer.write(chunk)
                moved(len(chunk))


class _Sources:
    """Files that are read from, each opened once and closed at the end, and the one buffer that all are read into."""

    def __init__(self) -> None:
        self._stack, self._readers = ExitStack(), dict[Path, BufferedReader]()
        self._buffer = memoryview(bytearray(_CHUNK))

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, path: Path) -> BufferedReader:
        """The open file."""
        if path not in self._readers:
            self._readers[path] = self._stack.enter_context(_opened(path))
        return self._readers[path]

    def chunks(self, reader: BufferedReader, path: Path, offset: int, length: int) -> Iterator[memoryview]:
        """Pieces of a byte range of an open file, each of at most `_CHUNK` bytes and good until the next."""
        try:
            reader.seek(offset)
            while length:
                size = reader.readinto(self._buffer[: min(length, len(self._buffer))])
                if not size:
                    raise _unreadable(path, "it became shorter while it was read")
                length -= size
                yield self._buffer[:size]
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from error


def _plain_chunks(copy: Copy, sources: _Sources, path: Path) -> Iterator[memoryview]:
    reader = sources.open(path)
    for offset, length in copy.ranges:
        for chunk in sources.chunks(reader, path, offset, length):
            _check_finite(chunk, copy.info.dtype, copy.source, path)
            yield chunk


def _mixed_chunks(copy: Copy, sources: _Sources) -> Iterator[bytes]:
    def read(part: Part, start: int, size: int) -> bytes:
        data = b"".join(sources.chunks(sources.open(part.path), part.path, part.offset + start, size))
        _check_finite(data, copy.info.dtype, part.name, part.path)
        return data

    for stretch in copy.mixed:
        yield from mean_bytes(stretch, copy.info.dtype, _CHUNK, read)


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _header(copies: list[Copy], metadata: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for copy in copies:
        stop = position + copy.nbytes
        entries[copy.name] = {"dtype": copy.info.dtype, "shape": copy.shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the shard cannot be read ({why})",
        expected="the file that was opened",
        remedy="open the checkpoint again when nothing else changes it",
        where=path,
    )


# dtype -> (integer of the same width, exponent bits): all exponent bits set means NaN or infinite.
_EXPONENT = {
    "F64": (np.uint64, 0x7FF0000000000000), "F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}  # fmt: skip


def _check_finite(chunk: bytes | memoryview, dtype: str, name: str, path: Path) -> None:
    if dtype not in _EXPONENT:
        return
    integer, bits = _EXPONENT[dtype]
    mask = integer(bits)
    if bool(((np.frombuffer(chunk, dtype=integer) & mask) == mask).any()):
        raise ProxyError(
            f"tensor '{name}' holds NaN or infinite weights",
            expected="finite weights",
            remedy="go back to an earlier checkpoint of the run, or download this file again",
            where=path,
        )
