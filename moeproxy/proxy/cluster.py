"""Choose the experts to keep: three-view k-medoids and the baselines to hold it against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import kmedoids
import numpy as np

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import provenance
from moeproxy.proxy.plan import KeepPlan, allowed_counts, check_count
from moeproxy.proxy.similarity import WEIGHTS, Normalisation, Views, check_weights, distances

__all__ = ["METHODS", "KeepPlan", "allowed_counts", "check_count", "select"]

Method = Literal["cluster", "random", "first", "frequency", "gate", "reap"]
Representative = Literal["most_used", "most_gate", "medoid"]
METHODS: dict[str, str] = {
    "cluster": "k-medoids on router, co-activation and routed-context distance",
    "random": "drawn at random with the seed",
    "first": "the first experts by number",
    "frequency": "the experts most tokens are routed to",
    "gate": "the experts with the largest sum of gate weights",
    "reap": "the largest mean of gate weight times output norm (REAP)",
}


@dataclass(frozen=True)
class _Settings:
    """Everything besides the statistics that decides a choice."""

    method: Method
    weights: tuple[float, float, float]
    seed: int
    representative: Representative
    exclude_unused: bool


def select(
    profile: ExpertProfile,
    n_keep: int,
    *,
    method: Method = "cluster",
    weights: Sequence[float | int] = WEIGHTS,
    seed: int = 0,
    representative: Representative = "most_used",
    normalisation: Normalisation = "minmax",
    centred: bool = True,
    own_load: bool = True,
    exclude_unused: bool = True,
    views: Views | None = None,
) -> KeepPlan:
    """Choose `n_keep` experts in every MoE layer.

    The clustering follows arXiv 2608.10823: k-medoids (FasterPAM) on the weighted sum of three distances from
    the most used experts as first medoids; each cluster is represented by its most used member. With
    group-limited routing every group keeps the same number and old group g becomes new group g.

    Args:
        profile: calibration statistics.
        n_keep: experts to keep per layer, one of `allowed_counts(profile)`.
        method: a key of `METHODS`.
        weights: of the router, co-activation and context views.
        seed: of the random baseline; the other methods draw nothing.
        representative: "most_used" or "most_gate" member of a cluster, or its "medoid".
        normalisation, centred, own_load: see `similarity.distances`.
        exclude_unused: never-used experts may not found a cluster while enough used ones exist; they are
            labelled with the nearest cluster. Otherwise such outliers take medoids from experts that do work.
        views: all layers' distances of this profile if at hand (a slider calls often); they bring their own
            normalisation, centred and own_load.

    Raises:
        ProxyError: an impossible count (the possible ones are listed), method or weights.

    Example:
        >>> plan = select(result, 16)
        >>> plan.keep[0][:3]
        (0, 3, 4)
    """
    check_count(profile, n_keep)
    _check_choice("method", method, METHODS)
    _check_choice("representative", representative, ("most_used", "most_gate", "medoid"))
    settings = _Settings(method, check_weights(weights), seed, representative, exclude_unused)
    if method != "cluster":
        return _plan(profile, n_keep, _ranked(profile, n_keep, settings), settings, {})
    views = views or distances(profile, normalisation=normalisation, centred=centred, own_load=own_load)
    details = {
        "representative": representative,
        "exclude_unused": exclude_unused,
        "normalisation": views.normalisation,
        "centred": views.centred,
        "own_load": views.own_load,
    }
    return _plan(profile, n_keep, _cluster(profile, n_keep, views, settings), settings, details)


def _check_choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ProxyError(f"{what} '{value}' is unknown", expected=f"one of {', '.join(known)}")


def _plan(
    profile: ExpertProfile, n_keep: int, owner_LE: np.ndarray, settings: _Settings, details: dict[str, object]
) -> KeepPlan:
    """Turn 'old id of the expert that represents each expert' (-1: none) into a plan with new ids."""
    keep, label_LE = {}, np.full_like(owner_LE, -1)
    for row, layer in enumerate(profile.moe_layers):
        kept = sorted(set(owner_LE[row].tolist()) - {-1})
        keep[layer] = tuple(kept)
        known_E = owner_LE[row] >= 0
        label_LE[row, known_E] = np.searchsorted(kept, owner_LE[row, known_E])
    return KeepPlan(
        method=settings.method,
        n_keep=n_keep,
        keep=keep,
        label_LE=label_LE,
        weights=settings.weights if settings.method == "cluster" else None,
        seed=settings.seed,
        checkpoint_fingerprint=profile.checkpoint_fingerprint,
        provenance=provenance(profile=dict(profile.provenance), **details),
    )


def _groups(profile: ExpertProfile) -> list[np.ndarray]:
    """Expert ids of each group, one group of all experts without group-limited routing."""
    return np.array_split(np.arange(profile.n_experts), profile.n_group or 1)


def _ranked(profile: ExpertProfile, n_keep: int, settings: _Settings) -> np.ndarray:
    """Baselines: the best-scored experts of each group represent themselves, the others nobody."""
    score_LE = _scores(profile, settings)
    groups = _groups(profile)
    owner_LE = np.full(score_LE.shape, -1, dtype=np.int64)
    for row in range(len(score_LE)):
        for ids in groups:
            best = ids[np.argsort(-score_LE[row, ids], kind="stable")[: n_keep // len(groups)]]
            owner_LE[row, best] = best
    return owner_LE


def _scores(profile: ExpertProfile, settings: _Settings) -> np.ndarray:
    if settings.method == "random":
        return np.random.default_rng(settings.seed).random(profile.load_LE.shape)
    if settings.method == "first":
        return np.broadcast_to(-np.arange(profile.n_experts, dtype=np.float64), profile.load_LE.shape)
    if settings.method == "frequency":
        return profile.load_LE.astype(np.float64)
    if settings.method == "gate":
        return profile.gate_LE
    return profile.saliency_LE / np.maximum(profile.load_LE, 1)


def _cluster(profile: ExpertProfile, n_keep: int, views: Views, settings: _Settings) -> np.ndarray:
    """Old id of the representative of every expert."""
    groups = _groups(profile)
    rank_LE = profile.gate_LE if settings.representative == "most_gate" else profile.load_LE
    owner_LE = np.empty(profile.load_LE.shape, dtype=np.int64)
    for row, fused_EE in enumerate(views.fuse(settings.weights)):
        for ids in groups:
            load_E, rank_E, fused = profile.load_LE[row, ids], rank_LE[row, ids], fused_EE[np.ix_(ids, ids)]
            owner_LE[row, ids] = ids[_cluster_group(fused, load_E, rank_E, n_keep // len(groups), settings)]
    return owner_LE


def _cluster_group(
    distance_EE: np.ndarray, load_E: np.ndarray, rank_E: np.ndarray, n_keep: int, settings: _Settings
) -> np.ndarray:
    """Position of the representative of every member of one group."""
    by_use = np.argsort(-load_E, kind="stable")
    n_used = int((load_E > 0).sum())
    # Founders: the experts that may be medoids or representatives; most used first.
    founders = by_use[: max(n_used, n_keep)] if settings.exclude_unused else by_use
    medoids = founders[_medoids(distance_EE[np.ix_(founders, founders)], n_keep)]
    cluster_E = distance_EE[:, medoids].argmin(axis=1)
    # Twins at distance zero would all fall to the first medoid: a medoid always belongs to its own cluster.
    cluster_E[medoids] = np.arange(n_keep)
    if settings.representative == "medoid":
        return medoids[cluster_E]
    may_E = np.isin(np.arange(len(load_E)), founders)
    rank_E = np.where(may_E, rank_E.astype(np.float64), -1.0)
    best = np.array([_best(np.flatnonzero(cluster_E == c), rank_E, int(medoids[c])) for c in range(n_keep)])
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


def _best(members: np.ndarray, rank_E: np.ndarray, medoid: int) -> int:
    """The member with the highest rank; the medoid on a tie, else the lowest id."""
    top = members[rank_E[members] == rank_E[members].max()]
    return medoid if medoid in top else int(top[0])
