"""What came of a job in roles: its folder, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance
from moeproxy.lab.settings import RunSpec
from moeproxy.recovery.checkpoints import Checkpoints
from moeproxy.recovery.effective import Ettr, ettr
from moeproxy.recovery.events import JOB_END, TASK_RESTART, read_events
from moeproxy.recovery.plan import RolePlan

_FORMAT = "moeproxy.rolejob"
_JOB = "job.json"
FINISHED = "finished"


@dataclass(frozen=True)
class RoleRun:
    """A job in roles.

    Args:
        folder: of its events, digests and checkpoints.
        spec: the run.
        plan: roles and mishaps.
        outcome: "finished", or why not; "finished training, but ..." when the last state could not be kept.
        step: the last finished step that is on disk.
    """

    folder: Path
    spec: RunSpec
    plan: RolePlan
    outcome: str
    step: int

    @property
    def finished(self) -> bool:
        """Whether it came to its end, and the state after its last step is whole on disk."""
        return self.outcome == FINISHED and self.step >= self.spec.settings.steps

    @property
    def task_restarts(self) -> list[str]:
        """Why the whole task was restarted, each time."""
        return [str(e.info.get("reason", "")) for e in read_events(self.folder) if e.event == TASK_RESTART]

    def ettr(self) -> Ettr:
        """Return its effective training time.

        Raises:
            RecoveryError: no step was finished.
        """
        return ettr(self.folder)

    def state(self) -> dict[str, Any]:
        """Return the trainer's newest state on disk: weights, optimizer, generators, record.

        Raises:
            RecoveryError: there is none that is whole.
        """
        from moeproxy.recovery.packing import unpack

        found = Checkpoints(self.folder / "checkpoints").newest()
        if found is None:
            raise RecoveryError("no checkpoint that is whole", where=self.folder)
        return unpack(found.payload)

    def trace(self) -> Any:
        """Return the trace of the job up to its newest checkpoint.

        Raises:
            RecoveryError: there is no checkpoint.
        """
        from moeproxy.lab.run import run_info
        from moeproxy.traces.partial import assembled

        record = self.state()["record"]
        return assembled(record["steps"], record["rows"], record["trajectories"], run_info(self.spec))

    def __repr__(self) -> str:
        steps, outcome = self.spec.settings.steps, self.outcome
        if outcome == FINISHED and not self.finished:  # removed or damaged since the job ended
            outcome = lost_end(steps, "its checkpoint is missing or damaged")
        return f"RoleRun({outcome}, {self.step} of {steps} steps, {self.folder.name})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[8:-1])}</p>"

    @staticmethod
    def load(folder: str | Path) -> RoleRun:
        """Read the folder of a job.

        Raises:
            RecoveryError: it is none, or has not ended.
        """
        place = Path(folder)
        spec, plan = read_job(place)
        ends = [event for event in read_events(place) if event.event == JOB_END]
        if not ends:
            raise RecoveryError("the job has not ended", where=place)
        found = Checkpoints(place / "checkpoints").newest()
        return RoleRun(place, spec, plan, str(ends[-1].info["outcome"]), found.step if found else 0)


def lost_end(step: int, why: str) -> str:
    """Return the outcome of a job that made all its steps, and whose last state is lost."""
    return f"finished training, but the state after step {step} is nowhere on disk: {why}"


def read_job(folder: Path) -> tuple[RunSpec, RolePlan]:
    """Return what the job of a folder is, whether it has ended or not.

    Raises:
        RecoveryError: the folder has none.
    """
    try:
        stored = json.loads((folder / _JOB).read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError("another format")
        return RunSpec.from_dict(stored["spec"]), RolePlan.from_dict(stored["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecoveryError(f"no job in roles ({error})", where=folder, expected=f"a folder with {_JOB}") from error


def write_job(spec: RunSpec, plan: RolePlan, folder: Path) -> None:
    """Write what a job is into its folder."""
    with atomic_file(folder / _JOB) as temporary:
        stored = {"format": _FORMAT, "spec": spec.to_dict(), "plan": plan.to_dict(), "provenance": provenance()}
        temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
