"""What the operating system knows of the processes that a test has started."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_LISTENING = "0A"


def stats() -> Iterator[tuple[int, str, int, int]]:
    """Yield (process, state, parent, session) of all that run; zombies are ended."""
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _group, session = place.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            yield int(place.parent.name), state, int(parent), int(session)


def running(pid: int) -> bool:
    return any(found == pid for found, *_ in stats())


def in_session(session: int) -> set[int]:
    return {pid for pid, _, _, its in stats() if its == session}


def descendants(pid: int) -> set[int]:
    """Return a process and all that it and they have started, as far as the parents still live."""
    children: dict[int, list[int]] = {}
    for found, _, parent, _ in stats():
        children.setdefault(parent, []).append(found)
    todo, seen = [pid], set()
    while todo:
        seen.add(now := todo.pop())
        todo += children.get(now, [])
    return seen


def listening(pids: Iterable[int]) -> dict[int, set[str]]:
    """Return for each process the addresses on which it waits for connections over TCP."""
    addresses = dict(_sockets())
    found: dict[int, set[str]] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inode = str(link.readlink())
            except OSError:
                continue
            if inode in addresses:
                found.setdefault(pid, set()).add(addresses[inode])
    return found


@contextlib.contextmanager
def watched(pids: Callable[[], Iterable[int]]) -> Iterator[dict[int, set[str]]]:
    """Note the addresses on which processes wait for connections, as long as this lasts."""
    found: dict[int, set[str]] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for pid, addresses in listening(pids()).items():
                found.setdefault(pid, set()).update(addresses)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _sockets() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                yield f"socket:[{fields[9]}]", _address(fields[1].partition(":")[0])


def _address(written: str) -> str:
    """Return an address of /proc/net, words of four bytes in the machine's own order."""
    words = [bytes.fromhex(written[i : i + 8])[::-1] for i in range(0, len(written), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def gone(left: Callable[[], set[int]], seconds: float) -> set[int]:
    """Wait until none is left, and return those that are left all the same."""
    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
