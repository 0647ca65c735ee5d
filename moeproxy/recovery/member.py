"""What every role's process has: its events, what it is doing now, its mishaps, and a manager that may be replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from moeproxy.recovery import events as ev
from moeproxy.recovery.detection import Progress
from moeproxy.recovery.events import EventLog
from moeproxy.recovery.plan import Mishap, RolePlan, suffer

_RECONNECT_S = 120.0


class Member:
    """The common part of trainer and rollout.

    Args:
        plan: of the job.
        folder: of the job.
        role, name: what the member is.
    """

    def __init__(self, plan: RolePlan, folder: Path, role: str, name: str) -> None:
        self.plan, self.folder, self.name = plan, folder, name
        self._log = EventLog(folder, role, name)
        self._manager: Any = None
        self._changed = threading.Condition()
        self._phase, self._done, self._step = "", 0, 0
        self.say(ev.START, pid=os.getpid())

    def say(self, event: str, step: int | None = None, **info: Any) -> None:
        """Log one event."""
        self._log.add(event, step, **info)

    def rename(self, role: str, name: str) -> None:
        """Become another member: a standby that takes over."""
        self.name, self._log = name, EventLog(self.folder, role, name)

    def enter(self, phase: str, step: int) -> Mishap | None:
        """Begin a phase, and suffer what the plan has for it; return a mishap that the phase itself has to act out."""
        self._phase, self._step = phase, step
        self._done += phase not in ("idle", "weights", "generate")
        self.say(ev.PHASE, step, phase=phase)
        return suffer(self.plan.mishaps, self.folder, self.name, phase, step, self.say)

    def progress(self) -> Progress:
        """Return what the member is doing: the answer to a heartbeat."""
        return Progress(self._phase, self._done, self._step)

    def connect(self, manager: Any, *, first: bool = False) -> None:
        """Use this manager from now on; the `first` only if no other was named, as its replacement may have been."""
        with self._changed:
            if self._manager is None or not first:
                self._manager = manager
            self._changed.notify_all()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the manager and return its answer; when it dies, go on with the one that replaces it."""
        import ray
        from ray.exceptions import RayActorError

        while True:
            manager = self._manager
            try:
                return ray.get(getattr(manager, method).remote(*arguments))
            except RayActorError:
                with self._changed:
                    if not self._changed.wait_for(lambda m=manager: self._manager is not m, _RECONNECT_S):
                        raise
