"""The processes of a job on Ray: one actor a member, and nothing left of them at the end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.lab.ray_start import local_options, start_ray
from moeproxy.recovery import events as ev
from moeproxy.recovery.manager_role import ManagerRole
from moeproxy.recovery.policy import DIED, RAISED
from moeproxy.recovery.rollout_role import RolloutRole
from moeproxy.recovery.template import CLIENT, Template
from moeproxy.recovery.trainer_role import TrainerRole

_STORE_BYTES = 300 * 2**20
_THREADS = 8
STARTING, READY, WORKING, DONE = "starting", "ready", "working", "done"


@dataclass
class Worker:
    """One process of a job, as the job sees it.

    Args:
        name, role: which member; a replacement has the name of what it replaces.
        actor: Ray's handle.
        waited: what is being waited for: that it is ready, later that it ends.
        since: when it was started (monotonic seconds).
        state: `STARTING`, `READY`, `WORKING` or `DONE`.
        pid: its process, once known.
        looked: an unanswered look at it.
        promoted: whether it is a standby that became the trainer while it started.
    """

    name: str
    role: str
    actor: Any
    waited: Any
    since: float
    state: str = STARTING
    pid: int = 0
    looked: Any = None
    promoted: bool = False


@contextlib.contextmanager
def ray_running() -> Iterator[None]:
    """Use the Ray that the program has initialised, or start one on this machine and end it afterwards.

    One that is started here listens on 127.0.0.1 only, and members of jobs on it are copies of a template.

    Raises:
        RecoveryError: Ray is not installed.
        LabError: it cannot be started.
    """
    if find_spec("ray") is None:
        raise RecoveryError("ray is not installed", remedy="python -m pip install 'moeproxy[recovery]'")
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Ray's processes inherit it
    # No cores, as no member asks for any: Ray would start a worker for each in advance.
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, **local_options(0, _STORE_BYTES)}
    options["_system_config"] |= {"memory_monitor_refresh_ms": 0}  # else members die when other programs fill memory
    with Template() as template:
        options["_temp_dir"] = str(template.folder / "ray")  # else it stays, and the user's own Ray is taken for this
        try:
            with _set(template.variables):
                start_ray(options, CLIENT)
            template.start(_of_this_ray())
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Have these variables in the environment of processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _of_this_ray() -> dict[str, str]:
    """Return what a worker gets told by its environment, and Ray reads when it is imported."""
    import ray
    from ray._private.worker import global_worker

    node: Any = global_worker.node
    (raylet,) = node.all_processes["raylet"]
    return {"RAY_JOB_ID": ray.get_runtime_context().get_job_id(), "RAY_RAYLET_PID": str(raylet.process.pid)}


def hired(name: str, role: str, now: float, *arguments: Any) -> Worker:
    """Start the process of a member; it answers `waited` with its process number when it is ready."""
    import ray

    # No cores asked for: how many processes share a small machine is the job's to decide, not Ray's.
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    kinds: dict[str, Any] = {ev.TRAINER: _Trainer, ev.STANDBY: _Trainer, ev.ROLLOUT: _Rollout, ev.MANAGER: ManagerRole}
    if role != ev.MANAGER:
        options["max_concurrency"] = _THREADS
    actor = ray.remote(**options)(kinds[role]).remote(*arguments)
    return Worker(name, role, actor, actor.pid.remote(), now)


def let_go(worker: Worker) -> None:
    """End a member's process, at once and for good."""
    import ray

    with contextlib.suppress(Exception):  # dead already
        ray.kill(worker.actor, no_restart=True)
    if worker.pid:  # Ray asks a process to end; one that is stopped or stuck does not hear it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker.pid, signal.SIGKILL)


def answer(reference: Any, timeout: float | None = None) -> tuple[Any, str, str]:
    """Return (answer, "", ""), or (None, what went wrong, the exception if one was raised).

    No answer in `timeout` seconds has gone wrong, too.
    """
    import ray
    from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

    try:
        return ray.get(reference, timeout=timeout), "", ""
    except RayActorError as error:
        began = isinstance(error, ActorDiedError) and "creation task" in str(error)
        return None, DIED, _last_line(error) if began else ""
    except RayError as error:
        return None, RAISED, _last_line(error) if isinstance(error, RayTaskError) else ""


def _last_line(error: Exception) -> str:
    """Return the last line of a traceback: the exception that began it."""
    return str(error).strip().rpartition("\n")[2]


class _Named:
    def pid(self) -> int:
        """Return the process number."""
        return os.getpid()


class _Trainer(TrainerRole, _Named):
    """A trainer, as an actor."""


class _Rollout(RolloutRole, _Named):
    """A rollout, as an actor."""
