"""The trainer: the lab's GRPO trainer whose rollouts come from the manager, and whose state lies with rollouts."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.worker import set_environment
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.detection import Progress
from moeproxy.recovery.holding import Holding
from moeproxy.recovery.member import Member
from moeproxy.recovery.plan import Mishap, RolePlan

STATES = "checkpoints"
SHOWN = ("policy_loss", "reward_mean", "grad_norm")
"""Signals that go with the event of a finished step, for a live board."""


class TrainerRole:
    """One trainer process, or a standby that has everything loaded; an actor with several threads.

    It is its own trainer's rollout engine (`model`, `sync`, `generate`).

    Args:
        spec: `RunSpec.to_dict()`.
        plan: `RolePlan.to_dict()`.
        folder: of the job.
        name: "trainer", or "standby-..." for one that waits.
    """

    def __init__(self, spec: dict[str, Any], plan: dict[str, Any], folder: Path, name: str) -> None:
        self._spec = RunSpec.from_dict(spec)
        set_environment(self._spec.settings.threads)
        role = ev.TRAINER if name == ev.TRAINER else ev.STANDBY
        self._member = Member(RolePlan.from_dict(plan), folder, role, name)
        self._checkpoints = Checkpoints(folder / STATES)
        from torch import nn

        from moeproxy.lab.run import prepared

        self.model = nn.Module()  # the rollouts' weights are theirs
        self._holding = Holding(self._member.plan.answer)
        self._weights: dict[int, Any] = {}  # what rollouts were sent, by version
        self._committed = 0
        self._open = contextlib.ExitStack()
        self._trainer = self._open.enter_context(prepared(self._spec, self, self._keep))
        self._member.say(ev.READY)

    def progress(self) -> Progress:
        """Answer a heartbeat."""
        return self._member.progress()

    def committed(self) -> int:
        """Return the last step that is finished."""
        return self._committed

    def schedule(self) -> list[list[str]]:
        """Return the prompts of every step, in the order in which the trainer will come to them."""
        trainer: Any = self._trainer
        size = self._spec.settings.prompts * self._spec.settings.samples
        prompts = [trainer.train_dataset[int(i)]["prompt"] for i in trainer._get_train_sampler()]
        steps = self._spec.settings.steps
        one_pass(self._spec.settings, len(trainer.train_dataset))
        return [prompts[i * size : (i + 1) * size] for i in range(steps)]

    def connect(self, manager: Any, holders: Sequence[Any]) -> None:
        """Use this manager and these rollouts from now on; a new one gets the last state."""
        self._member.connect(manager)
        self._holding.name(holders)

    def train(self, name: str, state: bytes | None, manager: Any, holders: Sequence[Any]) -> int:
        """Train to the end, from a state or from the checkpoint; return the last step.

        Args:
            name: what the member is from now on: a standby becomes the trainer.
            state: after the last finished step, as a rollout held it.
            manager, holders: see `connect`, which may have been called with newer ones already.
        """
        import torch

        torch.set_num_threads(self._spec.settings.threads)  # of this thread
        self._member.rename(ev.TRAINER, name)
        if state is not None:
            self._member.enter("recover", 0)
            from moeproxy.lab.snapshot import Snapshot
            from moeproxy.recovery.packing import unpack

            stored = unpack(state)
            self._weights = stored.pop("sent")
            self._holding.resume(stored["step"], state)
            start = Snapshot(**stored)
            self._trainer.start_from(start)
            self._committed = start.step
        self._member.connect(manager, first=True)
        self._holding.name(holders, first=True)
        self._member.say(ev.CONNECTED, self._committed, pid=os.getpid())
        if self._committed < self._spec.settings.steps:
            self._trainer.train()
        self._holding.settle()
        return self._committed

    def sync(self, *_: Any, **__: Any) -> None:
        """Do nothing: weights go to the rollouts when they change."""

    def generate(self, prompts: Sequence[str], *, step: int) -> Any:
        """Return the responses that rollouts made for a step, waiting for them."""
        from moeproxy.lab.episode import Rollouts

        self._member.say(ev.STEP_BEGIN, step)
        self._member.enter("wait", step)
        shares: list[Rollouts] = [pickle.loads(payload) for payload in self._member.ask("take", step)]
        self._member.enter("update", step)
        made = joined(shares)
        if len(made.prompt_ids) != len(prompts):
            raise RecoveryError(f"{len(made.prompt_ids)} responses for {len(prompts)} prompts", where=f"step {step}")
        self._made = made
        return made

    def _keep(self, step: int, capture: Callable[[], dict[str, Any]]) -> None:
        """Give the state after a step to the holders, write the checkpoints that are due, and commit."""
        mishap = self._member.enter("publish", step)
        from moeproxy.recovery.packing import pack, sent_weights

        state, lag = capture(), self._member.plan.lag
        trained: Any = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self._weights[step] = sent_weights(trained, self._spec.settings.sync_dtype)
        self._weights = {version: self._weights[version] for version in sorted(self._weights)[-lag - 1 :]}
        payload = pack({"step": step, "passage": "", **state, "sent": self._weights})
        self._holding.give(step, payload)
        if self._member.plan.digests:
            self._digest(step, state)
        if step % self._member.plan.checkpoint_every == 0 or step == self._spec.settings.steps:
            self._write(step, payload, mishap)
        self._committed = step
        self._member.ask("commit", step)
        row = state["record"]["rows"][-1]
        self._member.say(ev.STEP_COMMIT, step, **{name: row[name] for name in SHOWN if name in row})

    def _digest(self, step: int, state: dict[str, Any]) -> None:
        from moeproxy.recovery.digests import FILE, DigestLog, digests

        batch = {"tokens": self._made.completion_ids, "logprobs": self._made.logprobs}
        DigestLog(self._member.folder / FILE).add(step, digests({**state, "batch": batch}))

    def _write(self, step: int, payload: bytes, mishap: Mishap | None) -> None:
        began, problem, path = time.monotonic(), "", None
        try:
            with _full_disk(mishap is not None and mishap.kind == "disk_full"):
                path = self._checkpoints.save(step, payload)
        except RecoveryError as error:
            problem = str(error)
        if path is not None and mishap is not None and mishap.kind == "corrupt":
            damage(path)
        self._member.say(ev.CHECKPOINT, step, seconds=time.monotonic() - began, problem=problem)


def one_pass(settings: GRPOSettings, prompts: int) -> None:
    """Refuse a run that would go over its prompts more than once: a second pass is in no schedule.

    Args:
        settings: of the run.
        prompts: how many it has; those that do not fill a step are never used.

    Raises:
        RecoveryError: so it would.
    """
    passes = prompts // settings.prompts
    if settings.steps > passes:
        more = f"add prompts to {settings.task_file}" if settings.environment == "file" else "raise tasks"
        raise RecoveryError(
            f"{settings.steps} steps of {settings.prompts} prompts go over {prompts} prompts more than once",
            expected=f"at most one pass: {passes} steps",
            remedy=f"{more}, or lower steps or prompts",
        )


def joined(shares: Sequence[Any]) -> Any:
    """Return the responses of several shares as one, in order."""
    from moeproxy.lab.episode import Rollouts

    def parts(name: str) -> list[Any] | None:
        found = [getattr(share, name) for share in shares]
        if all(part is None for part in found):
            return None
        if any(part is None for part in found):
            raise RecoveryError(f"some shares have {name}, others have none")
        return [item for part in found for item in part]

    whole: dict[str, Any] = {name: parts(name) for name in Rollouts.__dataclass_fields__}
    return Rollouts(**whole)


@contextlib.contextmanager
def _full_disk(full: bool) -> Iterator[None]:
    """Let the operating system refuse to write files: a limit on their size stands for a disk without room."""
    if not full:
        yield
        return
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIG_DFL
    with contextlib.suppress(ValueError):  # only the main thread may set it; Python ignores the signal anyway
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGXFSZ, handler)


def damage(path: Path, at: float = 0.5) -> None:
    """Turn over the bits of one byte of a file, `at` this share of its length."""
    with open(path, "r+b") as stream:
        stream.seek(int(path.stat().st_size * at))
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 0xFF]))
