"""A folder for the temporary files of one job, such as Ray's; it goes with the job, also with one that is killed.

Its owner holds a lock that the system takes away with the process. A folder whose lock is free has no owner any more,
and whoever comes next removes it: the last guard of a job on Ray, or the next job of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "moeproxy-"
_LOCK = "in-use"
_LONGEST = 18  # letters of the path above it: the names of Ray's sockets in it add 88, and the system allows 107

_owned: dict[Path, int] = {}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it afterwards; first, those whose owners were killed."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_above()))
    making = folder / f"{_LOCK}.new"
    lock = os.open(making, os.O_CREAT | os.O_RDWR, 0o600)
    _owned[folder] = lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        making.rename(folder / _LOCK)  # only now: nobody may find it without an owner
        yield folder
    finally:
        _remove(folder)
        os.close(_owned.pop(folder))


def remove_owned() -> None:
    """Remove the folders of this process, which ends without leaving its blocks."""
    for folder in list(_owned):
        _remove(folder)


def remove_left() -> None:
    """Remove the folders of processes that are gone."""
    for folder in _above().glob(f"{_PREFIX}*"):
        remove_ownerless(folder)


def remove_ownerless(folder: Path, patience: float = 0.0) -> None:
    """Remove a folder, unless a process owns it.

    Args:
        folder: that `scratch` made.
        patience: seconds for which to try again while its owner, or others that write to it, have not quite ended.
    """
    deadline = time.monotonic() + patience
    while not _remove_free(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _remove_free(folder: Path) -> bool:
    """Remove a folder that nobody owns; return whether it is gone."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:  # another user's, something else, or gone
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove(folder)
    except BlockingIOError:  # its owner lives
        return False
    finally:
        os.close(lock)


def _above() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _LONGEST else "/tmp")


def _remove(folder: Path) -> bool:
    """Remove a folder, its lock last: what is still written to is left for the next one."""
    with contextlib.suppress(OSError):
        for place in folder.iterdir():
            if place.name != _LOCK:
                shutil.rmtree(place, ignore_errors=True)
                with contextlib.suppress(OSError):
                    place.unlink()
        if [place.name for place in folder.iterdir()] in ([], [_LOCK]):
            shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
