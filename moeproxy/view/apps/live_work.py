"""Runs that go on in a thread of their own while a job reports how far they are, looks at them, and may stop them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from moeproxy.view.apps.ui import Cancelled, Report

if TYPE_CHECKING:  # reading a log must not wait for the lab
    from moeproxy.lab.sweep_progress import SweepProgress, Watch

T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two looks at what is growing."""


class Stopped(Exception):
    """The training was stopped on request."""


class LiveWork(Generic[T]):
    """Work that trains, in a thread of its own.

    Args:
        work: called with a watch for sweeps, which ends the work on request.

    Example:
        >>> LiveWork(lambda watch: sweep(specs, out, watch=watch)).follow(report, "Training", look=redraw)
    """

    def __init__(self, work: Callable[[Watch], T]) -> None:
        self._work = work
        self.progress: SweepProgress | None = None
        self._stop = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def follow(
        self,
        report: Report,
        text: Callable[[], str] | str,
        *,
        look: Callable[[], None] | None = None,
        stopping: Callable[[], None] | None = None,
    ) -> T:
        """Start the work, report on it until it ends, and return its result.

        Args:
            report: of a `Job`.
            text: what is going on; how far the sweep is is added.
            look: called about once a second when steps were made, and at the end.
            stopping: called once a stop was asked for; the runs then end, which takes a moment.

        Raises:
            Cancelled: the reader asked for it; finished runs are kept.
            Exception: what the work raised.
        """
        thread = threading.Thread(target=self._run, name="live work", daemon=True)
        thread.start()
        try:
            drawn = -1
            while thread.is_alive():
                thread.join(LOOK_S)
                now = self.progress
                said = text if isinstance(text, str) else text()
                report(now.share if now else 0.0, f"{said}: {now or 'starting'}.")
                if look and now and now.steps_done != drawn:
                    drawn = now.steps_done
                    look()
        except Cancelled:
            self._stop.set()
            if stopping:
                stopping()
            thread.join()
            raise
        finally:
            if look:
                look()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._work(self._watch))
        except BaseException as error:
            self._error = error

    def _watch(self, progress: SweepProgress) -> None:
        if self._stop.is_set():
            raise Stopped  # a sweep ends all its processes on any exception
        self.progress = progress
