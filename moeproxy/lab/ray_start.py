"""A Ray of this machine alone: reachable from nowhere else, and without the processes that only a cluster needs."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.jobs import last_words

NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that, set to 0, lets it keep 127.0.0.1; else it takes the machine's own address instead, on Linux."""

_LOOPBACK = "127.0.0.1"
_START_S = 180
"""Seconds that a Ray of this machine may take to start. It allows itself 15 to 30 at several places: too few where a
machine is busy, and what gives up leaves the others waiting."""

_PATIENT = {"agent_register_timeout_ms": 1000 * _START_S, "worker_register_timeout_seconds": _START_S}
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")  # autoscaler, forwarding of logs, dashboard


def local_options(cores: int, store_bytes: int) -> dict[str, Any]:
    """Return the options of `ray.init` for a Ray of this machine alone, reachable from nowhere else."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent from here unless the user wants it
    here = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": store_bytes}
    return here | {"_node_ip_address": _LOOPBACK, "_system_config": dict(_PATIENT)}


def start_ray(options: dict[str, Any], starter: Path | None = None) -> None:
    """Initialise Ray.

    Args:
        options: of `ray.init`; with those of `local_options` it is one of this machine alone.
        starter: the program with which that one starts workers, instead of Ray's `setup_worker.py`.

    Raises:
        LabError: none can be started or joined.
    """
    import ray

    try:
        with alone(starter) if options.get("_node_ip_address") == _LOOPBACK else contextlib.nullcontext():
            ray.init(**options)
    except Exception as error:  # Ray has no error class of its own for this
        raise LabError(
            f"no Ray could be started or joined: {last_words(str(error))}",
            remedy="start one first (ray start --head) and set RAY_ADDRESS=auto, or use another executor",
        ) from error


@contextlib.contextmanager
def alone(starter: Path | None = None) -> Iterator[None]:
    """Let a Ray that is started within be one of this machine alone; what is set for that is as before afterwards.

    Three of the six processes of a Ray serve clusters and dashboards, and take most of the time of its start.

    Args:
        starter: as in `start_ray`.
    """
    from ray._private import node, ray_constants, services

    before = os.environ.get(NO_CLUSTER)
    constants = ray_constants.ENABLE_RAY_CLUSTER, ray_constants.SETUP_WORKER_FILENAME
    found, raylet = services.get_node, node.Node.start_raylet
    kept = {name: getattr(node.Node, name) for name in _UNUSED if hasattr(node.Node, name)}
    nodes: list[Any] = []

    def started(self: Any, *arguments: Any, **named: Any) -> Any:
        _ports_known(self)
        nodes.append(self)
        return raylet(self, *arguments, **named)

    os.environ[NO_CLUSTER], ray_constants.ENABLE_RAY_CLUSTER = "0", False  # for its processes, and for this one
    if starter is not None:
        ray_constants.SETUP_WORKER_FILENAME = str(starter.absolute())  # joined to a folder: an absolute path wins
    services.get_node, node.Node.start_raylet = _patient(found, nodes), started
    for name in kept:
        setattr(node.Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        services.get_node, node.Node.start_raylet = found, raylet
        for name, method in kept.items():
            setattr(node.Node, name, method)
        ray_constants.ENABLE_RAY_CLUSTER, ray_constants.SETUP_WORKER_FILENAME = constants
        os.environ.pop(NO_CLUSTER) if before is None else os.environ.update({NO_CLUSTER: before})


def _patient(find: Callable[..., Any], nodes: Sequence[Any]) -> Callable[..., Any]:
    """Return a `services.get_node` that waits for a node longer than Ray does, while its raylet lives."""

    def found(*arguments: Any, **named: Any) -> Any:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return find(*arguments, **named)
            except RuntimeError:  # it is not up yet
                raylets = [info for node in nodes for info in node.all_processes.get("raylet", ())]
                if time.monotonic() > deadline or any(info.process.poll() is not None for info in raylets):
                    raise
                time.sleep(0.2)

    return found


def _ports_known(node: Any) -> None:
    """Let a raylet know at once which ports its agents have: it ends itself when it has to wait for more than 15 s.

    So it does in Ray 2.60 (ray-project/ray, issue 65983). Those of the dashboard's agent are not used: -1, as that
    agent says itself where dashboards are not installed.
    """
    from ray import _raylet

    raylet: Any = _raylet  # compiled
    for name in ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME"):
        raylet.persist_port(node._session_dir, node._node_id, getattr(raylet, name), -1)
    with socket.create_server((_LOOPBACK, 0)) as free:
        node._ray_params.runtime_env_agent_port = free.getsockname()[1]
