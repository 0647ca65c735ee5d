"""Results in JSON files: written whole or not at all, and read back as what they were written as."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeproxy.errors import RecoveryError
from moeproxy.files import atomic_file, provenance


def save_json(path: str | Path, form: str, fields: Mapping[str, Any]) -> Path:
    """Write a result's fields with its format and provenance, atomically, and return the path.

    Raises:
        RecoveryError: nothing can be written there.
    """
    target = Path(path)
    stored = json.dumps({"format": form, **fields, "provenance": provenance()}, indent=1)
    try:
        with atomic_file(target) as temporary:
            temporary.write_text(stored, encoding="utf-8")
    except OSError as error:
        raise RecoveryError(
            f"the file cannot be written ({error.strerror})", where=target, remedy="choose another place"
        ) from error
    return target


@contextlib.contextmanager
def saved_json(path: str | Path, form: str, what: str) -> Iterator[dict[str, Any]]:
    """Yield the fields that `save_json` wrote; whatever is wrong with them in the block is wrong with the file.

    Args:
        path: of the file.
        form: the format that it must have.
        what: it should be, for the message.

    Raises:
        RecoveryError: the file is something else.
    """
    try:
        stored: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        stored.pop("provenance")
        if stored.pop("format") != form:
            raise ValueError("another format")
        yield stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecoveryError(f"no saved {what} ({error})", where=path) from error
