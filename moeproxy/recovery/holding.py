"""Which rollouts hold the trainer's state: each gets the newest when it is named, and every later one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any


class Holding:
    """Gives a trainer's states to its holders; safe to use from several threads.

    A job names holders while the trainer still takes over a state, so either may come first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[Any] | None = None
        self._served: list[Any] = []
        self._last: tuple[int, bytes] | None = None
        self._sent: list[Any] = []

    def name(self, holders: Sequence[Any], *, first: bool = False) -> None:
        """Use these holders from now on; those that are new get the last state.

        Args:
            holders: handles of rollouts.
            first: whether these were chosen before all others, and count only if no others were named.
        """
        with self._lock:
            if self._holders is None or not first:
                self._holders = list(holders)
            self._serve()

    def resume(self, step: int, payload: bytes) -> None:
        """Take a state to go on from."""
        with self._lock:
            self._last = (step, payload)
            self._serve()

    def give(self, step: int, payload: bytes) -> None:
        """Send a new state to all; the one before must have arrived, so two are never under way."""
        import ray

        self.settle()
        shared = ray.put(payload)
        with self._lock:
            self._last, self._served = (step, payload), list(self._holders or ())
            self._sent = [holder.hold.remote(step, shared) for holder in self._served]

    def settle(self) -> None:
        """Wait until the states that were sent have arrived."""
        import ray
        from ray.exceptions import RayError

        for sent in self._sent:
            with contextlib.suppress(RayError):  # a holder that died: the job replaces it
                ray.get(sent)
        self._sent = []

    def _serve(self) -> None:
        if self._last is None:
            return
        for holder in self._holders or ():
            if holder not in self._served:
                holder.hold.remote(*self._last)
                self._served.append(holder)
