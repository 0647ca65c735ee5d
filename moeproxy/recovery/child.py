"""A job in roles in a process of its own, for notebooks: it ends with whoever started it, however that ends.

`python -m moeproxy.recovery.child FOLDER` makes the job that `start_job` wrote there. Ray's messages about killed
processes go to a file; the notebook reads the job's events. The child holds the only driver of its Ray, so that Ray
ends with it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file
from moeproxy.lab.settings import RunSpec
from moeproxy.recovery import events as ev
from moeproxy.recovery.events import Event, EventLog, read_events, trainer_step
from moeproxy.recovery.plan import RolePlan
from moeproxy.recovery.scratch import remove_left, remove_owned

_ASKED = "asked.json"
_OUTPUT = "output.txt"
_PATIENCE_S = 5.0  # nobody waits for a job whose parent has gone


class ChildJob:
    """A job in roles that runs in a process of its own.

    Args:
        folder: of the job; see `start_job`.
        process: that makes it.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self._process = folder, process

    @property
    def running(self) -> bool:
        """Whether it still goes."""
        return self._process.poll() is None

    @property
    def said(self) -> str:
        """The last line of what its processes wrote, for an error message."""
        lines = (self.folder.parent / f"{self.folder.name}-{_OUTPUT}").read_text("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def events(self) -> list[Event]:
        """Return what has happened so far; nothing while it starts."""
        try:
            return read_events(self.folder)
        except RecoveryError:
            return []

    def kill(self, member: str) -> int:
        """Kill a member's process with SIGKILL, and return its number.

        Raises:
            RecoveryError: no such member is up.
        """
        pid = pids(self.events()).get(member)
        if pid is None or not self.running:
            raise RecoveryError(f"{member!r} is not up", expected=", ".join(pids(self.events())) or "a running job")
        role = member.partition("-")[0]
        EventLog(self.folder, role, member).add(ev.FAULT, trainer_step(self.folder), kind="kill")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, patience: float = 20.0) -> None:
        """End the job and all its processes, and wait until they are gone."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # what it waits for
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        sweep(self._process.pid)
        remove_left()


def sweep(session: int) -> list[int]:
    """Kill what is left of a session but for this process, and return the numbers.

    Ray's agents wait for a pipe to close when Ray did not end in good order, and were seen to wait for ever.
    """
    left = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _parent, _group, its = place.read_text().rpartition(")")[2].split()[:4]
            pid = int(place.parent.name)
            if int(its) == session and state != "Z" and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                left.append(pid)
    return left


def pids(events: list[Event]) -> dict[str, int]:
    """Return the process of every member that is up: the last that started under its name, and has not been missed.

    A standby that took over for the trainer is the trainer.
    """
    found: dict[str, int] = {}
    for event in events:
        if event.event == ev.START:
            found[event.member] = int(event.info["pid"])
        elif event.event == ev.DETECT:
            found.pop(event.member, None)
        elif event.event == ev.TASK_RESTART:
            found.clear()
        elif event.event == ev.CONNECTED and event.role == ev.TRAINER and "pid" in event.info:
            found = {name: pid for name, pid in found.items() if pid != event.info["pid"]}
            found[event.member] = int(event.info["pid"])
    return found


def start_job(spec: RunSpec, folder: str | Path, plan: RolePlan | None = None) -> ChildJob:
    """Start a job in roles in a process of its own.

    Args:
        spec: a healthy run of the lab.
        folder: new or empty.
        plan: roles, detection, mishaps.

    Raises:
        RecoveryError: Ray is not installed, there is no such model, the folder is unusable, or the run cannot be
            made in roles.
    """
    from moeproxy.recovery.feasible import check

    if find_spec("ray") is None:
        raise RecoveryError("ray is not installed", remedy="python -m pip install 'moeproxy[recovery]'")
    place, chosen = Path(folder).absolute(), plan or RolePlan()
    check(spec, chosen, place)
    asked = place.parent / f"{place.name}-{_ASKED}"
    with atomic_file(asked) as temporary:
        temporary.write_text(json.dumps({"spec": spec.to_dict(), "plan": chosen.to_dict()}), encoding="utf-8")
    with open(place.parent / f"{place.name}-{_OUTPUT}", "ab") as output:
        command = [sys.executable, "-m", "moeproxy.recovery.child", str(place)]
        # A session of its own: Ctrl-C, and "interrupt the kernel", are for the notebook. Its end comes by the pipe.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=_environment()
        )
    return ChildJob(place, process)


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet}


def main() -> None:
    """Make the job of a folder; end when the parent closes the pipe."""
    from moeproxy.recovery.job import Job

    place = Path(sys.argv[1])
    asked = json.loads((place.parent / f"{place.name}-{_ASKED}").read_text(encoding="utf-8"))
    job = Job(RunSpec.from_dict(asked["spec"]), place, RolePlan.from_dict(asked["plan"]))

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        job.stop()
        time.sleep(_PATIENCE_S)  # Ray is still starting, takes its time to end, or a member does not let go
        _leave(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        job.run()
    except BaseException:
        traceback.print_exc()  # into the file of what was said: the last line is shown
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End this process, and before it all that it started; only in a session of its own."""
    if os.getsid(0) == os.getpid():
        sweep(os.getpid())
    remove_owned()
    os._exit(code)


if __name__ == "__main__":
    main()
