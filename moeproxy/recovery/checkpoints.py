"""Checkpoints on disk with a checksum: a damaged one is noticed and the older one used; a full disk ends no job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file
from moeproxy.recovery.channel import checksum

_NAME = re.compile(r"^state-(\d{6})\.pt$")


@dataclass(frozen=True)
class Found:
    """A usable checkpoint.

    Args:
        step: after which it was written.
        payload: its bytes, as they were saved.
        skipped: newer ones that could not be used, each with its reason.
    """

    step: int
    payload: bytes
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one job.

    Args:
        folder: of the files; made when the first is written.
        keep: how many to keep. At least two: the newest may turn out damaged.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 2:
            raise RecoveryError(f"keep is {keep}", expected="at least 2: the newest may turn out damaged")
        self.folder, self._keep = folder, keep

    def save(self, step: int, payload: bytes) -> Path:
        """Write a checkpoint and its checksum, then remove what is older than the newest `keep`.

        Raises:
            RecoveryError: it cannot be written (no room, no rights); the older ones are untouched.
        """
        path = self.folder / f"state-{step:06d}.pt"
        note = {"step": step, "length": len(payload), "checksum": checksum(payload)}
        try:
            with atomic_file(path) as temporary:
                temporary.write_bytes(payload)
            with atomic_file(_note(path)) as temporary:  # last: a checkpoint without it never counts as whole
                temporary.write_text(json.dumps(note), encoding="utf-8")
        except OSError as error:
            raise RecoveryError(
                f"the checkpoint after step {step} could not be written ({error.strerror})",
                where=self.folder,
                remedy="make room; until then the job can only go back to an older one",
            ) from error
        for old in sorted(self._steps())[: -self._keep]:
            for stale in (self._path(old), _note(self._path(old))):
                stale.unlink(missing_ok=True)
        return path

    def ensure(self, step: int, find: Callable[[], bytes]) -> str:
        """Write the checkpoint after a step unless it is there and whole; return "", or why it still is not.

        Args:
            step: the last of a job: no newer checkpoint exists.
            find: returns the bytes of the state, from wherever it still is; raises `RecoveryError` if it is nowhere.
        """
        if self._is_whole(step):
            return ""
        try:
            self.save(step, find())
        except RecoveryError as error:
            return str(error)
        return "" if self._is_whole(step) else f"{self._path(step).name} was written again, and is damaged again"

    def _is_whole(self, step: int) -> bool:
        found = self.newest()
        return found is not None and found.step >= step

    def newest(self, at_most: int | None = None) -> Found | None:
        """Return the newest checkpoint that is whole, or None; damaged ones are named, not removed.

        Args:
            at_most: the last step that counts.
        """
        skipped = []
        for step in sorted(self._steps(), reverse=True):
            if at_most is not None and step > at_most:
                continue
            try:
                return Found(step, self._load(step), tuple(skipped))
            except (OSError, ValueError, KeyError, TypeError) as error:
                skipped.append(f"{self._path(step).name}: {error}")
        return None

    def whole(self) -> list[int]:
        """Return the steps of all checkpoints that are whole."""
        return [step for step in sorted(self._steps()) if (found := self.newest(step)) and found.step == step]

    def _load(self, step: int) -> bytes:
        path = self._path(step)
        note = json.loads(_note(path).read_text(encoding="utf-8"))
        payload = path.read_bytes()
        if len(payload) != note["length"]:
            raise ValueError(f"{len(payload)} bytes of {note['length']}")
        if checksum(payload) != note["checksum"]:
            raise ValueError("its checksum is wrong")
        return payload

    def _steps(self) -> list[int]:
        return [int(match[1]) for path in self.folder.glob("state-*.pt") if (match := _NAME.match(path.name))]

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step:06d}.pt"


def _note(path: Path) -> Path:
    return path.with_suffix(".json")
