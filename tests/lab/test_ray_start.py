"""A Ray of this machine alone keeps to 127.0.0.1, and changes nothing for one that is started otherwise."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from moeproxy.lab.ray_start import NO_CLUSTER, alone, local_options

pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[cluster]'")


@pytest.mark.parametrize("before", [None, "1"])
def test_a_ray_that_is_started_alone_resolves_this_machine_to_loopback(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import node, ray_constants, services

    monkeypatch.delenv(NO_CLUSTER, raising=False)
    if before:
        monkeypatch.setenv(NO_CLUSTER, before)
    starts, usual = node.Node.start_monitor, ray_constants.SETUP_WORKER_FILENAME
    with contextlib.suppress(RuntimeError), alone(Path("/starter.py")):
        assert os.path.join("folder", ray_constants.SETUP_WORKER_FILENAME) == "/starter.py"
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        assert os.environ[NO_CLUSTER] == "0"
        assert node.Node.start_monitor is not starts
        raise RuntimeError("no Ray could be started")
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert os.environ.get(NO_CLUSTER) == before
    assert node.Node.start_monitor is starts
    assert usual == ray_constants.SETUP_WORKER_FILENAME


def test_the_options_ask_for_this_machine_only() -> None:
    assert local_options(3, 10**8) == {
        "num_cpus": 3,
        "include_dashboard": False,
        "object_store_memory": 10**8,
        "_node_ip_address": "127.0.0.1",
        "_system_config": {"agent_register_timeout_ms": 180_000, "worker_register_timeout_seconds": 180},
    }


def test_a_ray_that_takes_its_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), "a node"])

    def slow(*_: str) -> str:
        if isinstance(answer := next(answers), RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", slow)
    with alone():
        assert services.get_node("address", "node") == "a node"
    assert services.get_node is slow
