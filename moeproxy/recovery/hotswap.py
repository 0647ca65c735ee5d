"""Hot swap (PHOENIX, arXiv 2607.01646): a spare takes over for a dead rank, and the job never ends.

One interface, a driver for each kind of state on an existing engine. Sharded state has none yet.

| driver | state | engine | what the spare gets |
|---|---|---|---|
| replicated | all of it on every rank | torchft, fixed world with spares | nothing: it follows every step |

The program is supervised training of a testbed model; the batch of a step depends on step and rank only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.events import Event, EventLog, read_events
from moeproxy.recovery.plan import Mishap

if TYPE_CHECKING:
    from moeproxy.recovery.swap_process import CopiedProcess

REPLICATED = "replicated"
DRIVERS: Mapping[str, tuple[str, str]] = {
    REPLICATED: ("torchft", "moeproxy.recovery.hotswap_replicated"),
}
"""Driver -> the package it needs, and the module that a member runs."""

_PLAN = "swap.json"
_LOOK_S = 0.05


@dataclass(frozen=True)
class SwapPlan:
    """A job whose ranks can be swapped.

    Args:
        model: directory of a testbed checkpoint.
        driver: a key of `DRIVERS`.
        steps: optimizer steps.
        active: ranks that train. With `replicated`, gradients of two ranks add up the same in any order; of more they
            may differ in the last bit after a swap.
        spares: ranks that wait.
        batch: examples a rank and step.
        learning_rate: of AdamW.
        seed: of the batches.
        checkpoint_every: steps between checkpoints on disk.
        heartbeat: seconds without a sign of life after which a member counts as dead.
        timeout: seconds after which a collective is given up.
        mishaps: members are "trainer-0", ..., in the order in which they were started, spares last; phases `update`
            (before the weights change), `publish` (while a snapshot or checkpoint is written) and `recover`.
    """

    model: Path
    driver: str = REPLICATED
    steps: int = 20
    active: int = 2
    spares: int = 1
    batch: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    checkpoint_every: int = 5
    heartbeat: float = 0.5
    timeout: float = 2.0
    mishaps: tuple[Mishap, ...] = ()

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise RecoveryError(f"no driver {self.driver!r}", expected=f"one of {', '.join(DRIVERS)}")
        least = {"steps": 1, "active": 2, "spares": 0, "batch": 1, "checkpoint_every": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise RecoveryError(f"{name} is {getattr(self, name)}", expected=f"at least {value}")
        unknown = {item.member for item in self.mishaps} - set(self.members)
        if unknown:
            raise RecoveryError(f"mishaps of {', '.join(sorted(unknown))}", expected=f"of {', '.join(self.members)}")

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all ranks, spares last."""
        return tuple(f"trainer-{number}" for number in range(self.active + self.spares))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return {**asdict(self), "model": str(self.model)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SwapPlan:
        """Return the plan that `to_dict` wrote."""
        mishaps = tuple(Mishap(**item) for item in stored["mishaps"])
        return cls(**{**stored, "model": Path(stored["model"]), "mishaps": mishaps})


@dataclass(frozen=True)
class SwapRun:
    """What came of a job whose ranks can be swapped.

    Args:
        folder: of its events, digests and checkpoints.
        plan: of the job.
        outcome: "finished", or why not and what is usable.
        step: the last step that any member finished.
        recoveries: for each fault the seconds from it to the end of the first step that began after it.
        blocked: median seconds that a snapshot held a step up, None without snapshots.
        seconds: median seconds of a step.
    """

    folder: Path
    plan: SwapPlan
    outcome: str
    step: int
    recoveries: tuple[float, ...]
    blocked: float | None
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.outcome == "finished"

    def __repr__(self) -> str:
        swaps = ", ".join(f"{seconds:.2f} s" for seconds in self.recoveries) or "none"
        return f"SwapRun({self.outcome}, {self.step} of {self.plan.steps} steps, recoveries: {swaps})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[8:-1])}</p>"


def hot_swap(plan: SwapPlan, folder: str | Path, *, limit: float = 120.0) -> SwapRun:
    """Train with ranks that can be swapped, and return what came of it.

    Args:
        plan: driver, ranks, mishaps.
        folder: new or empty.
        limit: seconds after which the job is ended.

    Raises:
        RecoveryError: the driver's package is not installed, or the folder is not empty.

    Example:
        >>> hot_swap(SwapPlan(model, mishaps=(Mishap("trainer-1", 8, "update"),)), "swapped").recoveries
    """
    package, module = DRIVERS[plan.driver]
    if find_spec(package) is None:
        raise RecoveryError(f"{package} is not installed", remedy="python -m pip install 'moeproxy[recovery]'")
    place = Path(folder).absolute()
    if place.exists() and any(place.iterdir()):
        raise RecoveryError("the folder is not empty", where=place, remedy="give each job a new one")
    with atomic_file(place / _PLAN) as temporary:
        temporary.write_text(json.dumps({**plan.to_dict(), "provenance": provenance()}, indent=1), encoding="utf-8")
    log = EventLog(place, ev.JOB, "job")
    with _Processes(plan, place, module) as processes:
        log.add(ev.JOB_START, trainers=plan.active, rollouts=0)
        outcome = _watch(plan, place, processes, time.monotonic() + limit)
    log.add(ev.JOB_END, outcome=outcome)
    return _result(plan, place, outcome)


def read_plan(folder: Path) -> SwapPlan:
    """Return the plan of a member's job."""
    stored = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
    stored.pop("provenance")
    return SwapPlan.from_dict(stored)


class _Processes:
    """The members' processes; none is left behind."""

    def __init__(self, plan: SwapPlan, folder: Path, module: str) -> None:
        self._plan, self._folder, self._module = plan, folder, module
        self.running: dict[str, subprocess.Popen[bytes] | CopiedProcess] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def __enter__(self) -> _Processes:
        if self._plan.driver == REPLICATED:
            self.start("lighthouse")
        for member in self._plan.members:
            self.start(member)
        return self

    def start(self, member: str) -> None:
        """Start a member's process; what it prints goes to a file of its own."""
        given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        given["GLOO_SOCKET_IFNAME"] = "lo"  # else it listens on the machine's own address
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "TORCH_CPP_LOG_LEVEL": "error"}
        if self._plan.driver == REPLICATED:
            from moeproxy.recovery.swap_process import CopiedProcess

            log = self._folder / f"{member}.log"
            self.running[member] = CopiedProcess(self._module, self._folder, member, log, {**os.environ, **given})
            return
        command = [sys.executable, "-m", self._module, str(self._folder), member]
        with open(self._folder / f"{member}.log", "ab") as output:
            # A pipe that closes when this process ends, however it ends, tells the member to end as well.
            self.running[member] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env={**os.environ, **given}
            )

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        for left in _processes_with(str(self._folder)):  # helpers that an engine forked off
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def _processes_with(argument: str) -> list[int]:
    """Return the processes of this machine, but for this one, that have been given an argument."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in place.read_bytes().split(b"\0") and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return found


def _watch(plan: SwapPlan, folder: Path, processes: _Processes, deadline: float) -> str:
    """Wait for the job's end; with replicas, start another one when fewer are left than train."""
    dead: set[str] = set()
    while True:
        if time.monotonic() > deadline:
            return f"out of time; {_usable(folder)}"
        found = _events(folder)
        if any(event.event == ev.JOB_END for event in found):
            return "finished"
        gone = {name for name, p in processes.running.items() if p.poll() is not None} - dead - {"lighthouse"}
        for member in gone:
            EventLog(folder, ev.TRAINER, member).add(ev.DETECT, kind="died")
        dead |= gone
        up = set(processes.running) - dead - {"lighthouse"}
        living = _with_state(found, up) if plan.driver == REPLICATED else up
        if len(living) < (1 if plan.driver == REPLICATED else plan.active):
            return f"failed: {len(living)} of {plan.active} ranks are left and no spare; {_usable(folder)}"
        if plan.driver == REPLICATED and len(up) < plan.active:
            processes.start(f"trainer-{len(processes.running) - 1}")  # cold: it heals from a living one's memory
        time.sleep(_LOOK_S)


def _with_state(found: Sequence[Event], members: set[str]) -> set[str]:
    """Return those members that have the state: all before the first step, then those that finished one or healed.

    Others, left alone, would begin anew, and nobody would notice.
    """
    if not any(event.event == ev.STEP_COMMIT for event in found):
        return members
    return members & {event.member for event in found if event.event in (ev.STEP_COMMIT, ev.CONNECTED)}


def _events(folder: Path) -> list[Event]:
    try:
        return read_events(folder)
    except RecoveryError:
        return []


def _usable(folder: Path) -> str:
    shards = sorted((folder / "checkpoints").glob("shard-*")) or [folder / "checkpoints"]
    steps = set.intersection(*[set(Checkpoints(shard).whole()) for shard in shards])
    return f"the newest checkpoint is that after step {max(steps)}" if steps else "there is no checkpoint"


def shard_folder(folder: Path, rank: int) -> Path:
    """Return where a rank's own checkpoints lie."""
    return folder / "checkpoints" / f"shard-{rank}"


def _result(plan: SwapPlan, folder: Path, outcome: str) -> SwapRun:
    found = read_events(folder)
    commits = [event for event in found if event.event == ev.STEP_COMMIT and event.step]
    recoveries = []
    for fault in [event for event in found if event.event == ev.FAULT]:
        # The step under way may still come to its end with what the dead rank had sent; that is no recovery.
        began = {(e.member, e.step) for e in found if e.event == ev.STEP_BEGIN and e.t > fault.t}
        after = next((e.t for e in commits if e.t > fault.t and (e.member, e.step) in began), None)
        if after is not None:
            recoveries.append(after - fault.t)
    blocked = sorted(event.info["blocked"] for event in commits if event.info.get("blocked") is not None)
    times = sorted(event.info["seconds"] for event in commits)
    return SwapRun(
        folder,
        plan,
        outcome,
        max((event.step or 0 for event in commits), default=0),
        tuple(recoveries),
        blocked[len(blocked) // 2] if blocked else None,
        times[len(times) // 2] if times else float("nan"),
    )
