"""A network between the ranks of a job that can fail: gloo's connections, led through proxies on this machine.

Gloo's ranks find one another through a store, each leaving the address that it listens at. Of two ranks the one with
the higher address dials. `ProxiedStore` gives the one that dials the address of a proxy in the other's place, lower
than its own, so that it dials still.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

NETWORK = ("drop", "mute")
"""Kinds of mishaps of a rank's connections: they break, or what is sent over them gets lost."""

_CHUNK = 1 << 16
_LOOK_S = 0.02
# An address within what a rank leaves in the store: family (2, as this machine orders bytes), port, 127.0.0.1.
_ADDRESS = re.compile(re.escape(struct.pack("=H", socket.AF_INET)) + rb"(..)\x7f\x00\x00\x01", re.DOTALL)


class Proxy:
    """Passes one connection on to a port of this machine, until it is cut or goes dumb.

    Args:
        target: port that it stands for.
        below: as gloo orders ports, its own is lower than this one; None: any.
    """

    def __init__(self, target: int, below: int | None = None) -> None:
        self._target, self._ends, self._dumb = target, [], threading.Event()
        self._server = _listener(below)
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def mute(self) -> None:
        """Swallow what is sent from now on, and keep the connection open: packets that get lost."""
        self._dumb.set()

    def cut(self) -> None:
        """Break the connection, at both ends."""
        for end in (*self._ends, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._server:
            near, _ = self._server.accept()
            with near, socket.create_connection(("127.0.0.1", self._target)) as far:
                self._ends = [near, far]
                for end in self._ends:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
                back.start()
                self._pump(near, far)
                back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if not self._dumb.is_set():
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def _listener(below: int | None) -> socket.socket:
    for port in _lower(below) if below is not None else [0]:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port), reuse_port=False)
    raise OSError(f"no free port that gloo would put below {below}")


def _lower(port: int) -> Iterator[int]:
    """Yield ports that gloo puts below one: it compares them as they lie in memory, the low byte first."""
    order = _order(port)
    for other in range(order - 1, 0, -1):
        low, high = (other >> 8, other & 0xFF) if _little() else (other & 0xFF, other >> 8)
        if high >= 0x20:  # not those of well-known services
            yield high << 8 | low


def _order(port: int) -> int:
    """Return what gloo compares: a port's bytes in network order, read in this machine's."""
    return struct.unpack("=H", struct.pack("!H", port))[0]


def _little() -> bool:
    return struct.pack("=H", 1) == b"\x01\x00"


class ProxiedStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A store that leads what this rank dials through proxies.

    Args:
        inner: the job's.
        folder: where `fail` leaves word.
        rank: of this process.
        iteration: a network that has failed is mended with the next one.
    """

    def __init__(self, inner: Any, folder: Path, rank: int, iteration: int) -> None:
        super().__init__()
        self._inner, self._rank, self._word = inner, rank, _word(folder, iteration)
        self._port: int | None = None
        self.proxies: dict[tuple[str, int], Proxy] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def set(self, key: str, value: Any) -> None:
        """Leave a value; this rank's own address is noted."""
        found = _ADDRESS.search(value) if isinstance(value, bytes) else None
        if found:
            self._port = struct.unpack("!H", found[1])[0]
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value; in the address of a rank that this one dials, the port is a proxy's."""
        value = self._inner.get(key)
        found, (place, _, peer) = _ADDRESS.search(value), key.rpartition("/")
        if not found or self._port is None or not peer.isdigit() or int(peer) == self._rank:
            return value
        port = struct.unpack("!H", found[1])[0]
        if _order(port) > _order(self._port):
            return value  # it dials, through a proxy of its own
        proxy = self.proxies.setdefault((place, int(peer)), Proxy(port, self._port))
        return value[: found.start(1)] + struct.pack("!H", proxy.port) + value[found.end(1) :]

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return self._inner.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values."""
        self._inner.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values."""
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait."""
        self._inner.set_timeout(timeout)

    def clone(self) -> ProxiedStore:
        """Return itself: the proxies are those of the process."""
        return self

    def _watch(self) -> None:
        pause = threading.Event()
        while not self._word.exists():
            pause.wait(_LOOK_S)
        kind, rank = self._word.read_text(encoding="utf-8").split()
        for (_, peer), proxy in self.proxies.items():
            if int(rank) in (peer, self._rank):
                proxy.cut() if kind == "drop" else proxy.mute()


def fail(folder: Path, iteration: int, rank: int, kind: str) -> None:
    """Let the connections of a rank fail, at all who lead them, in one of the ways of `NETWORK`."""
    path = _word(folder, iteration)
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{kind} {rank}", encoding="utf-8")
    temporary.rename(path)


def _word(folder: Path, iteration: int) -> Path:
    return folder / f"network-{iteration}"
