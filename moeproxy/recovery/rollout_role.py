"""A rollout: generates shares with weights that it gets from whoever has them, and holds the trainer's state."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import RunSpec
from moeproxy.lab.worker import set_environment
from moeproxy.recovery import events as ev
from moeproxy.recovery.channel import Address, Server, fetch
from moeproxy.recovery.detection import Progress
from moeproxy.recovery.manager_role import Order
from moeproxy.recovery.member import Member
from moeproxy.recovery.plan import RolePlan

_KEPT = 2  # states of the trainer: the newest may be incomplete for the trainer's next step
_TRIES = 20


class RolloutRole:
    """One rollout process; an actor with several threads, so that it answers while it generates.

    Args:
        spec: `RunSpec.to_dict()`.
        plan: `RolePlan.to_dict()`.
        folder: of the job.
        name: "rollout-0", ...
    """

    def __init__(self, spec: dict[str, Any], plan: dict[str, Any], folder: Path, name: str) -> None:
        self._spec = RunSpec.from_dict(spec)
        set_environment(self._spec.settings.threads)
        self._member = Member(RolePlan.from_dict(plan), folder, ev.ROLLOUT, name)
        from moeproxy.lab.run import rollout_engine
        from moeproxy.lab.seams import Seams
        from moeproxy.recovery.packing import pack, sent_weights

        self._engine = rollout_engine(self._spec, Seams())
        begin = sent_weights(self._engine.model, self._spec.settings.sync_dtype)
        self._lock = threading.Lock()
        self._held: dict[int, bytes] = {}
        self._weights: dict[int, bytes] = {0: pack(begin)}
        self._loaded: int | None = None
        self._server = Server(lambda version: self._weights.get(version))
        self._member.say(ev.READY)

    def address(self) -> Address:
        """Return where others get weights from this member."""
        return self._server.address

    def progress(self) -> Progress:
        """Answer a heartbeat."""
        return self._member.progress()

    def connect(self, manager: Any, *, first: bool = False) -> None:
        """Use this manager from now on (the `first`: unless another was named), and tell it which weights are here."""
        self._member.connect(manager, first=first)
        for version in sorted(self._weights):
            self._announce(version)

    def hold(self, step: int, payload: bytes) -> None:
        """Hold the trainer's state after a step, and offer the weights in it to all rollouts."""
        from moeproxy.recovery.packing import pack, unpack

        with self._lock:
            self._held[step] = payload
            for old in sorted(self._held)[:-_KEPT]:
                del self._held[old]
        for version, weights in unpack(payload)["sent"].items():
            if version not in self._weights:
                self._keep(version, pack(weights))

    def held(self) -> list[int]:
        """Return after which steps the trainer's state is held here."""
        return sorted(self._held)

    def state(self, step: int) -> bytes:
        """Return the trainer's state after a step.

        Raises:
            RecoveryError: it is not held here.
        """
        try:
            return self._held[step]
        except KeyError as error:
            raise RecoveryError(f"the state after step {step} is not held", where=self._member.name) from error

    def work(self, manager: Any) -> int:
        """Generate shares of this manager, and of its replacements, until none is left; return how many it made."""
        import torch

        self.connect(manager, first=True)
        torch.set_num_threads(self._spec.settings.threads)  # of this thread
        made = 0
        while True:
            self._member.enter("idle", 0)
            order: Order | None = self._member.ask("next", self._member.name)
            if order is None:
                return made
            self._make(order)
            made += 1

    def _make(self, order: Order) -> None:
        self._member.enter("weights", order.step)
        self._load(order)
        self._member.enter("generate", order.step)
        rollouts = self._engine.generate(order.prompts, step=order.step, share=order.share)
        self._member.enter("deliver", order.step)
        payload = pickle.dumps(rollouts, protocol=pickle.HIGHEST_PROTOCOL)
        self._member.ask("deliver", self._member.name, order.step, order.share, payload)

    def _load(self, order: Order) -> None:
        if self._loaded == order.version:
            return
        from moeproxy.recovery.packing import receive_weights, unpack

        payload = self._weights.get(order.version)
        if payload is None:
            payload = self._fetched(order)
            self._keep(order.version, payload)
        receive_weights(self._engine.model, unpack(payload))
        if self._loaded is None:
            self._member.say(ev.CONNECTED, order.step, version=order.version)
        self._loaded = order.version

    def _fetched(self, order: Order) -> bytes:
        for _ in range(_TRIES - 1):
            try:
                return fetch(order.version, order.sources)
            except RecoveryError:
                if (payload := self._weights.get(order.version)) is not None:
                    return payload  # it came from the trainer meanwhile
                time.sleep(0.2)
        return fetch(order.version, order.sources)

    def _keep(self, version: int, weights: bytes) -> None:
        with self._lock:
            self._weights[version] = weights
            for old in sorted(self._weights)[: -(self._member.plan.lag + _KEPT)]:
                if old:  # those of the checkpoint stay: a task that starts again needs them
                    del self._weights[old]
        self._announce(version)

    def _announce(self, version: int) -> None:
        if self._member._manager is not None:
            self._member._manager.available.remote(self._member.name, self.address(), version)
