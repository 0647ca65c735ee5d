"""Threads that give way to training: they run where a rank waits for another, and cost a busy machine little else.

On Linux every thread has a priority of its own. Elsewhere nothing is changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOW = 10
"""Niceness of what runs beside training: a tenth of the share of what has 0.

Training waits for it in the end, so it must not starve where other programs keep the machine busy, as it does with 19.
"""

_THREADS = Path("/proc/self/task")


def give_way() -> None:
    """Let every other thread of this machine go before the calling one."""
    if _THREADS.is_dir():
        _lower(threading.get_native_id())


@contextmanager
def made_to_give_way() -> Iterator[None]:
    """Let every other thread go before those that are started within, by native code too."""
    before = _threads()
    yield
    for thread in _threads() - before:
        _lower(thread)


def _threads() -> set[int]:
    return {int(path.name) for path in _THREADS.iterdir()} if _THREADS.is_dir() else set()


def _lower(thread: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        os.setpriority(os.PRIO_PROCESS, thread, LOW)
