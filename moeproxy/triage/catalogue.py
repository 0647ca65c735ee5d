"""What the catalogue of faults says of each fault, for readers of verdicts; a file, since this room needs no torch.

`moeproxy.triage.learn` writes it from `moeproxy.lab.faults`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from moeproxy.errors import ComparisonError
from moeproxy.files import atomic_file
from moeproxy.places import data_dir

CATALOGUE = "catalogue.json"


@dataclass(frozen=True)
class Entry:
    """One fault: its words (see `moeproxy.lab.faults.fault.Fault`)."""

    id: str
    family: str
    title: str
    what: str
    twin: str
    check: str
    remedy: str


def load_catalogue(path: Path | None = None) -> Mapping[str, Entry]:
    """Return every fault by id, by default of the shipped catalogue.

    Raises:
        ComparisonError: the file is absent or no catalogue.
    """
    return _load(path or data_dir() / "triage" / CATALOGUE)


def save_catalogue(entries: Mapping[str, Entry], path: Path) -> Path:
    """Write entries as JSON, atomically, and return the path."""
    with atomic_file(path) as temporary:
        lines = json.dumps([asdict(entry) for entry in entries.values()], indent=1, ensure_ascii=False)
        temporary.write_text(lines + "\n", encoding="utf-8")
    return path


@lru_cache(maxsize=4)
def _load(path: Path) -> Mapping[str, Entry]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {entry["id"]: Entry(**entry) for entry in stored}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            "no catalogue of faults",
            where=path,
            expected="a file of moeproxy.triage.learn",
            remedy="python -m moeproxy.triage.learn",
        ) from error
