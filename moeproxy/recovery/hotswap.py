"""Hot swap (PHOENIX, arXiv 2607.01646): a spare takes over for a dead rank, and the job never ends.

One interface, two drivers on existing engines, each for one kind of state:

| driver | state | engine | what the spare gets |
|---|---|---|---|
| replicated | all of it on every rank | torchft, fixed world with spares | nothing: it follows every step |
| sharded | a part on each rank (FSDP2) | nvidia-resiliency-ext, in-process | the part, from memory: here or next door |

A process that dies costs no finished step. Where its machine dies with it (`machine_survives`), a copy that had not
arrived next door yet costs its step: it is done again, with the same result.

The program is supervised training of a testbed model; the batch of a step depends on step and rank only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance
from moeproxy.recovery import events as ev
from moeproxy.recovery.events import Event, EventLog, read_events
from moeproxy.recovery.inputs import positive, usable_folder, usable_model
from moeproxy.recovery.snapshot_cost import SnapshotCost, ratios, snapshot_cost
from moeproxy.recovery.swap_plan import DRIVERS, FINISHED, PLAN_FILE, SwapPlan
from moeproxy.recovery.swap_processes import Processes
from moeproxy.recovery.swap_watch import Watch

__all__ = ["SwapPlan", "SwapRun", "hot_swap", "lost_steps", "recoveries"]


@dataclass(frozen=True)
class SwapRun:
    """What came of a job whose ranks can be swapped.

    Args:
        folder: of its events, digests and checkpoints.
        plan: of the job.
        outcome: "finished", or why not and what is usable.
        step: the last step that any member finished.
        lost: steps that had been finished by all and were done again.
        recoveries: for each fault, else its detection, the seconds to the end of the first step that began after it.
        blocked: median seconds that a snapshot held a step up, None without snapshots.
        seconds: median seconds of a step.
        cost: what snapshots cost, None unless there are steps with and without one, as with `snapshot_every` 2.
    """

    folder: Path
    plan: SwapPlan
    outcome: str
    step: int
    lost: int
    recoveries: tuple[float, ...]
    blocked: float | None
    seconds: float
    cost: SnapshotCost | None = None

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.outcome == FINISHED

    def __repr__(self) -> str:
        swaps = ", ".join(f"{seconds:.2f} s" for seconds in self.recoveries) or "none"
        return f"SwapRun({self.outcome}, {self.step} of {self.plan.steps} steps, {self.lost} lost, recoveries: {swaps})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[8:-1])}</p>"


def hot_swap(plan: SwapPlan, folder: str | Path, *, limit: float = 120.0) -> SwapRun:
    """Train with ranks that can be swapped, and return what came of it.

    Args:
        plan: driver, ranks, mishaps.
        folder: new or empty.
        limit: seconds after which the job is ended.

    Raises:
        RecoveryError: the driver's package is not installed, there is no such model, the folder is not empty, or the
            limit is no number above 0.

    Example:
        >>> hot_swap(SwapPlan(model, mishaps=(Mishap("trainer-1", 8, "update"),)), "swapped").recoveries
    """
    package, module = DRIVERS[plan.driver]
    if find_spec(package) is None:
        raise RecoveryError(f"{package} is not installed", remedy="python -m pip install 'moeproxy[recovery]'")
    positive("limit", limit, endless=True)
    usable_model(plan.model)
    place = Path(folder).absolute()
    usable_folder(place)
    with atomic_file(place / PLAN_FILE) as temporary:
        temporary.write_text(json.dumps({**plan.to_dict(), "provenance": provenance()}, indent=1), encoding="utf-8")
    log, deadline = EventLog(place, ev.JOB, "job"), time.monotonic() + limit
    outcome = "interrupted"
    try:
        with Processes(place, module, plan.members, plan.outliving) as processes:
            log.add(ev.JOB_START, trainers=plan.active, rollouts=0)
            outcome = Watch(plan, place, processes).outcome(deadline)
    finally:
        log.add(ev.JOB_END, outcome=outcome)
    return _result(plan, place, outcome)


def _result(plan: SwapPlan, folder: Path, outcome: str) -> SwapRun:
    found = read_events(folder)
    commits = [event for event in found if event.event == ev.STEP_COMMIT and event.step]
    blocked = [event.info["blocked"] for event in commits if event.info.get("blocked") is not None]
    times = [event.info["seconds"] for event in commits]
    return SwapRun(
        folder,
        plan,
        outcome,
        max((event.step or 0 for event in commits), default=0),
        lost_steps(found, plan.active),
        recoveries(found),
        median(blocked) if blocked else None,
        median(times) if times else float("nan"),
        snapshot_cost(ratios(found)),
    )


def recoveries(events: Sequence[Event]) -> tuple[float, ...]:
    """Return for each fault the seconds from it to the end of the first step that began after it.

    Args:
        events: of the job, in order. A fault that nobody logged begins with its detection.
    """
    begun, known = [], set[str]()
    for number, event in enumerate(events):
        if event.event == ev.FAULT or (event.event == ev.DETECT and event.member not in known):
            begun.append((event.t, _first_end(events[number + 1 :])))
        if event.event == ev.FAULT:
            known.add(event.member)
        elif event.event == ev.DETECT:
            known.discard(event.member)
    return tuple(end - fault for fault, end in begun if end is not None)


def _first_end(events: Sequence[Event]) -> float | None:
    """Return when the first step ended that also began; one under way may end with what a dead rank had sent."""
    begun: set[tuple[str, int | None]] = set()
    for event in events:
        if event.event == ev.STEP_BEGIN:
            begun.add((event.member, event.step))
        elif event.event == ev.STEP_COMMIT and (event.member, event.step) in begun:
            return event.t
    return None


def lost_steps(events: Sequence[Event], active: int) -> int:
    """Return how many steps were done again though all ranks had finished them.

    Args:
        events: of the job, in order.
        active: number of ranks that train.
    """
    done: dict[int, set[str]] = {}
    again: set[int] = set()
    for event in events:
        if event.event == ev.STEP_COMMIT and event.step:
            done.setdefault(event.step, set()).add(event.member)
        elif event.event == ev.STEP_BEGIN and event.step:
            by = done.get(event.step, set())
            again |= {event.step} if event.member in by and len(by) >= active else set()
    return len(again)
