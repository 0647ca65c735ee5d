"""Threads beside training give way to it, those of native code too, and no other thread does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from moeproxy.recovery.priority import LOW, give_way, made_to_give_way

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no priority of their own")


def _niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_a_thread_gives_way_and_the_others_do_not() -> None:
    found = {}

    def run() -> None:
        give_way()
        found["beside"] = _niceness(threading.get_native_id())

    before = _niceness(threading.get_native_id())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found["beside"] == LOW
    assert _niceness(threading.get_native_id()) == before < LOW


def test_threads_that_gloo_starts_for_a_group_give_way(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        training = {int(path.name) for path in Path("/proc/self/task").iterdir()}
        with made_to_give_way():
            dist.new_group(backend="gloo")
        beside = {int(path.name) for path in Path("/proc/self/task").iterdir()} - training
        assert beside
        assert {_niceness(thread) for thread in beside} == {LOW}
        assert LOW not in {_niceness(thread) for thread in training}
    finally:
        dist.destroy_process_group()
