"""How alike two experts are: router, co-activation, routed-context and output views, and their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile

Normalisation = Literal["minmax", "rank", "none"]
WEIGHTS = (1 / 3, 1 / 3, 1 / 3)


@dataclass(frozen=True)
class Views:
    """Distances between the experts of each layer in three views, with the options they were made with.

    Attributes:
        router_LEE, coactivation_LEE, context_LEE: float32, symmetric, zero diagonal.
        normalisation, centred, own_load: see `distances`.
        output_LEE: the optional fourth view, None if it was left out.
    """

    router_LEE: Float[np.ndarray, "L E E"]
    coactivation_LEE: Float[np.ndarray, "L E E"]
    context_LEE: Float[np.ndarray, "L E E"]
    normalisation: Normalisation = "minmax"
    centred: bool = True
    own_load: bool = True
    output_LEE: Float[np.ndarray, "L E E"] | None = None

    def fuse(self, weights: Sequence[float | int] = WEIGHTS) -> Float[np.ndarray, "L E E"]:
        """Weighted sum of (router, co-activation, context[, output]); the weights are scaled to sum to one.

        Raises:
            ProxyError: not three or four finite weights, a negative one, all zero, or a weight for the output view
                where it was left out.
        """
        w = check_weights(weights)
        fused_LEE = w[0] * self.router_LEE + w[1] * self.coactivation_LEE + w[2] * self.context_LEE
        if len(w) == 3:
            return fused_LEE
        if self.output_LEE is None:
            raise ProxyError(
                f"the output view has weight {w[3]:.3g}, but these distances were made without it",
                expected="distances of all four views",
                remedy="make them with distances(profile, output=True)",
            )
        return fused_LEE + w[3] * self.output_LEE


def check_weights(weights: Sequence[float | int]) -> tuple[float, ...]:
    """Return view weights scaled to sum to one, three of them if the fourth is zero.

    Raises:
        ProxyError: not three or four finite weights, a negative one, or all zero.
    """
    try:
        w = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        w = np.zeros(0)
    if w.shape not in {(3,), (4,)} or not np.isfinite(w).all() or (w < 0).any() or w.sum() == 0:
        raise ProxyError(
            f"the view weights are {weights!r}",
            expected="three weights (router, co-activation, context) or four (and output), none negative, not all zero",
            remedy="use (1, 1, 1) for equal weights",
        )
    scaled = tuple((w / w.sum()).tolist())
    return scaled[:3] if len(scaled) == 4 and scaled[3] == 0 else scaled


def distances(
    profile: ExpertProfile,
    layer: int | None = None,
    *,
    normalisation: Normalisation = "minmax",
    centred: bool = True,
    own_load: bool = True,
    output: bool = True,
    router_LEE: Float[np.ndarray, "L E E"] | None = None,
) -> Views:
    """Return cosine distances between experts in four views, normalised per layer.

    Three views are those of arXiv 2608.10823 (rows of the router; co-activation counts; mean hidden state
    routed to the expert); cosine and min-max are our choice where the paper is silent. The fourth, an option, is
    the expert's mean output before gating. A never-used expert has no co-activation, context or output: its
    distance to every other expert is the largest of that view.

    Args:
        profile: calibration statistics.
        layer: a decoder layer number for that layer alone (L = 1), None for all.
        normalisation: "minmax" maps each layer's off-diagonal distances to 0..1, "rank" to their ranks,
            "none" keeps cosine distances (0..2).
        centred: subtract the layer's load-weighted mean context, and mean output, first (hidden states share a
            large common part).
        own_load: keep each expert's own load on the diagonal of the co-activation counts.
        output: make the fourth view too.
        router_LEE: that view if at hand, made with the same normalisation.

    Example:
        >>> distances(result, layer=0).fuse((1, 1, 1)).shape
        (1, 32, 32)
    """
    rows = slice(None) if layer is None else [layer_index(profile, layer)]
    used_LE = profile.load_LE[rows] > 0
    cooccur_LEE = profile.cooccur_LEE[rows].astype(np.float32)
    if not own_load:
        cooccur_LEE = cooccur_LEE * (1 - np.eye(profile.n_experts, dtype=np.float32))
    if router_LEE is None:
        router_LEE = _normalise(_cosine(profile.router_LED[rows], np.ones_like(used_LE)), normalisation)
    sources = [profile.context_LED] + ([profile.output_LED] if output else [])
    means = [_centred(mean_LED[rows], profile.load_LE[rows]) if centred else mean_LED[rows] for mean_LED in sources]
    views = [_normalise(_cosine(vectors, used_LE), normalisation) for vectors in (cooccur_LEE, *means)]
    return Views(router_LEE, views[0], views[1], normalisation, centred, own_load, views[2] if output else None)


def _centred(vectors_LED: np.ndarray, load_LE: np.ndarray) -> np.ndarray:
    """Vectors less their load-weighted mean over the experts of a layer."""
    share_LE = load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1)
    return vectors_LED - np.einsum("le,led->ld", share_LE, vectors_LED)[:, None]


def layer_index(profile: ExpertProfile, layer: int) -> int:
    """Position of a decoder layer on the profile's L axis; raises ProxyError if it has no experts."""
    if layer not in profile.moe_layers:
        raise ProxyError(
            f"layer {layer} has no experts in this profile",
            expected=f"one of {', '.join(map(str, profile.moe_layers))}",
            remedy="choose one of these layers",
        )
    return profile.moe_layers.index(layer)


def _cosine(vectors_LEX: np.ndarray, used_LE: np.ndarray) -> np.ndarray:
    """Cosine distance 1 - cos in float32; NaN where either expert is unused or a zero vector."""
    vectors = vectors_LEX.astype(np.float32)
    norm_LE1 = np.linalg.norm(vectors, axis=2, keepdims=True)
    known_LE = used_LE & (norm_LE1[..., 0] > 0)
    unit = vectors / np.where(norm_LE1 > 0, norm_LE1, 1)
    distance_LEE = np.maximum(1 - unit @ unit.transpose(0, 2, 1), 0)
    distance_LEE = (distance_LEE + distance_LEE.transpose(0, 2, 1)) / 2
    distance_LEE[~(known_LE[:, :, None] & known_LE[:, None, :])] = np.nan
    return distance_LEE


def _normalise(distance_LEE: np.ndarray, how: Normalisation) -> np.ndarray:
    out = np.zeros_like(distance_LEE)
    off_EE = ~np.eye(distance_LEE.shape[1], dtype=bool)
    for layer, distance_EE in enumerate(distance_LEE):
        values = distance_EE[off_EE]
        known = np.isfinite(values)
        values[known] = _scale(values[known], how)
        # Nothing is known about an unused expert: put it as far away as the farthest known pair.
        values[~known] = values[known].max() if known.any() else 1.0
        out[layer][off_EE] = values
    return out


def _scale(values: np.ndarray, how: Normalisation) -> np.ndarray:
    if how == "none" or values.size == 0:
        return values
    if how == "minmax":
        low, high = values.min(), values.max()
        # Cosines of identical vectors differ by rounding; that is no spread worth stretching to 0..1.
        return (values - low) / (high - low) if high - low > 1e-6 else np.zeros_like(values)
    if how == "rank":
        _, rank = np.unique(values, return_inverse=True)
        return (rank / max(int(rank.max()), 1)).astype(values.dtype)
    raise ProxyError(f"normalisation '{how}' is unknown", expected="minmax, rank or none", remedy="choose one")
