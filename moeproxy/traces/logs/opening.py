"""Files and archives as streams: nothing is written to disk, and a hostile archive is refused in bounded time."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from moeproxy.errors import TraceError

PEEK = 65_536
Stream = Any
"""A readable stream of bytes; those of gzip, tarfile and Arrow have no type in common."""

_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException)

_MARKS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"PK\x03\x04": "zip"}


class HostileError(TraceError):
    """An archive that means harm, or looks like it; it is refused as a whole, whatever else is in it."""


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold before it is refused.

    Args:
        ratio: bytes that come out of one byte, once `grace` bytes came out. Logs reach 50, bombs about 1000.
        grace: bytes that may come out in any case.
        members: files in one archive.
        depth: archives within archives.
    """

    ratio: float = 250.0
    grace: int = 64 << 20
    members: int = 10_000
    depth: int = 3


@dataclass(frozen=True)
class Source:
    """One file to read: its name (in an archive: archive!member) and its bytes; `peek` looks without consuming."""

    name: str
    stream: io.BufferedReader[Any]
    behind: Counted | None = None

    @property
    def cut(self) -> str:
        """Where what was read so far ended before its end ("" if nowhere): a file, or an archive that holds it."""
        layer: Any = self.behind
        while isinstance(layer, Counted):
            if layer.cut:
                return layer.where
            layer = layer.inner
        return ""

    def peek(self) -> bytes:
        """Return the first bytes, at most 64 KiB."""
        return self.stream.peek(PEEK)[:PEEK]


class Counted(io.RawIOBase):
    """A stream that counts what passes; with a budget, it refuses more than that many bytes for each byte behind it."""

    def __init__(self, inner: Stream, where: str, behind: Counted | None = None, limits: Limits | None = None) -> None:
        self.inner, self.where, self._behind, self._limits = inner, where, behind, limits
        self.count = 0
        self.cut = False
        self._failed: TraceError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read up to len(buffer) bytes.

        Raises:
            TraceError: the archive is broken, or holds more than its size can honestly hold. One that was cut short
                (its program still writes, or a copy stopped) ends where it was cut, and `cut` says so.
        """
        # What raised once may say something else the second time, when the next member of an archive is asked for.
        if self.cut:
            return 0
        if self._failed is not None:
            raise self._failed
        try:
            data = self._some(len(buffer))
        except _BROKEN as error:
            if not (self.count and _is_cut(error)):
                self._failed = _broken(self.where, error)
                raise self._failed from error
            data, self.cut = b"", True
        buffer[: len(data)] = data
        self.count += len(data)
        self._check()
        return len(data)

    def _some(self, size: int) -> bytes:
        # `read` of a decompressor loses what it had when it comes upon the end of a file that was cut short.
        return getattr(self.inner, "read1", self.inner.read)(size)

    def _check(self) -> None:
        if self._behind is None or self._limits is None or self.count <= self._limits.grace:
            return
        if self.count > self._limits.ratio * max(self._behind.count, 1):
            raise HostileError(
                f"more than {self._limits.ratio:g} bytes come out of each byte: this looks like a decompression bomb",
                where=self.where,
                expected="a compressed log",
                remedy="unpack it yourself and give the file, if you trust it",
            )


def sources(path: Path, limits: Limits | None = None) -> Iterator[Source]:
    """Yield the file, or every file of the archive, decompressed; each must be read before the next is asked for.

    A member that is broken or encrypted is yielded too; reading it raises the TraceError that says so.

    Raises:
        TraceError: the file cannot be opened, or is a broken archive.
        HostileError: it is a hostile archive, or holds one.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror or error})", where=path, expected="a log") from error
    with stream:
        yield from _opened(str(path), stream, limits or Limits(), 0)


def _opened(name: str, stream: Stream, limits: Limits, depth: int) -> Iterator[Source]:
    behind = Counted(stream, name)
    buffered = io.BufferedReader(behind, PEEK)
    kind = packing(buffered.peek(PEEK)[:PEEK])
    if not kind:
        yield Source(name, buffered, behind)
        return
    if depth >= limits.depth:
        raise HostileError(
            f"archives within archives, {depth + 1} deep", where=name, expected=f"at most {limits.depth}"
        )
    if kind == "zip":
        yield from _zip(name, buffered, behind, limits, depth + 1)
    elif kind == "tar":
        yield from _tar(name, buffered, limits, depth + 1)
    else:
        inner = _decompressed(kind, buffered)
        yield from _opened(name, Counted(inner, name, behind, limits), limits, depth + 1)


def packing(head: bytes) -> str:
    """Return how a file is packed, by its first bytes: "gzip", "zstd", "bzip2", "xz", "zip", "tar", or "" when not.

    Example:
        >>> packing(b"PK\\x03\\x04"), packing(b"step,loss")
        ('zip', '')
    """
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "bzip2"
    if head[257:262] == b"ustar":
        return "tar"
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def _decompressed(kind: str, stream: io.BufferedReader[Any]) -> Stream:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=stream)
    if kind == "zstd":
        return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")
    return bz2.BZ2File(stream) if kind == "bzip2" else lzma.LZMAFile(stream)


def _zip(name: str, stream: Stream, behind: Counted, limits: Limits, depth: int) -> Iterator[Source]:
    # A zip's directory stands at its end, so a zip within a stream has to be held; a zip on disk is not.
    inner = behind.inner
    held = inner if _can_seek(inner) else io.BytesIO(stream.read(limits.grace + 1))
    if isinstance(held, io.BytesIO) and held.getbuffer().nbytes > limits.grace:
        raise TraceError(f"a zip of more than {limits.grace >> 20} MiB inside an archive", where=name)
    try:
        with zipfile.ZipFile(held) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            _check_count(len(members), name, limits)
            for info in members:
                yield from _zip_member(name, archive, info, limits, depth)
    except (*_BROKEN, RuntimeError, NotImplementedError) as error:
        raise _broken(name, error) from error


def _can_seek(stream: Stream) -> bool:
    try:
        return stream.seekable()
    except AttributeError:  # of a tar that is read as a stream
        return False


def _zip_member(
    name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limits: Limits, depth: int
) -> Iterator[Source]:
    inside = f"{name}!{_safe(info.filename, name)}"
    if info.flag_bits & 1:
        said = TraceError("encrypted", where=inside, expected="an archive without password", remedy="unpack it first")
        yield _refused(inside, said)
        return
    if info.file_size > limits.grace and info.file_size > limits.ratio * max(info.compress_size, 1):
        raise HostileError(
            f"{info.compress_size:,} bytes claim to hold {info.file_size:,}: this looks like a decompression bomb",
            where=inside,
            remedy="unpack it yourself and give the file, if you trust it",
        )
    try:
        member = archive.open(info)
    except (*_BROKEN, RuntimeError, NotImplementedError) as error:
        yield _refused(inside, _broken(inside, error))
        return
    with member:
        yield from _member(inside, member, limits, depth)


def _member(inside: str, stream: Stream, limits: Limits, depth: int) -> Iterator[Source]:
    """Yield what a member of an archive holds; one that cannot be opened does not hide the others."""
    try:
        yield from _opened(inside, stream, limits, depth)
    except HostileError:
        raise
    except TraceError as error:
        yield _refused(inside, error)


class _Refused(io.RawIOBase):
    """A stream that only says why there is none."""

    def __init__(self, error: TraceError) -> None:
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise self._error


def _refused(inside: str, error: TraceError) -> Source:
    return Source(inside, io.BufferedReader(_Refused(error)))


def _tar(name: str, stream: Stream, limits: Limits, depth: int) -> Iterator[Source]:
    read = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for count, info in enumerate(archive, 1):
                _check_count(count, name, limits)
                inside = f"{name}!{_safe(info.name, name)}"
                member = archive.extractfile(info) if info.isreg() else None  # links and devices are no logs
                if member is not None:
                    yield from _member(inside, member, limits, depth)
                    read += 1
        while stream.read(PEEK):
            pass  # a tar ends before its compressed file does; only there stands the checksum
    except _BROKEN as error:
        if not (read and _is_cut(error)):
            raise _broken(name, error) from error
        rest = Counted(io.BytesIO(), name)
        rest.cut = True
        yield Source(name, io.BufferedReader(rest), rest)


def _check_count(count: int, name: str, limits: Limits) -> None:
    if count > limits.members:
        raise HostileError(f"more than {limits.members:,} files", where=name, expected="an archive of logs")


def _safe(member: str, archive: str) -> str:
    """Return the member's name.

    Raises:
        HostileError: it points out of the archive. Nothing is unpacked here, but who makes such an archive means harm.
    """
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts[:1] and path.parts[0].endswith(":")):
        raise HostileError(
            f"a member is called {member[:80]!r}, which points out of the archive",
            where=archive,
            expected="names below the archive",
            remedy="do not unpack it; ask who made it",
        )
    return str(path)


def _is_cut(error: Exception) -> bool:
    """Whether an error says that data ends too early, rather than that it is damaged."""
    return isinstance(error, EOFError) or any(word in str(error).lower() for word in ("truncated", "unexpected end"))


def _broken(where: str, error: Exception) -> TraceError:
    if isinstance(error, TraceError):
        return error
    return TraceError(
        f"a broken or truncated archive ({error or type(error).__name__})",
        where=where,
        expected="a complete gzip, zstd, bzip2, xz, tar or zip file",
        remedy="copy the file again",
    )
