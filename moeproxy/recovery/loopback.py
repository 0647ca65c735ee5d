"""Servers of the engines of hot swap that listen on this machine alone.

Torch's store listens on every interface unless it is handed a socket. torchft 0.2 has the same in its manager and its
checkpoint server, and takes no address for them; `torchft_here` gives them one while they are made.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_WAITING = 1024


def listening_store() -> Any:
    """Return a new store, held by this process, that only this machine can reach; its `port` says where."""
    server = socket.create_server((LOOPBACK, 0), backlog=_WAITING)
    port = int(server.getsockname()[1])
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )


class _Server(ThreadingHTTPServer):
    """In place of torchft's, which is bound to every address."""

    request_queue_size = _WAITING

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__((LOOPBACK, address[1]), handler)


@contextlib.contextmanager
def torchft_here() -> Iterator[None]:
    """Let the manager and the checkpoint server that are made meanwhile listen on, and name, 127.0.0.1."""
    manager: Any = importlib.import_module("torchft.manager")
    http_transport: Any = importlib.import_module("torchft.checkpointing.http_transport")
    made, served = manager.ManagerServer, http_transport._IPv6HTTPServer

    def bound(*, bind: str, **options: Any) -> Any:
        return made(bind=f"{LOOPBACK}:{bind.rpartition(':')[2]}", **options)

    manager.ManagerServer, http_transport._IPv6HTTPServer = bound, _Server
    try:
        yield
    finally:
        manager.ManagerServer, http_transport._IPv6HTTPServer = made, served


def transport(timeout: Any) -> Any:
    """Return torchft's transport of checkpoints, which names 127.0.0.1 as its address; make it in `torchft_here`.

    Args:
        timeout: a timedelta for one request.
    """
    from torchft.checkpointing.http_transport import HTTPTransport

    class Transport(HTTPTransport[dict[str, Any]]):
        def address(self) -> str:
            return f"http://{LOOPBACK}:{self._server.socket.getsockname()[1]}/checkpoint/"

    return Transport(timeout=timeout, num_chunks=0)
