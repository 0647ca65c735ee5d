"""What a sweep hands to an executor, and what it gets back: jobs, failures, and the protocol between the two."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from moeproxy.errors import LabError
from moeproxy.files import atomic_file
from moeproxy.lab.settings import RunSpec
from moeproxy.traces.partial import partial_path

_FORMAT = "moeproxy.failure"
_WORDS = 5  # lines of a failed process that are kept


@dataclass(frozen=True)
class Job:
    """One run to make, and the file that its trace goes to."""

    spec: RunSpec
    path: Path

    @property
    def partial(self) -> Path:
        """The file that grows while the run goes."""
        return partial_path(self.path)


@dataclass(frozen=True)
class Failure:
    """A run that did not finish.

    Args:
        spec: the run.
        words: the last lines that its process wrote.
        exit_code: of its process; -9 when signal 9 killed it, None when nobody knows.
        seconds: how long it lasted, on a cluster from its submission on.
    """

    spec: RunSpec
    words: str
    exit_code: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.exit_code is None:
            return self.words
        ended = f"exit code {self.exit_code}" if self.exit_code >= 0 else f"killed by {_signal_name(-self.exit_code)}"
        return f"{ended}: {self.words or 'it said nothing'}"

    def save(self, path: Path) -> Path:
        """Write the failure to a JSON file, atomically, and return its path."""
        stored = {"format": _FORMAT, "spec": self.spec.to_dict(), "words": self.words, "exit_code": self.exit_code}
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps({**stored, "seconds": self.seconds}, indent=1), encoding="utf-8")
        return path

    @staticmethod
    def load(path: Path) -> Failure:
        """Read what `save` wrote.

        Raises:
            LabError: the file is no record of a failure.
        """
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["format"] != _FORMAT:
                raise ValueError(f"format {stored['format']!r}")
            spec = RunSpec.from_dict(stored["spec"])
            return Failure(spec, stored["words"], stored["exit_code"], stored["seconds"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LabError(
                f"no record of a failed run ({error!r})", where=path, remedy="remove it: the run is then made again"
            ) from error


Report = Callable[[Job, int, Mapping[str, float]], None]
"""Called with (job, step, signals): step 0 when the run has begun, then after every step."""


@runtime_checkable
class Executor(Protocol):
    """What carries the runs of a sweep: processes of this machine, a Ray cluster, a Slurm queue, or your own."""

    @property
    def workers(self) -> int:
        """Runs at a time."""
        ...

    def run(self, jobs: Sequence[Job], report: Report) -> Generator[tuple[Job, Failure | None], None, None]:
        """Make every run by `moeproxy.lab.worker.train` in a process of its own, and yield each as it ends.

        A run that fails takes no other with it. Closing the iterator, or an exception in it, ends the runs in flight.
        """
        ...


def failure_path(result: Path) -> Path:
    """Return the file that says why there is no result."""
    return result.with_suffix(".failed.json")


def last_words(text: str) -> str:
    """Return the last lines of what a process wrote, in one line."""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-_WORDS:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
