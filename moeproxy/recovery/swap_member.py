"""What the ranks of both drivers of hot swap share: program, events, digests, mishaps, the lighthouse."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file
from moeproxy.lab.tasks import sample_many
from moeproxy.lab.tokens import PAD_ID, supervised_batch
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.digests import FILE, DigestLog, digests
from moeproxy.recovery.events import Event, EventLog, read_events, since_start
from moeproxy.recovery.packing import pack
from moeproxy.recovery.plan import Mishap, suffer
from moeproxy.recovery.swap_plan import FINISHED, SwapPlan, read_plan
from moeproxy.recovery.swap_processes import ADDRESS

_LOOK_S = 0.05


class SwapMember:
    """One rank's process.

    Args:
        folder: of the job.
        name: "trainer-0", ...
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.plan: SwapPlan = read_plan(folder)
        self.folder, self.name = folder, name
        self._log, self._digests = EventLog(folder, ev.TRAINER, name), DigestLog(folder / FILE)
        self._checkpoints = Checkpoints(folder / "checkpoints")
        torch.set_num_threads(1)
        self.say(ev.START, pid=os.getpid())

    def say(self, event: str, step: int | None = None, **info: Any) -> None:
        """Log one event."""
        self._log.add(event, step, **info)

    def suffer(self, phase: str, step: int) -> Mishap | None:
        """Die here and now, hang, fail or be slow, if the plan says so; return a mishap that the caller has to make."""
        return suffer(self.plan.mishaps, self.folder, self.name, phase, step, self.say)

    def wait_for(self, event: str, members: Sequence[str], step: int = 0, patience: float = 120.0) -> bool:
        """Wait until all of these members have logged an event, of this step or a later one, but not for ever.

        One that was noticed to have failed is waited for no longer. Returns whether any has logged it.
        """
        deadline = time.monotonic() + patience
        while True:
            events = since_start(read_events(self.folder))
            found = {item.member for item in events if item.event == event and (item.step or 0) >= step}
            if set(members) <= found | _failed(events) or time.monotonic() > deadline:
                return bool(found & set(members))
            time.sleep(_LOOK_S)

    def saved(self, step: int, patience: float) -> bool:
        """Wait until a rank has written the checkpoint of a step; return whether one has.

        No longer than `patience` seconds, and not at all when a rank has failed that may have had to.
        """
        deadline = time.monotonic() + patience
        while True:
            events = [item for item in since_start(read_events(self.folder)) if item.step == step or not item.step]
            if any(item.event == ev.CHECKPOINT and not item.info.get("problem") for item in events):
                return True
            if time.monotonic() > deadline or _failed(events) & {item.member for item in events if item.step}:
                return False
            time.sleep(_LOOK_S)

    def model(self) -> Any:
        """Return the model that is trained, from its checkpoint."""
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            self.plan.model, dtype="float32", experts_implementation="grouped_mm"
        )
        return loaded.train()

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return the optimizer."""
        return torch.optim.AdamW(model.parameters(), lr=self.plan.learning_rate, foreach=False)

    def loss(self, model: Any, step: int, rank: int) -> torch.Tensor:
        """Return the loss of the batch of a step (from 1) and rank."""
        seed = 1_000_003 * (self.plan.seed + 1) + 1009 * step + rank
        tasks = sample_many(self.plan.batch, seed=seed)
        ids_BT, labels_BT = supervised_batch(tasks, [task.answer for task in tasks])
        return model(input_ids=ids_BT, attention_mask=(ids_BT != PAD_ID).long(), labels=labels_BT).loss

    def done(self, step: int, state: Mapping[str, Any], *, seconds: float, blocked: float | None = None) -> None:
        """Log the digests after a step, and that it is done."""
        if self.plan.digests:
            self.digest(step, state)
        self.say(ev.STEP_COMMIT, step, seconds=seconds, blocked=blocked)

    def digest(self, step: int, state: Mapping[str, Any]) -> None:
        """Log the digests after a step."""
        self._digests.add(step, digests(state))

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint to disk; where there is no room for it the job goes on."""
        began, problem = time.monotonic(), ""
        self.suffer("publish", step)
        try:
            self._checkpoints.save(step, pack(state))
        except RecoveryError as error:
            problem = str(error)
        self.say(ev.CHECKPOINT, step, seconds=time.monotonic() - began, problem=problem)

    def finish(self, outcome: str = FINISHED) -> None:
        """Say that the job has come to its end, and to which."""
        EventLog(self.folder, ev.JOB, "job").add(ev.JOB_END, self.plan.steps, outcome=outcome)


def _failed(events: Sequence[Event]) -> set[str]:
    return {event.member for event in events if event.event == ev.DETECT}


def say_address(folder: Path, address: str) -> None:
    """Let the members of a job know where its lighthouse is."""
    with atomic_file(folder / ADDRESS) as temporary:
        temporary.write_text(address, encoding="utf-8")


def lighthouse_address(folder: Path, patience: float = 60.0) -> str:
    """Return where the lighthouse of a job is, once it is there.

    Raises:
        RecoveryError: it does not come up.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if (folder / ADDRESS).exists():
            return (folder / ADDRESS).read_text(encoding="utf-8")
        time.sleep(0.02)
    raise RecoveryError("the lighthouse did not come up", where=folder / "lighthouse.log")
