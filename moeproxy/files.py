"""Crash-safe writing and provenance: files appear complete or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_VERSIONED = ("moeproxy", "torch", "transformers", "trl", "numpy", "kmedoids")


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed over `path`.

    After an exception the temporary file is removed and an existing `path` is untouched.
    The temporary name keeps the suffix of `path`, since writers such as NumPy look at it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp gives 0600; a result is as readable as any other new file.
        temporary.chmod(0o666 & ~_umask())
        _fsync(temporary)
        os.replace(temporary, target)
        _fsync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield a temporary directory beside `path`; on success it is fsynced and renamed to `path`.

    `path` must not exist. After an exception nothing is left; what a killed process left is removed by the next
    attempt at the same `path` on the same machine.

    Raises:
        FileExistsError: `path` exists already.
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{_prefix(target)}{os.getpid()}-"))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        for item in sorted(temporary.rglob("*")):
            _fsync(item)
        _fsync(temporary)
        os.rename(temporary, target)  # raises when somebody else made a non-empty `path` meanwhile
        _fsync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prefix(target: Path) -> str:
    # With the host's name: a process number of another machine on a shared disk says nothing here.
    return f".{target.name}-{platform.node()}-"


def _remove_stale(target: Path) -> None:
    """Remove what a killed process left of an earlier attempt at the same `target`."""
    prefix = _prefix(target)
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def provenance(**extra: object) -> dict[str, object]:
    """Return what a saved object must carry: versions, command, time (UTC), plus `extra`."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": dict(_versions()),
        **extra,
    }


@cache  # reading the metadata of a package takes a millisecond, and a slider asks at every move
def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _umask() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    flags = os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0)
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def printable(name: object) -> str:
    r"""Return the name of a file as text that can be written anywhere: bytes of it that are no UTF-8 as `\udc..`.

    Example:
        >>> printable("a\udcff.log")
        'a\\udcff.log'
    """
    return str(name).encode("utf-8", "backslashreplace").decode()
