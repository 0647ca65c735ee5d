"""Emulate what the scale panel asks for, in the background: the latest wish counts, and nothing is done twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moeproxy.lab.processes import usable_cores
from moeproxy.scale.emulate import emulate
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.finding import find_hottest
from moeproxy.scale.processes import Cancelled as EmulationCancelled
from moeproxy.view.apps.scale_settings import Case
from moeproxy.view.apps.ui import Report, Status

Found = dict[str, Emulation]
"""Emulations by `key`."""
SLICE_LIMIT_S, WHOLE_LIMIT_S = 300.0, 3600.0
"""Seconds after which an emulation of a slice, or of the whole depth, is given up."""


class _Asked(threading.Event):
    """Set as soon as the user cancels, or asks for something else: emulations look at it several times a second."""

    def __init__(self, look: Callable[[], bool]) -> None:
        super().__init__()
        self._look = look

    def is_set(self) -> bool:
        return super().is_set() or self._look()


class Latest:
    """Act upon the latest wish, in one background thread.

    Args:
        action: called with a wish and with a function that says whether it is still the latest.
        status: where its errors are shown.
    """

    def __init__(self, action: Callable[[Any, Callable[[], bool]], None], status: Status) -> None:
        self._action, self._status = action, status
        self._lock = threading.Lock()
        self._wish: Any = None
        self._thread: threading.Thread | None = None

    def ask(self, wish: Any) -> None:
        """Let `wish` take the place of all earlier ones."""
        with self._lock:
            self._wish = wish
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="latest wish", daemon=True)
                self._thread.start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; return whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                wish = self._wish
            try:
                self._action(wish, lambda wish=wish: self._wish is wish)
            except Exception as error:
                self._status.show(error)
            with self._lock:
                if self._wish is wish:
                    self._thread = None
                    return


class Emulations:
    """A store of emulations, and the work of making those that are not there."""

    def __init__(self) -> None:
        self._found: Found = {}
        self._lock = threading.Lock()

    def get(self, case: Case, layers: int | None) -> Emulation | None:
        """Return the emulation of a rank, if it was made."""
        with self._lock:
            return self._found.get(key(case, layers))

    def make(self, cases: Sequence[Case], layers: int | None, report: Report, wanted: Callable[[], bool]) -> bool:
        """Emulate every case that is not there yet; return False if it is not `wanted` any more.

        Args:
            cases: the ranks.
            layers: how many layers; None for all.
            report: of the job; raises `Cancelled` once the user has asked for it.
            wanted: whether these cases are still what the controls say.

        Raises:
            Cancelled: the user stopped the job.
            ScaleError: an emulation failed.
        """
        missing = {key(case, layers): case for case in cases if self.get(case, layers) is None}
        stop = _Asked(lambda: not wanted())
        with ThreadPoolExecutor(max_workers=min(usable_cores(), max(len(missing), 1))) as pool:
            futures = {name: pool.submit(_one, case, layers, stop) for name, case in missing.items()}
            try:
                _follow(list(futures.values()), missing, report)
            except BaseException:
                stop.set()
                raise
        if any(future.exception() for future in futures.values()):
            return _told(list(futures.values()))
        with self._lock:
            self._found |= {name: future.result() for name, future in futures.items()}
        return wanted()


def key(case: Case, layers: int | None) -> str:
    """Return what decides an emulation: program, place and routing (which moves nothing without expert parallelism)."""
    layout = case.layout
    routing = case.routing.to_dict() if layout.ep > 1 else {}
    rank = "hottest" if _searched(case) else layout.rank
    return json.dumps([case.sliced(layers).to_dict(), layout.world, layout.ep, rank, routing], sort_keys=True)


def _searched(case: Case) -> bool:
    return case.hottest and not case.sure


def _one(case: Case, layers: int | None, stop: threading.Event) -> Emulation:
    program, layout = case.sliced(layers), case.layout
    limits = {"cancel": stop, "timeout": WHOLE_LIMIT_S if layers is None else SLICE_LIMIT_S}
    if _searched(case):
        return find_hottest(program, layout.world, layout.ep, case.routing, **limits)
    return emulate(program, layout.world, layout.ep, layout.rank, case.routing, **limits)


def _follow(futures: list[Future[Emulation]], cases: dict[str, Case], report: Report) -> None:
    """Report until all are done, so that the job can be cancelled."""
    names = ", ".join(case.label for case in cases.values())
    while not all(future.done() for future in futures):
        done = sum(future.done() for future in futures)
        report(done / max(len(futures), 1), f"Emulating {names}.")
        if any(future.done() and future.exception() for future in futures):
            return
        for future in futures:
            if not future.done():
                _wait(future)
                break


def _wait(future: Future[Emulation], seconds: float = 0.2) -> None:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait(seconds)


def _told(futures: list[Future[Emulation]]) -> bool:
    """Raise what went wrong; False where emulations were only given up for newer ones."""
    for error in (future.exception() for future in futures):
        if error is not None and not isinstance(error, EmulationCancelled):
            raise error
    return False
