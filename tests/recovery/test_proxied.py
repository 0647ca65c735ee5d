"""Gloo through proxies: it finds its way, and fails as a network does."""

from __future__ import annotations

import socket
import struct
import threading
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moeproxy.recovery.proxied import ProxiedStore, Proxy, _lower, _order, fail


def test_lower_ports_are_lower_as_gloo_compares_them() -> None:
    for port in (40_000, 32_768, 60_999, 36_865):
        below = list(islice(_lower(port), 2000))
        assert len(set(below)) == len(below) >= 90  # enough to find a free one, even below the lowest
        assert all(_order(other) < _order(port) and 0x2000 <= other <= 0xFFFF for other in below)
    assert struct.pack("=H", _order(0x1234)) == b"\x12\x34"


@pytest.mark.parametrize("way", ["mute", "cut"])
def test_a_proxy_passes_on_until_it_fails(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", proxy.port)) as near:
            far, _ = server.accept()
            with far:
                near.sendall(b"there")
                assert far.recv(5) == b"there"
                far.sendall(b"back")
                assert near.recv(4) == b"back"
                getattr(proxy, way)()
                near.settimeout(0.3)
                if way == "cut":
                    assert (near.recv(1), far.recv(1)) == (b"", b"")
                else:
                    far.sendall(b"lost")
                    with pytest.raises(TimeoutError):
                        near.recv(1)


def _pair(folder: Path) -> tuple[list[ProxiedStore], list[dist.ProcessGroupGloo]]:  # pyright: ignore
    stores = [ProxiedStore(dist.FileStore(str(folder / "store"), 2), folder, rank, 3) for rank in range(2)]
    groups: list[dist.ProcessGroupGloo | None] = [None, None]  # pyright: ignore

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, 2, timedelta(seconds=1))  # pyright: ignore

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores, [group for group in groups if group is not None]


@pytest.mark.parametrize(("kind", "words"), [("drop", "Connection"), ("mute", "Timed out")])
def test_ranks_talk_through_a_proxy_and_its_failure_is_theirs(kind: str, words: str, tmp_path: Path) -> None:
    stores, (first, second) = _pair(tmp_path)
    assert sorted(len(store.proxies) for store in stores) == [0, 1]  # of a pair, one dials
    mine, theirs = torch.ones(100_000), torch.zeros(100_000)
    coming = second.recv([theirs], 0, 0)
    first.send([mine], 1, 0).wait()
    coming.wait()
    assert torch.equal(mine, theirs)
    lost = second.recv([theirs], 0, 0)
    fail(tmp_path, 2, 0, kind)  # of another iteration: none of ours
    fail(tmp_path, 3, 0, kind)
    with pytest.raises(RuntimeError, match=words):
        lost.wait()
