"""Cluster the experts of one layer (or of one group of it) and say which expert represents each cluster."""

from __future__ import annotations

import kmedoids
import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = ["represent"]


def represent(
    distance_EE: Float[np.ndarray, "E E"],
    load_E: Int[np.ndarray, " E"],
    rank_E: Float[np.ndarray, " E"] | Int[np.ndarray, " E"] | None,
    n_keep: int,
    must_E: Bool[np.ndarray, " E"],
    never_E: Bool[np.ndarray, " E"],
    *,
    exclude_unused: bool = True,
) -> Int[np.ndarray, " E"]:
    """Return the position of the expert that represents each expert.

    k-medoids (FasterPAM) from the most used experts as first medoids. An expert that must be kept represents its own
    cluster; if a cluster holds two of them it is split between them, and the cluster that costs least to dissolve goes.

    Args:
        distance_EE: fused distances.
        load_E: tokens routed to each expert.
        rank_E: the member with the largest value represents its cluster; None for the medoid.
        n_keep: number of clusters; at least the number of `must_E`, at most that of experts not in `never_E`.
        must_E: experts that represent a cluster in any case.
        never_E: experts that represent none.
        exclude_unused: never-used experts found no cluster while enough used ones exist.
    """
    by_use = np.argsort(-load_E, kind="stable")
    by_use = by_use[~never_E[by_use]]
    n_used = int((load_E[by_use] > 0).sum())
    # Founders: the experts that may be medoids or representatives; most used first.
    founders = by_use[: max(n_used, n_keep)] if exclude_unused else by_use
    medoids = founders[_medoids(distance_EE[np.ix_(founders, founders)], n_keep)]
    cluster_E = distance_EE[:, medoids].argmin(axis=1)
    # Twins at distance zero would all fall to the first medoid: a medoid always belongs to its own cluster.
    cluster_E[medoids] = np.arange(n_keep)
    if must_E.any():
        medoids, cluster_E = _with_forced(distance_EE, medoids, cluster_E, must_E)
    best = medoids if rank_E is None else _best(cluster_E, medoids, rank_E, np.isin(np.arange(len(load_E)), founders))
    best = best.copy()
    best[cluster_E[must_E]] = np.flatnonzero(must_E)
    return best[cluster_E]


def _medoids(distance_EE: np.ndarray, n_keep: int) -> np.ndarray:
    """Positions of the medoids, from the first `n_keep` (most used) experts as a start."""
    start = np.arange(n_keep)
    if n_keep == len(distance_EE):
        return start
    # Given first medoids, FasterPAM draws nothing at random.
    matrix = np.ascontiguousarray(distance_EE, dtype=np.float32)
    found = kmedoids.fasterpam(matrix, start.astype(np.uint64), max_iter=1000, n_cpu=1)
    return np.asarray(found.medoids, dtype=np.int64)


def _with_forced(
    distance_EE: np.ndarray, medoids: np.ndarray, cluster_E: np.ndarray, must_E: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Medoids and clusters changed so that no cluster holds two forced experts, their number the same."""
    centres, cluster_E = medoids.tolist(), cluster_E.copy()
    for cluster in range(len(medoids)):
        members = np.flatnonzero(cluster_E == cluster)
        rivals = members[must_E[members]]
        if len(rivals) < 2:
            continue
        nearest = distance_EE[np.ix_(members, rivals)].argmin(axis=1)
        nearest[np.searchsorted(members, rivals)] = np.arange(len(rivals))
        numbers = np.array([cluster, *range(len(centres), len(centres) + len(rivals) - 1)])
        centres[cluster] = int(rivals[0])
        centres += rivals[1:].tolist()
        cluster_E[members] = numbers[nearest]
    alive = _dissolved(distance_EE, centres, cluster_E, set(cluster_E[must_E].tolist()), len(medoids))
    return np.array([centres[c] for c in alive]), np.searchsorted(alive, cluster_E)


def _dissolved(
    distance_EE: np.ndarray, centres: list[int], cluster_E: np.ndarray, fixed: set[int], n_keep: int
) -> list[int]:
    """Dissolve the cheapest clusters that hold nothing forced (in place) until `n_keep` are left; return those."""
    alive = list(range(len(centres)))
    while len(alive) > n_keep:
        free = [c for c in alive if c not in fixed]
        moves = {c: _moved(distance_EE, centres, cluster_E, c, [a for a in alive if a != c]) for c in free}
        cheapest = min(free, key=lambda c: moves[c][0])
        _, members, new = moves[cheapest]
        cluster_E[members] = new
        alive.remove(cheapest)
    return alive


def _moved(
    distance_EE: np.ndarray, centres: list[int], cluster_E: np.ndarray, cluster: int, others: list[int]
) -> tuple[float, np.ndarray, np.ndarray]:
    """Cost of handing a cluster's members to the nearest other centres, the members, and where they would go."""
    members = np.flatnonzero(cluster_E == cluster)
    away = distance_EE[members][:, [centres[o] for o in others]]
    cost = float(away.min(axis=1).sum() - distance_EE[members, centres[cluster]].sum())
    return cost, members, np.asarray(others)[away.argmin(axis=1)]


def _best(cluster_E: np.ndarray, medoids: np.ndarray, rank_E: np.ndarray, may_E: np.ndarray) -> np.ndarray:
    """The member of every cluster with the highest rank among those that may; the medoid on a tie, else the lowest
    id."""
    rank_E = np.where(may_E, rank_E.astype(np.float64), -1.0)
    is_other_E = medoids[cluster_E] != np.arange(len(cluster_E))
    # Sorted by cluster, then rank downwards, then the medoid first; equal ones keep the order of their ids.
    order = np.lexsort((is_other_E, -rank_E, cluster_E))
    return order[np.searchsorted(cluster_E[order], np.arange(len(medoids)))]
