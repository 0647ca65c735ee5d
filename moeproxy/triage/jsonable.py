"""Values as JSON knows them, and as people read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: null for NaN and infinity, no NumPy numbers, text for the rest."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def number(value: float | None, otherwise: float = math.nan) -> float:
    """Return the number that `plain` was given, and what null stood for."""
    return otherwise if value is None else value


def sure(confidence: float) -> str:
    """Return a confidence in words: recorded runs calibrate it, and say nothing of a run beyond any doubt."""
    return {"100%": "over 99%", "0%": "below 1%"}.get(text := f"{confidence:.0%}", text)
