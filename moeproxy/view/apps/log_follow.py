"""Follow a growing log from a panel, in a thread of its own: the kernel is free for everything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moeproxy.traces.following import LogFollower, check_followable
from moeproxy.traces.logtrace import LogTrace
from moeproxy.view.apps.ui import Status

LOOK_S = 1.0
"""Seconds between two looks."""

_SHARE = 4  # a look may take a fifth of the time
_QUIET_S = 10.0


class Following:
    """A thread that looks at a log again and again.

    Args:
        take: called in that thread with the runs read so far, whenever there are new rows.
        status: told what comes, that nothing comes, and what goes wrong.
        on_end: called in that thread when following ends by itself.
        look_s: seconds between two looks.
    """

    def __init__(
        self,
        take: Callable[[tuple[LogTrace, ...]], None],
        status: Status,
        on_end: Callable[[], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._take, self._status, self._on_end, self._look_s = take, status, on_end, look_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.looks = 0

    @property
    def running(self) -> bool:
        """Whether a log is being followed."""
        return self._thread is not None and self._thread.is_alive() and not self._stop.is_set()

    def start(self, path: Path, *, mapping: Mapping[str, str] | None = None, step: str | None = None) -> None:
        """Follow a log from its start; one followed before is left.

        Raises:
            TraceError: it is nothing that can be followed.
        """
        check_followable(path)
        self.stop()
        self._stop = stop = threading.Event()
        follower = LogFollower(path, mapping=mapping, step=step)
        self._thread = threading.Thread(target=self._run, args=(follower, path, stop), name="follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A look under way ends by itself; what it finds is not taken."""
        self._stop.set()

    def join(self, timeout_s: float = 10.0) -> bool:
        """Wait for a look that is under way after `stop`; return whether it has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, follower: LogFollower, path: Path, stop: threading.Event) -> None:
        heard_s = time.monotonic()
        total = 0
        try:
            while not stop.is_set():
                begun_s = time.monotonic()
                new = follower.poll()
                self.looks += 1
                if new:
                    total, heard_s = total + new, time.monotonic()
                    found = follower.logs()
                    if stop.is_set():
                        return
                    self._take(found)
                    self._status.say(f"Following {path.name}: {total:,} rows, the last at {time.strftime('%H:%M:%S')}.")
                elif (quiet_s := time.monotonic() - heard_s) > _QUIET_S:
                    self._status.say(f"Following {path.name}: {total:,} rows, nothing new for {quiet_s:.0f} s.")
                stop.wait(max(self._look_s, _SHARE * (time.monotonic() - begun_s)))
        except Exception as error:
            self._status.show(error)
            self._on_end()
        finally:
            follower.close()


def fits(logs: Sequence[LogTrace]) -> bool:
    """Whether what was read from a file is of a kind that grows line by line."""
    return all(log.info.container in ("console log", "JSON lines", "growing log") for log in logs)
