"""Hot swap (PHOENIX, arXiv 2607.01646): a spare takes over for a dead rank, and the job never ends.

One interface, two drivers on existing engines, each for one kind of state:

| driver | state | engine | what the spare gets |
|---|---|---|---|
| replicated | all of it on every rank | torchft, fixed world with spares | nothing: it follows every step |
| sharded | a part on each rank (FSDP2) | nvidia-resiliency-ext, in-process | the part, from a neighbour's memory |

Shards are copied beside the next step. A rank that dies before its last copy has arrived costs that one step: it is
done again, with the same result.

The program is supervised training of a testbed model; the batch of a step depends on step and rank only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.events import Event, EventLog, read_events
from moeproxy.recovery.inputs import positive, usable_folder, usable_model, whole, yes_or_no
from moeproxy.recovery.plan import RANK_KINDS, Mishap, happening
from moeproxy.recovery.snapshot_cost import SnapshotCost, ratios, snapshot_cost
from moeproxy.recovery.swap_processes import LIGHTHOUSE, Processes

REPLICATED, SHARDED = "replicated", "sharded"
DRIVERS: Mapping[str, tuple[str, str]] = {
    REPLICATED: ("torchft", "moeproxy.recovery.hotswap_replicated"),
    SHARDED: ("nvidia_resiliency_ext", "moeproxy.recovery.hotswap_sharded"),
}
"""Driver -> the package it needs, and the module that a member runs."""

FINISHED = "finished"
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
        snapshot_every: with `sharded`, steps between copies of each shard to a neighbour; more than one costs the steps
            since then when a rank dies.
        digests: whether to log digests of every state, for `verify`; with `sharded`, of those that are copied.
        heartbeat: seconds without a sign of life after which a member counts as dead; a dead process is noticed at once
            with `sharded`, and a machine after ten seconds or more.
        timeout: seconds after which a collective is given up.
        mishaps: members are "trainer-0", ..., in the order in which they were started, spares last; phases `update`
            (before the weights change), `publish` (while a snapshot or checkpoint is written; with `replicated` of the
            rank that writes it, the first), `recover` and, with `sharded`, `wait` (of a spare, of kind `kill`). With
            `replicated`, of kind `kill` only.

    Raises:
        RecoveryError: a value that cannot work, or a mishap that would never happen.
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
    snapshot_every: int = 1
    digests: bool = True
    heartbeat: float = 0.5
    timeout: float = 2.0
    mishaps: tuple[Mishap, ...] = ()

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise RecoveryError(f"no driver {self.driver!r}", expected=f"one of {', '.join(DRIVERS)}")
        least = {"active": 2, "spares": 0, "seed": 0}
        least |= dict.fromkeys(("steps", "batch", "checkpoint_every", "snapshot_every"), 1)
        for name, value in least.items():
            whole(name, getattr(self, name), value)
        positive("learning_rate", self.learning_rate, zero=True)
        yes_or_no("digests", self.digests)
        for name in ("heartbeat", "timeout"):
            positive(name, getattr(self, name))
        self._check_mishaps()

    def _check_mishaps(self) -> None:
        kinds = RANK_KINDS if self.driver == SHARDED else ("kill",)
        if others := {item.kind for item in self.mishaps} - set(kinds):
            raise RecoveryError(f"mishaps of kind {', '.join(sorted(others))}", expected=", ".join(kinds))
        unknown = {item.member for item in self.mishaps} - set(self.members)
        if unknown:
            raise RecoveryError(f"mishaps of {', '.join(sorted(unknown))}", expected=f"of {', '.join(self.members)}")
        waiting = [item for item in self.mishaps if item.phase == "wait"]
        if others := {item.member for item in waiting} - set(self.members[self.active :]):
            raise RecoveryError(f"mishaps in phase wait of {', '.join(sorted(others))}", expected="of a spare")
        if others := {item.kind if self.driver == SHARDED else self.driver for item in waiting} - {"kill"}:
            raise RecoveryError(
                f"mishaps in phase wait: {', '.join(sorted(others))}", expected=f"kind kill, driver {SHARDED}"
            )
        happening(self.mishaps, self.steps, {"publish": lambda item: self._publishes(item.step)})

    def _publishes(self, step: int) -> bool:
        copied = self.driver == SHARDED and step % self.snapshot_every == 0
        return copied or step % self.checkpoint_every == 0

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
    with atomic_file(place / _PLAN) as temporary:
        temporary.write_text(json.dumps({**plan.to_dict(), "provenance": provenance()}, indent=1), encoding="utf-8")
    log = EventLog(place, ev.JOB, "job")
    outcome = "interrupted"
    try:
        with Processes(place, module, plan.members) as processes:
            log.add(ev.JOB_START, trainers=plan.active, rollouts=0)
            outcome = _watch(plan, place, processes, time.monotonic() + limit)
    finally:
        log.add(ev.JOB_END, outcome=outcome)
    return _result(plan, place, outcome)


def read_plan(folder: Path) -> SwapPlan:
    """Return the plan of a member's job."""
    stored = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
    stored.pop("provenance")
    return SwapPlan.from_dict(stored)


def _watch(plan: SwapPlan, folder: Path, processes: Processes, deadline: float) -> str:
    """Wait for the job's end; with replicas, start another one when fewer are left than train."""
    dead: set[str] = set()
    while True:
        if time.monotonic() > deadline:
            return f"out of time; {_usable(plan, folder)}"
        found = _events(folder)
        outcome = next((str(event.info["outcome"]) for event in found if event.event == ev.JOB_END), "")
        if outcome:
            return outcome if outcome == FINISHED else f"{outcome}; {_usable(plan, folder)}"
        for member in sorted(processes.gone() - dead):
            EventLog(folder, ev.TRAINER, member).add(ev.DETECT, kind="died", silent=_silent(found, member))
            dead.add(member)
        up = set(processes.running) - dead - {LIGHTHOUSE}
        living = _with_state(found, up) if plan.driver == REPLICATED else up
        if len(living) < (1 if plan.driver == REPLICATED else plan.active):
            return f"failed: {len(living)} of {plan.active} ranks are left and no spare; {_usable(plan, folder)}"
        if plan.driver == REPLICATED and len(up) < plan.active:
            processes.start(f"trainer-{len(processes.running) - 1}")  # cold: it heals from a living one's memory
        time.sleep(_LOOK_S)


def _silent(events: Sequence[Event], member: str) -> float:
    """Return the seconds since a rank's last sign of life in a step; 0 of one that was in none, such as a spare."""
    last = max((event for event in events if event.member == member), key=lambda event: event.t, default=None)
    in_step = last is not None and last.event in (ev.STEP_BEGIN, ev.STEP_COMMIT)
    return max(0.0, time.time() - last.t) if last is not None and in_step else 0.0


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


def _usable(plan: SwapPlan, folder: Path) -> str:
    sharded = [shard_folder(folder, rank) for rank in range(plan.active)]
    shards = sharded if plan.driver == SHARDED else [folder / "checkpoints"]
    steps = set.intersection(*[set(Checkpoints(shard).whole()) for shard in shards])
    return f"the newest checkpoint is that after step {max(steps)}" if steps else "there is no checkpoint"


def shard_folder(folder: Path, rank: int) -> Path:
    """Return where a rank's own checkpoints lie."""
    return folder / "checkpoints" / f"shard-{rank}"


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
