"""Objects within objects, as one row whose keys are joined by "/"."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 16
MAX_KEY = 300


class TooDeep(ValueError):
    """Objects within objects beyond what any log has."""


def flat(found: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return nested objects as one, their keys joined by "/".

    Raises:
        TooDeep: more than 16 deep.
    """
    if depth > MAX_DEPTH:
        raise TooDeep
    cells: dict[str, Any] = {}
    for name, value in found.items():
        key = f"{prefix}{name}"[:MAX_KEY]
        if isinstance(value, dict) and value:
            cells |= flat(value, f"{key}/", depth + 1)
        else:
            cells[key] = str(value)[:1000] if isinstance(value, list | dict) else value
    return cells
