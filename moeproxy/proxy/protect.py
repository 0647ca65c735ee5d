"""Experts that must or must not be kept: super experts found in a profile, and what the user asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.similarity import layer_index

__all__ = ["Forced", "Wish", "expert_groups", "forced_experts", "super_experts"]

Wish = Mapping[int, Sequence[int]]

QUANTILE = 0.995
SHARE_OF_LARGEST = 0.1
TIMES_MEDIAN = 10.0


def super_experts(profile: ExpertProfile) -> dict[int, tuple[int, ...]]:
    """Return the experts whose down projection puts out extreme activations, by decoder layer.

    Pruning one of them ruins a model (arXiv 2507.23279). As there, a super expert's peak lies above the 99.5 %
    quantile of all experts' peaks and above a tenth of the largest. Since some expert always lies above a quantile, we
    also ask that it exceeds 10 times the median peak of its own layer, so that ordinary models have none; peaks grow
    with depth, hence the layer's median. The paper's condition on the layer (massive activations form in it) is left
    out.

    Args:
        profile: calibration statistics; `peak_LE` holds the peaks.

    Returns:
        Ascending expert ids of every layer that has any, the layers ascending.

    Example:
        >>> super_experts(result)
        {3: (68,)}
    """
    peak_LE = profile.peak_LE.astype(np.float64)
    floor = max(float(np.quantile(peak_LE, QUANTILE)), SHARE_OF_LARGEST * float(peak_LE.max()))
    extreme_LE = (peak_LE > floor) & (peak_LE > TIMES_MEDIAN * np.median(peak_LE, axis=1, keepdims=True))
    rows = {layer: np.flatnonzero(extreme_LE[row]) for row, layer in enumerate(profile.moe_layers)}
    return {layer: tuple(ids.tolist()) for layer, ids in rows.items() if len(ids)}


@dataclass(frozen=True)
class Forced:
    """What is fixed before experts are chosen.

    Attributes:
        must_LE: experts that are kept in any case.
        never_LE: experts that are dropped in any case.
        named: what was forced and why, by layer, for the plan's provenance; empty if nothing was.
    """

    must_LE: Bool[np.ndarray, "L E"]
    never_LE: Bool[np.ndarray, "L E"]
    named: Mapping[str, Mapping[str, list[int]]]


def expert_groups(profile: ExpertProfile) -> list[np.ndarray]:
    """Expert ids of each group; one group of all experts without group-limited routing."""
    return np.array_split(np.arange(profile.n_experts), profile.n_group or 1)


def forced_experts(
    profile: ExpertProfile,
    n_keep: int,
    keep_always: Wish | None = None,
    drop_always: Wish | None = None,
    protect_super: bool = True,
) -> Forced:
    """Return which experts are fixed before `n_keep` a layer are chosen.

    Super experts give way to the user: one in `drop_always` is dropped, and where too few places are left those with
    the largest peaks stay.

    Args:
        profile: calibration statistics.
        n_keep: experts to keep per layer.
        keep_always, drop_always: decoder layer -> expert ids.
        protect_super: keep `super_experts(profile)`.

    Raises:
        ProxyError: a layer without experts, an id out of range, an expert both kept and dropped, or more wishes than
            a layer (with group-limited routing: a group) has places.
    """
    must_LE = _mask(profile, keep_always or {}, "keep_always")
    never_LE = _mask(profile, drop_always or {}, "drop_always")
    groups = expert_groups(profile)
    quota = n_keep // len(groups)
    for row, layer in enumerate(profile.moe_layers):
        _check_possible(must_LE[row], never_LE[row], groups, quota, layer)
    named = {"keep_always": _named(profile, must_LE), "drop_always": _named(profile, never_LE)}
    if protect_super:
        guarded_LE = _guarded(profile, must_LE, never_LE, groups, quota)
        named["super_experts"] = _named(profile, guarded_LE)
        must_LE = must_LE | guarded_LE
    return Forced(must_LE, never_LE, {what: layers for what, layers in named.items() if layers})


def _mask(profile: ExpertProfile, wish: Wish, what: str) -> np.ndarray:
    mask_LE = np.zeros(profile.load_LE.shape, dtype=bool)
    if not isinstance(wish, Mapping) or not all(_are_ids(ids) for ids in wish.values()):
        raise ProxyError(
            f"{what} is {wish!r}",
            expected="a mapping from decoder layers to lists of expert numbers",
            remedy=f"write {what}={{0: [3, 17]}}",
        )
    for layer, ids in wish.items():
        row = layer_index(profile, layer)
        for expert in ids:
            if not 0 <= expert < profile.n_experts:
                raise ProxyError(
                    f"{what} names expert {expert} in layer {layer}",
                    expected=f"experts 0 to {profile.n_experts - 1}",
                    remedy="correct the number",
                )
            mask_LE[row, expert] = True
    return mask_LE


def _are_ids(ids: object) -> bool:
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray | set | frozenset):
        return False
    return all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in ids)


def _check_possible(must_E: np.ndarray, never_E: np.ndarray, groups: list[np.ndarray], quota: int, layer: int) -> None:
    both = np.flatnonzero(must_E & never_E).tolist()
    if both:
        raise ProxyError(
            f"layer {layer}: expert {both[0]} is to be kept and dropped",
            expected="an expert in keep_always or in drop_always, not in both",
            remedy="take it out of one of them",
        )
    for number, ids in enumerate(groups):
        where = f"layer {layer}" + (f", group {number} (experts {ids[0]} to {ids[-1]})" if len(groups) > 1 else "")
        kept, left = int(must_E[ids].sum()), len(ids) - int(never_E[ids].sum())
        if kept > quota:
            raise ProxyError(
                f"{where}: {kept} experts are to be kept, but only {quota} have a place",
                expected=f"at most {quota}",
                remedy="keep more experts per layer, or take some out of keep_always",
            )
        if left < quota:
            raise ProxyError(
                f"{where}: drop_always leaves {left} experts, fewer than the {quota} that are kept",
                expected=f"at most {len(ids) - quota} dropped",
                remedy="keep fewer experts per layer, or take some out of drop_always",
            )


def _guarded(
    profile: ExpertProfile, must_LE: np.ndarray, never_LE: np.ndarray, groups: list[np.ndarray], quota: int
) -> np.ndarray:
    """Super experts that find a place beside the user's wishes."""
    guarded_LE = np.zeros_like(must_LE)
    for layer, found in super_experts(profile).items():
        row = profile.moe_layers.index(layer)
        by_peak = sorted(found, key=lambda e: -profile.peak_LE[row, e])
        for ids in groups:
            free = [e for e in by_peak if ids[0] <= e <= ids[-1] and not (must_LE[row, e] or never_LE[row, e])]
            guarded_LE[row, free[: quota - int(must_LE[row, ids].sum())]] = True
    return guarded_LE


def _named(profile: ExpertProfile, mask_LE: np.ndarray) -> dict[str, list[int]]:
    """Chosen ids by layer, with the layer as text, as JSON keeps it."""
    rows = zip(profile.moe_layers, mask_LE, strict=True)
    return {str(layer): np.flatnonzero(row_E).tolist() for layer, row_E in rows if row_E.any()}
