"""Renumber tables of expert ids (routing by token id, as in DeepSeek-V4) for the experts that stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def remap_ids(ids_VK: Int[np.ndarray, "V K"], keep: Sequence[int], label_E: Int[np.ndarray, " E"]) -> np.ndarray:
    """Return a table of old expert ids with new ids, distinct in every row as they were.

    A dropped expert is replaced by its representative, or by the lowest new id, if that is free in its row.

    Args:
        ids_VK: old expert ids, K a token, in any integer dtype.
        keep: old ids of the kept experts, ascending.
        label_E: new id of the expert that represents each old one, -1 for none.
    """
    new_E = np.full(len(label_E), -1, dtype=np.int64)
    new_E[list(keep)] = np.arange(len(keep))
    table_VK = new_E[ids_VK.astype(np.int64)]
    for row in np.flatnonzero((table_VK < 0).any(axis=1)):
        _fill(table_VK[row], label_E[ids_VK[row].astype(np.int64)], len(keep))
    return table_VK.astype(ids_VK.dtype)


def _fill(row_K: np.ndarray, wish_K: np.ndarray, n_keep: int) -> None:
    """Replace the -1 of a row in place by free ids, wishes first."""
    used = set(row_K.tolist())
    for column in np.flatnonzero(row_K < 0):
        wish = int(wish_K[column])
        chosen = wish if wish >= 0 and wish not in used else next(i for i in range(n_keep) if i not in used)
        row_K[column] = chosen
        used.add(chosen)
