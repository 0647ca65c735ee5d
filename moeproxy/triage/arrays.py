"""Arithmetic on arrays with gaps."""

from __future__ import annotations

import numpy as np


def finite(values: np.ndarray) -> np.ndarray:
    """Return the values with NaN in the place of what is not finite."""
    return np.where(np.isfinite(values), values, np.nan)


def known_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Return means over the finite values along an axis, NaN where there is none (and no warning, unlike nanmean)."""
    known = np.isfinite(values)
    count = known.sum(axis)
    return np.where(count > 0, np.where(known, values, 0).sum(axis) / np.maximum(count, 1), np.nan)
