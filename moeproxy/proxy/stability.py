"""How much a choice of experts depends on the calibration texts: the bootstrap over folds."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from moeproxy.errors import ProxyError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import GROUPING, select
from moeproxy.proxy.plan import KeepPlan
from moeproxy.proxy.similarity import distances

__all__ = ["Stability", "stability"]

RAND, JACCARD = "adjusted Rand index", "Jaccard index of the kept experts"


@dataclass(frozen=True, eq=False)
class Stability:
    """Agreement of choices on bootstrap resamples with the choice on all tokens (R resamples).

    Attributes:
        method: how experts were chosen.
        n_keep: experts kept per layer.
        moe_layers: decoder layer numbers of the L axis.
        measure: what the agreement is: the adjusted Rand index of the clusters (1 equal, 0 as by chance), or, for
            methods that only rank experts, the Jaccard index of the kept experts (1 equal, 0 disjoint).
        agreement_RL: float64, agreement of each resample.
        agreement_mean_L, agreement_low_L, agreement_high_L: float64, its mean, 5 % and 95 % quantile.
        kept_share_LE: float64, share of the resamples in which each expert is kept (0..1).
    """

    method: str
    n_keep: int
    moe_layers: tuple[int, ...]
    measure: str
    agreement_RL: Float[np.ndarray, "R L"]
    agreement_mean_L: Float[np.ndarray, " L"]
    agreement_low_L: Float[np.ndarray, " L"]
    agreement_high_L: Float[np.ndarray, " L"]
    kept_share_LE: Float[np.ndarray, "L E"]

    @property
    def n_resamples(self) -> int:
        """Number of bootstrap resamples (R)."""
        return len(self.agreement_RL)

    def to_frame(self) -> pd.DataFrame:
        """One row a layer: layer, agreement, low, high, always_kept (experts kept in every resample)."""
        columns = {
            "layer": list(self.moe_layers),
            "agreement": self.agreement_mean_L,
            "low": self.agreement_low_L,
            "high": self.agreement_high_L,
            "always_kept": (self.kept_share_LE == 1).sum(axis=1),
        }
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        worst = int(np.argmin(self.agreement_mean_L))
        text = f"{self.measure} {self.agreement_mean_L.mean():.2f} over {self.n_resamples} resamples, "
        text += f"least in layer {self.moe_layers[worst]} ({self.agreement_mean_L[worst]:.2f})"
        return f"Stability({self.method}-{self.n_keep}: {text})"

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, float_format="{:.3f}".format, border=0)
        return f"<p>{html.escape(repr(self))}</p>{table}"


def stability(
    profile: ExpertProfile,
    n_keep: int,
    *,
    n_resamples: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Stability:
    """Choose experts again on bootstrap resamples of the calibration texts and compare with the choice on all of them.

    The profile keeps its sums by fold of texts; a resample draws as many folds with replacement. Router rows, mean
    outputs and peaks are not resampled. For models wider than the profile's projection all choices, the one on all
    texts too, use the projected contexts, so that only the resampling makes a difference. "random" and "first" look at
    no token: they agree with themselves by construction.

    Args:
        profile: calibration statistics with folds.
        n_keep: experts to keep per layer.
        n_resamples: resamples to draw.
        seed: of the resampling, and of the method.
        progress: called with (resamples done, resamples in all).
        options: of `select`, but for `views` and `seed`.

    Raises:
        ProxyError: the profile has fewer than two folds, no resamples are asked for, the method is "reap" (its sums are
            not kept by fold), or an option is impossible.

    Example:
        >>> stability(result, 16, n_resamples=50).to_frame()
    """
    _check(profile, n_resamples, options)
    rng = np.random.default_rng(seed)
    n_folds = len(profile.fold_gate_FLE)
    choose = _Chooser(profile, n_keep, {**options, "seed": seed})
    reference = choose(np.ones(n_folds))
    plans = []
    for done in range(1, n_resamples + 1):
        plans.append(choose(np.bincount(rng.integers(0, n_folds, n_folds), minlength=n_folds)))
        if progress:
            progress(done, n_resamples)
    grouped = reference.method in GROUPING
    agreement_RL = np.array([_agreement(reference, plan, grouped) for plan in plans])
    return Stability(
        method=reference.method,
        n_keep=n_keep,
        moe_layers=profile.moe_layers,
        measure=RAND if grouped else JACCARD,
        agreement_RL=agreement_RL,
        agreement_mean_L=agreement_RL.mean(axis=0),
        agreement_low_L=np.quantile(agreement_RL, 0.05, axis=0),
        agreement_high_L=np.quantile(agreement_RL, 0.95, axis=0),
        kept_share_LE=np.mean([_kept(plan) for plan in plans], axis=0),
    )


def _check(profile: ExpertProfile, n_resamples: int, options: dict[str, Any]) -> None:
    n_folds = len(profile.fold_gate_FLE)
    if n_folds < 2:
        raise ProxyError(
            f"the profile has {n_folds} folds of texts",
            expected="at least 2, the blocks that the bootstrap draws",
            remedy="profile at least two texts, with this version of moeproxy",
        )
    if n_resamples < 1:
        raise ProxyError(f"n_resamples is {n_resamples}", expected="1 or more", remedy="use 20")
    if "views" in options:
        raise ProxyError("views cannot be given here", expected="distances of every resample, made anew")
    if options.get("method") == "reap":
        raise ProxyError(
            "the stability of 'reap' cannot be measured: its sums are not kept by fold",
            expected="another method",
            remedy="profile different samples of texts and compare their plans",
        )


class _Chooser:
    """Chooses experts on a weighted sum of folds; what no resample changes is computed once."""

    def __init__(self, profile: ExpertProfile, n_keep: int, options: dict[str, Any]) -> None:
        self._profile, self._n_keep, self._options = profile, n_keep, options
        self._views = {k: options[k] for k in ("normalisation", "centred", "own_load") if k in options}
        self._output = len(options.get("weights", ())) == 4
        self._grouped = options.get("method", "cluster") in GROUPING
        self._router_LEE: np.ndarray | None = None  # the same in every resample

    def __call__(self, count_F: Int[np.ndarray, " F"] | Float[np.ndarray, " F"]) -> KeepPlan:
        sample = _resampled(self._profile, count_F)
        views = None
        if self._grouped:
            views = distances(sample, **self._views, output=self._output, router_LEE=self._router_LEE)
            self._router_LEE = views.router_LEE
        return select(sample, self._n_keep, **self._options, views=views)


def _resampled(profile: ExpertProfile, count_F: np.ndarray) -> ExpertProfile:
    """The profile with every fold counted `count_F` times."""
    cooccur_LEE = np.tensordot(count_F.astype(np.int64), profile.fold_cooccur_FLEE.astype(np.int64), axes=1)
    gate_LE = np.tensordot(count_F.astype(np.float64), profile.fold_gate_FLE, axes=1)
    sums_LEP = np.tensordot(count_F.astype(np.float32), profile.fold_context_FLEP, axes=1)
    load_LE = np.ascontiguousarray(np.diagonal(cooccur_LEE, axis1=1, axis2=2))
    return dataclasses.replace(
        profile,
        n_tokens=int(load_LE[0].sum()) // profile.top_k,
        load_LE=load_LE,
        gate_LE=gate_LE,
        cooccur_LEE=cooccur_LEE,
        context_LED=(sums_LEP / np.where(gate_LE > 0, gate_LE, 1)[..., None]).astype(np.float32),
    )


def _agreement(reference: KeepPlan, plan: KeepPlan, grouped: bool) -> list[float]:
    """Agreement of two plans in every layer."""
    if not grouped:
        one_LE, other_LE = _kept(reference), _kept(plan)
        return ((one_LE & other_LE).sum(axis=1) / (one_LE | other_LE).sum(axis=1)).tolist()
    # Imported here: loading scikit-learn takes a second, which choosing experts does not need.
    from sklearn.metrics import adjusted_rand_score

    return [
        float(adjusted_rand_score(one, other)) for one, other in zip(reference.label_LE, plan.label_LE, strict=True)
    ]


def _kept(plan: KeepPlan) -> np.ndarray:
    kept_LE = np.zeros(plan.label_LE.shape, dtype=bool)
    for row, layer in enumerate(sorted(plan.keep)):
        kept_LE[row, list(plan.keep[layer])] = True
    return kept_LE
