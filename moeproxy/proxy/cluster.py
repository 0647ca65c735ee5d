"""Choose the experts to keep: three-view k-medoids and the baselines to hold it against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.files import provenance
from moeproxy.proxy.grouping import represent
from moeproxy.proxy.merge import load_shares
from moeproxy.proxy.plan import KeepPlan, allowed_counts, check_count
from moeproxy.proxy.protect import Forced, Wish, expert_groups, forced_experts
from moeproxy.proxy.similarity import WEIGHTS, Normalisation, Views, check_weights, distances

__all__ = ["METHODS", "KeepPlan", "allowed_counts", "check_count", "select"]

Method = Literal["cluster", "merge", "random", "first", "frequency", "gate", "reap"]
Representative = Literal["most_used", "most_gate", "medoid"]
METHODS: dict[str, str] = {
    "cluster": "k-medoids on router, co-activation and routed-context distance",
    "merge": "clusters as before, each holding the load-weighted mean of its experts",
    "random": "drawn at random with the seed",
    "first": "the first experts by number",
    "frequency": "the experts most tokens are routed to",
    "gate": "the experts with the largest sum of gate weights",
    "reap": "the largest mean of gate weight times output norm (REAP)",
}

# Methods that group experts; the others only rank them.
GROUPING = frozenset({"cluster", "merge"})


@dataclass(frozen=True)
class _Settings:
    """Everything besides the statistics that decides a choice."""

    method: Method
    weights: tuple[float, ...]
    seed: int
    representative: Representative
    exclude_unused: bool
    forced: Forced


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
    protect_super: bool = True,
    keep_always: Wish | None = None,
    drop_always: Wish | None = None,
) -> KeepPlan:
    """Choose `n_keep` experts in every MoE layer.

    The clustering follows arXiv 2608.10823: k-medoids (FasterPAM) on the weighted sum of three distances from
    the most used experts as first medoids; each cluster is represented by its most used member. With
    group-limited routing every group keeps the same number and old group g becomes new group g.

    "merge" is a baseline that arXiv 2608.10823 reports to train unstably: the clusters are the same, but each kept slot
    holds the mean of its members' weights, by load. Router rows and biases stay the representative's, so that only the
    experts differ. Super experts, and those of `keep_always`, are not mixed with others.

    Args:
        profile: calibration statistics.
        n_keep: experts to keep per layer, one of `allowed_counts(profile)`.
        method: a key of `METHODS`.
        weights: of the router, co-activation and context views, or of these and the output view.
        seed: of the random baseline; the other methods draw nothing.
        representative: "most_used" or "most_gate" member of a cluster, or its "medoid".
        normalisation, centred, own_load: see `similarity.distances`.
        exclude_unused: never-used experts may not found a cluster while enough used ones exist; they are
            labelled with the nearest cluster. Otherwise such outliers take medoids from experts that do work.
        views: all layers' distances of this profile if at hand (a slider calls often); they bring their own
            normalisation, centred and own_load.
        protect_super: keep the profile's super experts (`protect.super_experts`) under every method.
        keep_always, drop_always: decoder layer -> experts that are kept, or dropped, in any case. A cluster with an
            expert that is kept in any case is represented by it; see `grouping.represent`.

    Raises:
        ProxyError: an impossible count (the possible ones are listed), method, weights or wish.

    Example:
        >>> plan = select(result, 16)
        >>> plan.keep[0][:3]
        (0, 3, 4)
    """
    check_count(profile, n_keep)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ProxyError(f"the seed is {seed!r}", expected="a whole number from 0", remedy="use 0")
    _check_choice("method", method, METHODS)
    _check_choice("representative", representative, ("most_used", "most_gate", "medoid"))
    forced = forced_experts(profile, n_keep, keep_always, drop_always, protect_super)
    settings = _Settings(method, check_weights(weights), seed, representative, exclude_unused, forced)
    if method not in GROUPING:
        return _plan(profile, n_keep, _ranked(profile, n_keep, settings), settings, {})
    if views is None:
        needed = len(settings.weights) == 4
        views = distances(profile, normalisation=normalisation, centred=centred, own_load=own_load, output=needed)
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
        weights=settings.weights if settings.method in GROUPING else None,
        seed=settings.seed,
        checkpoint_fingerprint=profile.checkpoint_fingerprint,
        provenance=provenance(profile=dict(profile.provenance), **details, **settings.forced.named),
        merge_LE=_shares(profile, owner_LE, settings) if settings.method == "merge" else None,
    )


def _shares(profile: ExpertProfile, owner_LE: np.ndarray, settings: _Settings) -> np.ndarray:
    """Shares of experts in the means of their clusters; forced experts stay as they are."""
    return load_shares(owner_LE, profile.load_LE, settings.forced.must_LE, settings.forced.never_LE)


def _ranked(profile: ExpertProfile, n_keep: int, settings: _Settings) -> np.ndarray:
    """Baselines: the best-scored experts of each group represent themselves, the others nobody."""
    score_LE = np.where(settings.forced.must_LE, np.inf, _scores(profile, settings))
    score_LE[settings.forced.never_LE] = -np.inf
    groups = expert_groups(profile)
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
    groups, forced = expert_groups(profile), settings.forced
    ranks = {"most_used": profile.load_LE, "most_gate": profile.gate_LE, "medoid": None}
    rank_LE = ranks[settings.representative]
    owner_LE = np.empty(profile.load_LE.shape, dtype=np.int64)
    for row, fused_EE in enumerate(views.fuse(settings.weights)):
        for ids in groups:
            owner_LE[row, ids] = ids[
                represent(
                    fused_EE[np.ix_(ids, ids)],
                    profile.load_LE[row, ids],
                    None if rank_LE is None else rank_LE[row, ids],
                    n_keep // len(groups),
                    forced.must_LE[row, ids],
                    forced.never_LE[row, ids],
                    exclude_unused=settings.exclude_unused,
                )
            ]
    return owner_LE
