"""The TCP connections of a process to the other members of its job, so that they can be cut.

A collective on gloo waits for its peer until its time is over, even when the process group is aborted or destroyed
meanwhile (measured with torch 2.13). A connection that is shut down ends the wait at once, at both of its ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Links:
    """The connections that were made inside `watched`."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note which sockets are opened meanwhile."""
        before = open_sockets()
        try:
            yield
        finally:
            self._found |= {number: link for number, link in open_sockets().items() if before.get(number) != link}

    def cut(self) -> int:
        """Shut all of them down, and return how many; whoever waits on one is told so, here and at the other end."""
        count, now = 0, open_sockets()
        for number, link in self._found.items():
            if now.get(number) != link:
                continue  # it was closed, and its number given to another
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as open_:
                if not open_.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo aborts when that fails
                    open_.shutdown(socket.SHUT_RDWR)
                    count += 1
        self._found.clear()
        return count


def open_sockets() -> dict[int, str]:
    """Return this process's sockets, descriptor -> what it is; none where the system does not list them (not Linux)."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                link = os.readlink(_DESCRIPTORS / name)
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found
