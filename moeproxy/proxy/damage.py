"""What a keep plan is likely to cost, layer by layer, from the profile alone."""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.similarity import WEIGHTS, Views, distances

__all__ = ["Damage", "damage"]

MAX_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class Damage:
    """Predicted damage of a plan; rows follow `moe_layers`.

    Attributes:
        moe_layers: decoder layer numbers of the L axis.
        gate_lost_L: float64, share of the routed gate mass whose expert is dropped (0..1).
        distance_LE: float32, fused distance of each dropped expert to the expert that represents it, or to the nearest
            kept one where the method groups nothing; 0 for kept experts.
        distance_mean_L: float64, its mean over dropped experts, 0 where none is dropped.
        distance_max_L: float64, its largest value.
        tokens_whole_L: float64, share of tokens all of whose experts stay (0..1), estimated from at most 4,096 evenly
            spaced tokens; None where the profile kept no choices.
    """

    moe_layers: tuple[int, ...]
    gate_lost_L: Float[np.ndarray, " L"]
    distance_LE: Float[np.ndarray, "L E"]
    distance_mean_L: Float[np.ndarray, " L"]
    distance_max_L: Float[np.ndarray, " L"]
    tokens_whole_L: Float[np.ndarray, " L"] | None

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: layer, gate_lost, distance_mean, distance_max, tokens_whole (NaN where not known)."""
        whole = np.full(len(self.moe_layers), np.nan) if self.tokens_whole_L is None else self.tokens_whole_L
        columns = {
            "layer": list(self.moe_layers),
            "gate_lost": self.gate_lost_L,
            "distance_mean": self.distance_mean_L,
            "distance_max": self.distance_max_L,
            "tokens_whole": whole,
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        worst = self.moe_layers[int(np.argmax(self.gate_lost_L))]
        text = f"{self.gate_lost_L.mean():.1%} of gate mass lost on average, most in layer {worst} "
        text += f"({self.gate_lost_L.max():.1%})"
        if self.tokens_whole_L is not None:
            text += f"; {self.tokens_whole_L.mean():.1%} of tokens keep all experts of a layer"
        return f"Damage({text})"

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, float_format="{:.3f}".format, border=0)
        return f"<p>{html.escape(repr(self))}</p>{table}"


def damage(profile: ExpertProfile, plan: KeepPlan, views: Views | None = None) -> Damage:
    """Predict from the calibration statistics what dropping experts costs in each layer.

    Args:
        profile: calibration statistics of the model the plan is for.
        plan: experts to keep.
        views: all layers' distances of this profile if at hand (a slider calls often); they are fused with the plan's
            weights, or equally where the plan has none.

    Raises:
        ProxyError: the plan is for another model, or weighs the output view, which `views` lacks.

    Example:
        >>> damage(result, select(result, 16)).to_frame()["gate_lost"]
    """
    _check_belong(profile, plan)
    views = views or _views(profile, plan)
    dropped_LE = np.ones(profile.load_LE.shape, dtype=bool)
    for row, layer in enumerate(profile.moe_layers):
        dropped_LE[row, list(plan.keep[layer])] = False
    fused_LEE = views.fuse(plan.weights or WEIGHTS)
    distance_LE = np.where(dropped_LE, _to_representative(fused_LEE, plan, dropped_LE), 0).astype(np.float32)
    total_L = profile.gate_LE.sum(axis=1)
    return Damage(
        moe_layers=profile.moe_layers,
        gate_lost_L=(profile.gate_LE * dropped_LE).sum(axis=1) / np.where(total_L > 0, total_L, 1),
        distance_LE=distance_LE,
        distance_mean_L=distance_LE.sum(axis=1, dtype=np.float64) / np.maximum(dropped_LE.sum(axis=1), 1),
        distance_max_L=distance_LE.max(axis=1).astype(np.float64),
        tokens_whole_L=_whole(profile.choices_TLK, dropped_LE),
    )


def _check_belong(profile: ExpertProfile, plan: KeepPlan) -> None:
    if plan.label_LE.shape != profile.load_LE.shape or tuple(sorted(plan.keep)) != tuple(profile.moe_layers):
        raise ProxyError(
            f"the plan is for {len(plan.keep)} layers of {plan.label_LE.shape[1]} experts, the profile of "
            f"{len(profile.moe_layers)} layers of {profile.n_experts}",
            expected="a plan that was chosen on this profile",
            remedy="choose experts again with this profile",
        )


def _views(profile: ExpertProfile, plan: KeepPlan) -> Views:
    """Distances with the options that the plan was made with."""
    made = {key: plan.provenance[key] for key in ("normalisation", "centred", "own_load") if key in plan.provenance}
    return distances(profile, **made, output=plan.weights is not None and len(plan.weights) == 4)


def _to_representative(fused_LEE: np.ndarray, plan: KeepPlan, dropped_LE: np.ndarray) -> np.ndarray:
    """Distance of every expert to the one that represents it, else to the nearest kept one."""
    keep_LC = np.array([plan.keep[layer] for layer in sorted(plan.keep)])
    owner_LE = np.take_along_axis(keep_LC, np.maximum(plan.label_LE, 0), axis=1)
    distance_LE = np.take_along_axis(fused_LEE, owner_LE[..., None], axis=2)[..., 0]
    alone_LE = (plan.label_LE < 0) & dropped_LE
    if alone_LE.any():
        nearest_LE = np.take_along_axis(fused_LEE, keep_LC[:, None, :], axis=2).min(axis=2)
        distance_LE = np.where(alone_LE, nearest_LE, distance_LE)
    return distance_LE


def _whole(choices_TLK: np.ndarray, dropped_LE: np.ndarray) -> np.ndarray | None:
    """Share of tokens that keep all their experts, in each layer."""
    n_tokens, (n_layers, n_experts) = len(choices_TLK), dropped_LE.shape
    if n_tokens == 0:
        return None
    # Whole numbers of tokens apart, so that the sample is a view and nothing is copied.
    sample_SLK = choices_TLK[:: -(-n_tokens // MAX_TOKENS)]
    # A slot that holds no routed expert (negative, or beyond the last one) cannot lose it: it reads the last column.
    lost_LX = np.concatenate([dropped_LE, np.zeros((n_layers, 1), dtype=bool)], axis=1)
    slots_SLK = np.where((sample_SLK < 0) | (sample_SLK > n_experts), n_experts, sample_SLK)
    flat_SLK = slots_SLK + (np.arange(n_layers, dtype=np.int32) * (n_experts + 1))[:, None]
    return 1 - lost_LX.ravel()[flat_SLK].any(axis=2).mean(axis=0)
