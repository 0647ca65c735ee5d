"""Recording: what every rank of a real run got from the others, on disk, so that one rank can run again alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeproxy.errors import ScaleError
from moeproxy.scale import checks
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.layout import Layout
from moeproxy.scale.program import GRPOProgram

FORMAT = 1
INDEX = "recording.json"


@dataclass(frozen=True)
class Recording:
    """A recorded run of a few steps.

    Attributes:
        path: its directory: `recording.json` and one `rank-<n>.safetensors` for each rank.
        program: what ran.
        world, ep: where.
        steps: how many.
        losses, logprobs: of every step, by rank.
        weights: SHA-256 of the final shards, by rank.
        seconds: wall time of every step, by rank.
        provenance: versions, machine, time.
        checksums: SHA-256 of each rank's file; empty in recordings of earlier versions.
    """

    path: Path
    program: GRPOProgram
    world: int
    ep: int
    steps: int
    losses: tuple[tuple[float, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    weights: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]
    provenance: Mapping[str, Any]
    checksums: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Recording:
        """Read a recording's index.

        Raises:
            ScaleError: there is none, or it is damaged.
        """
        folder = Path(path)
        try:
            stored = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if stored.pop("format") != FORMAT:
                raise ValueError("another format version")
            stored["program"] = GRPOProgram.from_dict(stored["program"])
            for name in ("losses", "logprobs", "seconds"):
                stored[name] = tuple(map(tuple, stored[name]))
            stored["weights"] = tuple(stored["weights"])
            stored["checksums"] = tuple(stored.get("checksums", ()))
            _check_values(stored, folder)
            return cls(folder, **stored)
        except ScaleError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScaleError(
                f"no recording can be read ({error!r})", where=folder, remedy="record the run again"
            ) from error

    def check_replay(self, alone: Emulation) -> None:
        """Raise ScaleError unless this is a replay of one of this very recording's ranks.

        Losses are compared too: another run of the same program with other weights or data has others.
        """
        same = alone.level == "replay" and (alone.world, alone.ep) == (self.world, self.ep)
        if same and (alone.program != self.program.to_dict() or len(alone.losses) != self.steps):
            same = False
        if same and "losses" not in alone.differs and alone.losses != self.losses[alone.rank]:
            same = False
        if not same:
            raise ScaleError(
                f"{alone!r} is no replay of {self.path}",
                expected=f"a replay of {self.steps} steps of {self.program!r} with the recorded losses",
                remedy="replay a rank of this recording",
            )

    def check(self, program: GRPOProgram, layout: Layout) -> None:
        """Raise ScaleError unless this rank of this program was recorded."""
        if program != self.program or (layout.world, layout.ep) != (self.world, self.ep):
            raise ScaleError(
                f"the recording is of {self.program!r} in a world of {self.world}, ep {self.ep}",
                expected="the program and the world that are asked for",
                remedy="use the recording's own program, world and ep, or record again",
                where=self.path,
            )

    def check_rank(self, rank: int) -> None:
        """Raise ScaleError unless the file of a rank's collectives is the one that was recorded."""
        if not self.checksums:
            return
        file = self.rank_file(rank)
        try:
            found = checksum(file)
        except OSError as error:
            raise _unreadable(file, error) from error
        if found != self.checksums[rank]:
            raise ScaleError(
                f"the file was changed since it was recorded (SHA-256 {found[:12]})",
                expected=self.checksums[rank][:12],
                remedy="copy the recording again from where it was made, or record the run again",
                where=file,
            )

    def differences(self, rank: int, **found: Any) -> tuple[str, ...]:
        """Return the names of those results of a replay that are not, bit for bit, what the rank recorded.

        Args:
            rank: which one.
            found: `losses`, `logprobs` or `weights` of the replay.
        """
        return tuple(name for name, value in found.items() if value != getattr(self, name)[rank])

    def rank_file(self, rank: int) -> Path:
        """Return the file of a rank's collectives."""
        return rank_file(self.path, rank)

    def communication(self, rank: int) -> tuple[float, ...]:
        """Return the seconds that a rank's collectives took, by step.

        Raises:
            ScaleError: the rank's file is missing, damaged, or its steps had different collectives.
        """
        totals = [0.0] * self.steps
        for group, events in read_events(self.rank_file(rank)).items():
            each, rest = divmod(len(events), self.steps)
            if rest:
                raise ScaleError(
                    f"{len(events)} collectives of the group of ranks {group} in {self.steps} steps",
                    expected="as many in every step",
                    where=self.rank_file(rank),
                )
            for step in range(self.steps):
                totals[step] += sum(seconds for _, seconds, _ in events[step * each : (step + 1) * each])
        return tuple(totals)

    def size(self) -> int:
        """Return the bytes on disk."""
        return sum(file.stat().st_size for file in self.path.iterdir())


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's collectives in a recording's folder."""
    return folder / f"rank-{rank}.safetensors"


def write_index(folder: Path, **fields: Any) -> None:
    """Write the index of a recording (the folder is written atomically as a whole)."""
    text = json.dumps({"format": FORMAT, **fields})
    (folder / INDEX).write_text(text, encoding="utf-8")


def write_log(file: Path, log: Mapping[str, list[Any]]) -> None:
    """Write a rank's `backends.LOG`."""
    from safetensors.torch import save_file

    tensors = {
        f"{group}|{place}|{number}": out.contiguous()
        for group, events in log.items()
        for place, event in enumerate(events)
        for number, out in enumerate(event.outs)
    }
    events = {group: [[one.op, one.seconds, len(one.outs)] for one in events] for group, events in log.items()}
    began = {group: [one.began for one in events] for group, events in log.items()}
    save_file(tensors, file, metadata={"events": json.dumps(events), "began": json.dumps(began)})


def read_events(file: Path) -> dict[str, list[tuple[str, float, int]]]:
    """Return name, seconds and number of results of every collective of a rank, by group, in order.

    Raises:
        ScaleError: the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            found = json.loads(stored.metadata()["events"])
        return {group: [(op, seconds, outs) for op, seconds, outs in events] for group, events in found.items()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(file, error) from error


def read_calls(file: Path) -> list[tuple[str, str, float, float, int]]:
    """Return group, name, beginning, seconds and bytes returned of every collective of a rank, group by group.

    Raises:
        ScaleError: the file is missing, damaged, or of a version that did not keep when collectives began.
    """
    from safetensors import safe_open

    log = read_log(file)
    with safe_open(file, framework="pt") as stored:
        began = json.loads(stored.metadata().get("began", "{}"))
    if began.keys() != log.keys():
        raise ScaleError("the recording does not say when its collectives began", where=file, remedy="record it again")
    return [
        (group, event.op, began[group][place], event.seconds, sum(out.nbytes for out in event.outs))
        for group, events in log.items()
        for place, event in enumerate(events)
    ]


def read_log(file: Path) -> dict[str, list[Any]]:
    """Read what `write_log` wrote.

    Raises:
        ScaleError: the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    from moeproxy.scale.backends import Event

    events = read_events(file)
    try:
        with safe_open(file, framework="pt") as stored:
            return {
                group: [
                    Event(op, seconds, [stored.get_tensor(f"{group}|{place}|{number}") for number in range(outs)])
                    for place, (op, seconds, outs) in enumerate(found)
                ]
                for group, found in events.items()
            }
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def _check_values(stored: Mapping[str, Any], where: Path) -> None:
    """Raise ScaleError unless there is one value for every rank, or step of a rank, and each of the right type."""
    try:
        checks.whole(1, steps=stored["steps"])
        Layout(stored["world"], stored["ep"])
    except ScaleError as error:
        raise _damaged(error.found, error.expected, where) from error
    for name in ("losses", "logprobs", "seconds", "weights", "checksums"):
        values: tuple[Any, ...] = stored[name]
        if len(values) != stored["world"] and (name != "checksums" or values):
            raise _damaged(f"{name} of {len(values)} ranks", f"of all {stored['world']}", where)
        kind = str if name in ("weights", "checksums") else tuple
        for rank, value in enumerate(values):
            if not isinstance(value, kind):
                raise _damaged(f"{name} of rank {rank} are {value!r:.40}", f"a {kind.__name__}", where)
            if kind is tuple and (len(value) != stored["steps"] or not all(type(one) in (int, float) for one in value)):
                wanted = f"a number for each of {stored['steps']} steps"
                raise _damaged(f"{name} of rank {rank} are {value!r:.80}", wanted, where)
    if not isinstance(stored["provenance"], Mapping) or not isinstance(stored["provenance"].get("machine"), str):
        raise _damaged("the provenance names no machine", "versions, machine and time", where)


def _damaged(found: str, expected: str, where: Path) -> ScaleError:
    return ScaleError(
        f"the recording is damaged: {found}", expected=expected, where=where, remedy="record the run again"
    )


def _unreadable(file: Path, error: Exception) -> ScaleError:
    return ScaleError(f"the collectives cannot be read ({error!r})", where=file, remedy="record the run again")
