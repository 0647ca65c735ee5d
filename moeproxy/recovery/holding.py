"""Which rollouts hold the trainer's state: each gets the newest when it is named, and every later one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any


class Holding:
    """Gives a trainer's states to its holders; safe to use from several threads.

    A job names holders while the trainer still takes over a state, so either may come first.

    Args:
        patience: seconds to wait for a holder. One that is frozen then gets no more until it has taken what it was
            sent: the trainer does not stand still with it.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._lock, self._patience = threading.Lock(), patience
        self._holders: list[Any] | None = None
        self._served: list[Any] = []
        self._last: tuple[int, bytes] | None = None
        self._sent: list[tuple[Any, Any]] = []
        self._late: list[tuple[Any, Any]] = []

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
        """Send a new state to all; to none of them are two ever under way."""
        import ray

        self.settle()
        shared = ray.put(payload)
        with self._lock:
            self._last, self._served = (step, payload), list(self._holders or ())
            free = [holder for holder in self._served if all(holder != late for late, _ in self._late)]
            self._sent = [(holder, holder.hold.remote(step, shared)) for holder in free]

    def settle(self) -> None:
        """Wait until the states that were sent have arrived, or their holders have died, or patience ends."""
        self._late = _under_way(self._late, 0) + _under_way(self._sent, self._patience)
        self._sent = []

    def _serve(self) -> None:
        if self._last is None:
            return
        for holder in self._holders or ():
            if holder not in self._served:
                holder.hold.remote(*self._last)
                self._served.append(holder)


def _under_way(sent: list[tuple[Any, Any]], patience: float) -> list[tuple[Any, Any]]:
    """Return which of these have not arrived after so many seconds."""
    import ray

    if not sent:
        return []
    references = [reference for _, reference in sent]
    _, waiting = ray.wait(references, num_returns=len(references), timeout=patience)
    return [(holder, reference) for holder, reference in sent if reference in waiting]
