"""Point-to-point transfer of weights between members: one TCP connection for each, no group that could hang.

A request is one line of JSON; the answer is one line with length and checksum, then the bytes. Whoever has a version of
the weights serves it, so updated rollouts relay to the others. A source that is gone, slow or damaged costs its time
limit, and the next one is asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence

from moeproxy.errors import RecoveryError

Address = tuple[str, int]
LOOPBACK = "127.0.0.1"
_LINE = 4096


def checksum(payload: bytes) -> str:
    """Return 32 hex digits."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


class Server:
    """Serves versions of the weights until it is closed.

    Args:
        find: returns the bytes of a version, or None.
        host: to listen on; only this machine by default.
    """

    def __init__(self, find: Callable[[int], bytes | None], host: str = LOOPBACK) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A peer that goes away in the middle is its own problem; it asks again, or somebody else.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    payload = find(int(json.loads(self.rfile.readline(_LINE))["version"]))
                    head = None if payload is None else {"length": len(payload), "checksum": checksum(payload)}
                    self.wfile.write((json.dumps(head) + "\n").encode())
                    if payload is not None:
                        self.wfile.write(payload)

        class Threads(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Threads((host, 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def fetch(version: int, sources: Sequence[Address], timeout: float = 5.0) -> bytes:
    """Return a version of the weights from the first source that gives it whole.

    Args:
        version: number of updates.
        sources: who has it, in the order in which to ask.
        timeout: seconds without a byte after which a source is given up.

    Raises:
        RecoveryError: no source gave it; every one's problem is named.
    """
    problems = []
    for address in sources:
        try:
            return _fetch(version, address, timeout)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{address[0]}:{address[1]} {error or type(error).__name__}")
    raise RecoveryError(
        f"no member gave the weights after {version} updates: {'; '.join(problems) or 'nobody has them'}",
        expected="at least one member that holds them",
    )


def _fetch(version: int, address: Address, timeout: float) -> bytes:
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.settimeout(timeout)
        connection.sendall((json.dumps({"version": version}) + "\n").encode())
        with connection.makefile("rb") as stream:
            head = json.loads(stream.readline(_LINE) or "0")
            if not isinstance(head, dict):
                raise ValueError("does not have it" if head is None else "closed the connection")
            payload = stream.read(int(head["length"]))
    if len(payload) < head["length"]:
        raise ValueError(f"broke off after {len(payload)} of {head['length']} bytes")
    if checksum(payload) != head["checksum"]:
        raise ValueError("sent damaged bytes")
    return payload
