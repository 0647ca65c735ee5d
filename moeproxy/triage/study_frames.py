"""Two small helpers for tables: rows by equal values, and rows as dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def where(frame: pd.DataFrame, **equal: object) -> Any:
    """Return the rows (a DataFrame) whose columns have these values; of several values (a list) any will do.

    The type is left open: pandas' annotations make every selection a Series, too.
    """
    keep = np.ones(len(frame), bool)
    for name, value in equal.items():
        keep &= frame[name].isin(value if isinstance(value, list) else [value]).to_numpy()
    return frame[keep]


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries of plain values."""
    return frame.to_dict("records")
