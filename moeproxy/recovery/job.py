"""A GRPO job in roles on Ray, which outlives the death of any of them (RobustRL, arXiv 2512.22492).

The job's own loop watches its members, and never waits for one of them alone: while a replacement starts, the others
work on and their faults are noticed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.lab.settings import RunSpec
from moeproxy.recovery import events as ev
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.crew import DONE, READY, STARTING, WORKING, Worker, answer, hired, let_go, ray_running
from moeproxy.recovery.detection import ASK, FAILED, Monitor
from moeproxy.recovery.events import EventLog, trainer_step
from moeproxy.recovery.feasible import check
from moeproxy.recovery.inputs import positive
from moeproxy.recovery.outcome import FINISHED, RoleRun, lost_end, write_job
from moeproxy.recovery.plan import NONE, RolePlan
from moeproxy.recovery.policy import HUNG, NO_RESTART, RESTART_TASK, STOP, Policy
from moeproxy.recovery.trainer_role import STATES

_LOOK_S = 0.05
_START_S = 180.0
Report = Callable[[dict[str, Any]], None]


class Job:
    """One job in roles. `run` makes it; `kill` and `stop` may be called from other threads meanwhile.

    Args:
        spec: a healthy run of the lab.
        folder: new or empty; takes events, digests, checkpoints and the trace.
        plan: roles, detection, strategy, mishaps.
        report: called about twice a second with the state of all members, for a live board.

    Raises:
        RecoveryError: there is no such model, the folder holds another job, or the run cannot be made in roles.
    """

    def __init__(self, spec: RunSpec, folder: str | Path, plan: RolePlan | None = None, report: Report | None = None):
        self.spec, self.folder, self.plan = spec, Path(folder).absolute(), plan or RolePlan()
        check(spec, self.plan, self.folder)
        self._report = report or (lambda _: None)
        self._workers: dict[str, Worker] = {}
        self._monitor, self._policy = Monitor(self.plan), Policy(self.plan)
        self._checkpoints = Checkpoints(self.folder / STATES)
        self._log = EventLog(self.folder, ev.JOB, "job")
        self._schedule: Any = None
        self._committed, self._standbys = 0, 0
        self._from_disk: bytes | None = None
        self._stopped = threading.Event()
        self._outcome = ""

    def kill(self, member: str) -> int:
        """Kill a member's process with SIGKILL, as a fault of its machine would, and return its number.

        Raises:
            RecoveryError: no such member, or it is not up.
        """
        worker = self._workers.get(member)
        if worker is None or not worker.pid:
            up = [name for name, w in self._workers.items() if w.pid]
            raise RecoveryError(f"{member!r} is not up", expected=f"one of {', '.join(up) or '(none yet)'}")
        EventLog(self.folder, worker.role, worker.name).add(ev.FAULT, trainer_step(self.folder), kind="kill")
        os.kill(worker.pid, signal.SIGKILL)
        return worker.pid

    @property
    def ended(self) -> bool:
        """Whether the job has come to an end of any kind."""
        return bool(self._outcome)

    def stop(self) -> None:
        """Let `run` end soon, and all processes with it."""
        self._stopped.set()

    def run(self, limit: float = 3600.0) -> RoleRun:
        """Make the job and return what came of it.

        Args:
            limit: seconds after which it is stopped.

        Raises:
            LabError: no Ray could be started.
            RecoveryError: Ray is not installed, or the limit is no number above 0.
        """
        positive("limit", limit, endless=True)
        write_job(self.spec, self.plan, self.folder)
        with ray_running():
            try:
                self._start_all()
                self._log.add(ev.JOB_START, trainers=1, rollouts=self.plan.rollouts)
                self._loop(time.monotonic() + limit)
            finally:
                for worker in list(self._workers.values()):
                    let_go(worker)
                self._workers.clear()
                self._log.add(ev.JOB_END, self._committed, outcome=self._outcome or "interrupted")
        return RoleRun.load(self.folder)

    def _loop(self, deadline: float) -> None:
        looked = 0.0
        while not self._outcome:
            if self._stopped.is_set() or time.monotonic() > deadline:
                self._outcome = "stopped" if self._stopped.is_set() else "out of time"
                return
            self._hear()
            if time.monotonic() - looked > self.plan.heartbeat:
                looked = time.monotonic()
                self._look()
                self._report(self.board())

    def board(self) -> dict[str, Any]:
        """Return what every member is doing now."""
        seen = self._monitor.seen()
        members = {
            name: {"role": w.role, "state": w.state, "pid": w.pid, "phase": seen[name].phase if name in seen else ""}
            for name, w in list(self._workers.items())
        }
        return {"step": self._committed, "steps": self.spec.settings.steps, "members": members}

    # Starting.

    def _hire(self, name: str, role: str) -> None:
        if role == ev.MANAGER:
            prompts, plan = self._schedule, self.plan
            # Exactly where the trainer is: a manager that is behind would have steps made that nobody takes.
            done = trainer_step(self.folder) - 1 if self._from_disk is None else self._committed
            arguments: tuple[Any, ...] = (prompts, plan.to_dict(), done, self.folder)
        else:
            arguments = (self.spec.to_dict(), self.plan.to_dict(), self.folder, name)
        self._monitor.forget(name)
        self._workers[name] = hired(name, role, time.monotonic(), *arguments)

    def _start_all(self) -> None:
        self._hire(ev.TRAINER, ev.TRAINER)
        for name in self.plan.rollout_names:
            self._hire(name, ev.ROLLOUT)
        if self._schedule is not None:
            self._hire(ev.MANAGER, ev.MANAGER)
        self._hire_standby()

    def _hire_standby(self) -> None:
        if self.plan.standby and not any(w.role == ev.STANDBY for w in self._workers.values()):
            self._standbys += 1
            self._hire(f"standby-{self._standbys}", ev.STANDBY)

    def _begin(self) -> None:
        """Let every member that is ready, and has what it needs, work."""
        trainer, manager = self._workers.get(ev.TRAINER), self._workers.get(ev.MANAGER)
        if self._schedule is None and trainer and trainer.state == READY:
            self._schedule, problem, cause = answer(trainer.actor.schedule.remote(), _START_S)
            if problem:
                self._fault(trainer, problem, cause)
            else:
                self._hire(ev.MANAGER, ev.MANAGER)
            return
        if manager is None or manager.state == STARTING:
            return
        if manager.state == READY:
            self._begin_manager(manager)
        for worker in [w for w in self._workers.values() if w.state == READY and w.role == ev.ROLLOUT]:
            worker.waited, worker.state = worker.actor.work.remote(manager.actor), WORKING
            self._policy.restarted(worker.name)
            self._connect_trainer()
        if trainer and trainer.state == READY and self._up(ev.ROLLOUT):
            self._begin_trainer(trainer, manager)

    def _begin_manager(self, manager: Worker) -> None:
        manager.waited, manager.state = manager.actor.serve.remote(), WORKING
        for rollout in self._up(ev.ROLLOUT):
            rollout.actor.connect.remote(manager.actor)
        self._connect_trainer()

    def _begin_trainer(self, trainer: Worker, manager: Worker) -> None:
        self._committed, state = self._newest_state()
        self._from_disk = None
        trainer.state, trainer.looked = WORKING, None
        trainer.waited = trainer.actor.train.remote(ev.TRAINER, state, manager.actor, self._holders())
        self._policy.restarted(ev.TRAINER)

    def _holders(self) -> list[Any]:
        return [w.actor for w in self._up(ev.ROLLOUT)][: self.plan.holders]

    def _newest_state(self) -> tuple[int, Any]:
        """Return (step, state) to go on from: of a rollout's memory, else of the disk, else (0, None)."""
        if self._from_disk is not None:
            return self._committed, self._from_disk
        best = self._newest_held()
        if best is not None:
            return best[0], best[1].actor.state.remote(best[0])  # from memory to memory, not through here
        found = None if self.plan.strategy == NONE else self._checkpoints.newest()
        return (found.step, found.payload) if found else (0, None)

    def _newest_held(self) -> tuple[int, Worker] | None:
        """Return (step, rollout) of the newest state that a rollout holds in memory."""
        import ray
        from ray.exceptions import RayError

        best: tuple[int, Worker] | None = None
        for rollout in self._up(ev.ROLLOUT):
            with contextlib.suppress(RayError):
                steps = ray.get(rollout.actor.held.remote(), timeout=self.plan.answer)
                if steps and (best is None or steps[-1] > best[0]):
                    best = steps[-1], rollout
        return best

    def _connect_trainer(self) -> None:
        trainer, manager = self._workers.get(ev.TRAINER), self._workers.get(ev.MANAGER)
        if trainer and manager and trainer.state == WORKING and manager.state == WORKING:
            trainer.actor.connect.remote(manager.actor, self._holders())

    def _up(self, role: str) -> list[Worker]:
        return [w for w in self._workers.values() if w.role == role and w.state in (WORKING, DONE)]

    # Noticing.

    def _hear(self) -> None:
        """Take the next thing that a member says: that it is ready, that it is done, or that it is dead."""
        import ray

        waited = {w.waited: w for w in self._workers.values() if w.state in (STARTING, WORKING)}
        ended, _ = ray.wait(list(waited), timeout=_LOOK_S)
        for reference in ended:
            worker = waited[reference]
            if self._workers.get(worker.name) is not worker:
                continue  # replaced while this list was gone through
            said, problem, cause = answer(reference)
            if problem:
                self._fault(worker, NO_RESTART if worker.state == STARTING else problem, cause)
            elif worker.state == STARTING:
                worker.pid, worker.state = said, READY
                if worker.promoted:  # it said so of the standby that it was
                    EventLog(self.folder, worker.role, worker.name).add(ev.READY, trainer_step(self.folder))
                self._begin()
            else:
                worker.state = DONE
                if worker.role == ev.TRAINER:
                    self._finish(said)
        late = [w for w in self._workers.values() if w.state == STARTING and time.monotonic() - w.since > _START_S]
        for worker in late:
            self._fault(worker, NO_RESTART)

    def _look(self) -> None:
        """Ask members what they are doing, and judge those that should be doing something."""
        import ray

        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.state == WORKING]:
            if worker.looked is not None and ray.wait([worker.looked], timeout=0)[0]:
                progress, problem, _ = answer(worker.looked)
                worker.looked = None
                if not problem:
                    self._monitor.answered(worker.name, progress, now)
                    if worker.role == ev.TRAINER:
                        self._committed = max(self._committed, progress.step - 1)
            verdict = self._monitor.judge(worker.name, worker.role, now)
            if verdict == FAILED:
                self._fault(worker, HUNG, silent=self._monitor.silent(worker.name, now))
                return
            if worker.looked is None or verdict == ASK:
                worker.looked = worker.actor.progress.remote()

    # Answering.

    def _fault(self, worker: Worker, kind: str, cause: str = "", silent: float = 0.0) -> None:
        step = trainer_step(self.folder)
        said: dict[str, Any] = {name: value for name, value in (("cause", cause), ("silent", silent)) if value}
        EventLog(self.folder, worker.role, worker.name).add(ev.DETECT, step, kind=kind, **said)
        let_go(worker)
        del self._workers[worker.name]
        if worker.role == ev.STANDBY:
            if kind != NO_RESTART:
                self._hire_standby()
            return
        decision = self._policy.decide(kind, worker.name, step)
        if decision.action == STOP:
            self._outcome = "; ".join(filter(None, (f"failed: {decision.reason}", cause, self._kept())))
        elif decision.action == RESTART_TASK:
            self._restart_task(decision.reason)
        else:
            self._restart_role(worker)

    def _restart_role(self, worker: Worker) -> None:
        import ray

        manager = self._workers.get(ev.MANAGER)
        if worker.role == ev.ROLLOUT and manager and manager.state == WORKING:
            # Before its replacement can ask for work under the same name.
            ray.wait([manager.actor.lost.remote(worker.name)], timeout=self.plan.answer)
        standby = next((w for w in self._workers.values() if w.role == ev.STANDBY), None)  # at worst still starting
        if worker.role == ev.TRAINER and standby:
            del self._workers[standby.name]
            standby.name, standby.role, standby.promoted = ev.TRAINER, ev.TRAINER, standby.state == STARTING
            self._workers[ev.TRAINER] = standby
            self._monitor.forget(ev.TRAINER)
            if standby.state == READY:
                EventLog(self.folder, ev.TRAINER, ev.TRAINER).add(ev.READY, trainer_step(self.folder))
                self._begin()
            self._hire_standby()  # afterwards: nobody waits for the next one
        else:
            self._hire(worker.name, worker.role)
            self._connect_trainer()

    def _finish(self, step: int) -> None:
        """End the job; a last state that is not whole on disk is written again from a rollout's memory."""
        self._committed, began, taken = step, time.monotonic(), []

        def held() -> bytes:
            taken.append(step)
            return self._held_state(step)

        problem = self._checkpoints.ensure(step, held)
        if taken:
            self._log.add(ev.CHECKPOINT, step, seconds=time.monotonic() - began, problem=problem, again=True)
        self._outcome = lost_end(step, f"{problem}; {self._kept()}") if problem else FINISHED

    def _held_state(self, step: int) -> bytes:
        best = self._newest_held()
        if best is None or best[0] < step:
            held = f"the newest state held is that after step {best[0]}" if best else "no rollout holds a state"
            raise RecoveryError(f"its checkpoint is missing or damaged, and {held}")
        state, problem, cause = answer(best[1].actor.state.remote(step), _START_S)
        if problem:
            raise RecoveryError(f"its checkpoint is missing or damaged, and {best[1].name} did not give it ({cause})")
        return state

    def _kept(self) -> str:
        newest = self._checkpoints.newest()
        return f"the newest checkpoint is that after step {newest.step}" if newest else "there is no checkpoint"

    def _restart_task(self, reason: str) -> None:
        """Restart everything from the newest checkpoint on disk that is whole."""
        found = None if self.plan.strategy == NONE else self._checkpoints.newest()
        skipped = list(found.skipped) if found else []
        self._log.add(ev.TASK_RESTART, trainer_step(self.folder), reason=reason, skipped=skipped)
        for worker in list(self._workers.values()):
            let_go(worker)
        self._workers.clear()
        self._committed = found.step if found else 0
        self._from_disk = found.payload if found else None
        self._policy.task_restarted(self._committed + 1)
        self._start_all()
