"""What the ranks of both drivers of hot swap share: program, events, digests, mishaps, an end with the parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moeproxy.lab.tasks import sample_many
from moeproxy.lab.tokens import PAD_ID, supervised_batch
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.digests import FILE, DigestLog, digests
from moeproxy.recovery.events import EventLog, read_events
from moeproxy.recovery.hotswap import SwapPlan, read_plan
from moeproxy.recovery.packing import pack
from moeproxy.recovery.plan import due


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

    def suffer(self, phase: str, step: int) -> None:
        """Die here and now, if the plan says so."""
        if due(self.plan.mishaps, self.folder, self.name, phase, step):
            self.say(ev.FAULT, step, kind="kill", phase=phase)
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(self, event: str, members: Sequence[str], patience: float = 120.0) -> None:
        """Wait until all of these members have logged an event, but not for ever."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if set(members) <= {found.member for found in read_events(self.folder) if found.event == event}:
                return
            time.sleep(0.05)

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
        self._digests.add(step, digests(state))
        self.say(ev.STEP_COMMIT, step, seconds=seconds, blocked=blocked)

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint to disk."""
        began = time.monotonic()
        self.suffer("publish", step)
        self._checkpoints.save(step, pack(state))
        self.say(ev.CHECKPOINT, step, seconds=time.monotonic() - began)

    def finish(self) -> None:
        """Say that the job has come to its end."""
        EventLog(self.folder, ev.JOB, "job").add(ev.JOB_END, self.plan.steps, outcome="finished")


def end_with_parent() -> None:
    """End this process when the one that started it ends, however it ends: its end of the standard input closes."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
