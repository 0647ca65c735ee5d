"""Round shares to whole rows without losing any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def integers(values: Sequence[float] | np.ndarray, total: int) -> list[int]:
    """Return whole numbers near `values` that sum to `total` (largest remainders first, then in order)."""
    exact = np.asarray(values, float)
    whole = np.floor(exact + 1e-9).astype(int)
    missing = total - int(whole.sum())
    for place in np.argsort(-(exact - whole), kind="stable")[:missing]:
        whole[place] += 1
    return whole.tolist()
