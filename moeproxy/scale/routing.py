"""Routing: how many tokens a rank sends to and receives from each peer. Needs no torch.

A virtual cluster has no routers, so the numbers come from outside: a real run's exact counts, a profile of the model
(or of the proxy: its own), the router signals of a recorded RL trace, or an assumption (balanced, skewed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float

from moeproxy.errors import ScaleError
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.scale import checks
from moeproxy.scale.layout import Layout, divisors
from moeproxy.scale.rounding import integers
from moeproxy.traces.trace import Trace

Counts = tuple[list[int], list[int]]
"""(rows sent to each rank of the expert-parallel group, rows received from each)."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Shares of the (token, expert) pairs that each expert gets, by MoE layer; or exact counts of a real run.

    Args:
        source: where it comes from, in words.
        share_LE: sums to one in every row; a single row stands for every layer, fewer rows than layers are repeated in
            turn.
        exact: counts of one rank's real step, by layer and call; they are used as they are.

    Raises:
        ScaleError: shares are negative, not finite, or do not sum to one.
    """

    source: str
    share_LE: Float[np.ndarray, "L E"]
    exact: tuple[tuple[Counts, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        remedy = "pass shares of shape (layers, experts); one row stands for every layer"
        checks.kind(np.ndarray, remedy, share_LE=self.share_LE)
        if self.share_LE.ndim != 2 or not self.share_LE.size or self.share_LE.dtype.kind not in "fiu":
            raise ScaleError(
                f"routing shares of {self.source} of shape {self.share_LE.shape} and type {self.share_LE.dtype}",
                expected="numbers of shape (layers, experts)",
                remedy=remedy,
            )
        sums = self.share_LE.sum(axis=1)
        if not np.isfinite(sums).all() or (self.share_LE < 0).any() or not np.allclose(sums, 1.0):
            raise ScaleError(
                f"routing shares of {self.source} sum to {sums.min():.3g} to {sums.max():.3g}",
                expected="shares of at least 0 that sum to 1 in every layer",
            )

    @property
    def n_experts(self) -> int:
        """Experts a layer (E)."""
        return self.share_LE.shape[1]

    @classmethod
    def balanced(cls, n_experts: int) -> Routing:
        """Every expert gets the same."""
        checks.whole(1, n_experts=n_experts)
        return cls("balanced", np.full((1, n_experts), 1 / n_experts))

    @classmethod
    def skewed(cls, n_experts: int, factor: float, *, ep: int, ep_rank: int = 0) -> Routing:
        """The experts of one rank get `factor` times their even share, the others what is left.

        Args:
            n_experts: experts a layer.
            factor: 1 is balanced; at most `ep` (then the rank gets everything).
            ep: ranks over which experts are spread.
            ep_rank: the one that gets more (or, below 1, less).
        """
        _check_spread(n_experts, ep)
        checks.whole(ep_rank=ep_rank)
        checks.kind(Real, "pass a number", factor=factor)
        if not 0 <= ep_rank < ep:
            raise ScaleError(f"a skew of expert-parallel rank {ep_rank}", expected=f"0 to {ep - 1}")
        if ep == 1 and factor != 1:
            raise ScaleError(
                f"a skew of {factor:g} without expert parallelism",
                expected="ep of at least 2: otherwise a rank has all experts and its own tokens only",
            )
        if not 0 <= factor <= ep:
            raise ScaleError(f"a skew of {factor:g}", expected=f"0 to {ep}, the number of expert-parallel ranks")
        local = n_experts // ep
        share_E = np.full(n_experts, (1 - factor / ep) / max(n_experts - local, 1))
        share_E[ep_rank * local : (ep_rank + 1) * local] = factor / n_experts
        return cls(f"skewed {factor:g} x on rank {ep_rank} of {ep}", share_E[None])

    @classmethod
    def from_profile(cls, profile: ExpertProfile) -> Routing:
        """The loads that a calibration pass measured; for a proxy, profile the proxy."""
        checks.kind(ExpertProfile, "pass what profile_experts or ExpertProfile.load returned", profile=profile)
        load_LE = profile.load_LE.astype(float)
        if (load_LE.sum(axis=1) == 0).any():
            raise ScaleError("the profile has a layer without any routed token", remedy="profile with more texts")
        source = f"profile of {profile.model_type}, {profile.n_tokens:,} tokens"
        return cls(source, load_LE / load_LE.sum(axis=1, keepdims=True))

    @classmethod
    def from_trace(cls, trace: Trace, step: int | None = None) -> Routing:
        """The most uneven placement that fits what a recorded run logged about its routers.

        A trace holds two numbers a layer: the largest load over the mean, and the entropy of the loads. The loads
        returned have exactly these (the rest falls off geometrically) and are sorted, so that the busiest experts are
        neighbours on one rank: an upper bound, since which experts are neighbours was not recorded.

        Args:
            trace: of a run that logged `router_max_violation/<layer>` and `router_load_entropy/<layer>`.
            step: step of the trace; by default the one with the largest load.

        Raises:
            ScaleError: the trace has no such signals, or no value at that step.
        """
        from moeproxy.scale.routing_trace import loads_of

        checks.kind(Trace, "pass Trace.load(path)", trace=trace)
        share_LE, chosen = loads_of(trace, step)
        return cls(f"{trace.provenance.model} seed {trace.provenance.seed}, step {chosen}, sorted", share_LE)

    @classmethod
    def recorded(cls, n_experts: int, counts: Sequence[Sequence[Counts]], source: str = "recorded") -> Routing:
        """What one rank of a real run sent and received, by layer and call."""
        exact = tuple(tuple((list(sent), list(received)) for sent, received in calls) for calls in counts)
        return cls(source, np.full((1, n_experts), 1 / n_experts), exact)

    def stretched(self, n_experts: int) -> Routing:
        """Return the same unevenness for another number of experts, neighbours staying neighbours.

        Loads are spread evenly within each expert, and the line of experts is cut anew: a recorded run of a small model
        says so how uneven the ranks of a large one may be. It says nothing about which of its experts are busy.

        Raises:
            ScaleError: these are exact counts of a real run.
        """
        if self.exact:
            raise ScaleError("exact counts of a real run belong to its own model", remedy="take a profile or a trace")
        checks.whole(1, n_experts=n_experts)
        if n_experts == self.n_experts:
            return self
        before, after = np.linspace(0, 1, self.n_experts + 1), np.linspace(0, 1, n_experts + 1)
        summed_LE = [np.concatenate([[0.0], np.cumsum(share_E)]) for share_E in self.share_LE]
        rows = [np.diff(np.interp(after, before, summed_E)) for summed_E in summed_LE]
        return Routing(f"{self.source}, {self.n_experts} experts stretched to {n_experts}", np.stack(rows))

    def counts(self, layer: int, call: int, layout: Layout, pairs: int, top_k: int) -> Counts:
        """Return rows sent to and received from each rank of the group, in one dispatch.

        Args:
            layer: number among the MoE layers.
            call: how often this layer was called before in this step.
            layout: the rank looked at.
            pairs: (token, expert) pairs of each rank.
            top_k: experts a token.
        """
        if self.exact:
            calls = self.exact[layer]
            return calls[call % len(calls)]
        share_R = self.rank_shares(layout.ep, top_k)[layer % len(self.share_LE)]
        sent_R = integers(share_R * pairs, pairs)
        return sent_R, [sent_R[layout.ep_rank]] * layout.ep

    def rank_shares(self, ep: int, top_k: int = 1) -> Float[np.ndarray, "L R"]:
        """Return each rank's share of the pairs, by layer.

        Raises:
            ScaleError: the experts cannot be spread so, or an expert would get more than every token.
        """
        _check_spread(self.n_experts, ep)
        if (most := self.share_LE.max() * top_k) > 1 + 1e-9:
            raise ScaleError(
                f"the busiest expert would get {most:.2f} x every token",
                expected="at most each token once",
                remedy=f"lower the skew (at most {self.n_experts / top_k:g} x the mean with {top_k} experts a token)",
            )
        return self.share_LE.reshape(len(self.share_LE), ep, -1).sum(axis=2)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return {"source": self.source, "share_LE": self.share_LE.tolist(), "exact": self.exact}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Routing:
        """Return the routing that `to_dict` wrote."""
        exact = tuple(tuple((list(s), list(r)) for s, r in calls) for calls in stored["exact"])
        return cls(stored["source"], np.array(stored["share_LE"], float), exact)


def _check_spread(n_experts: int, ep: int) -> None:
    checks.whole(n_experts=n_experts, ep=ep)
    if ep < 1 or n_experts % ep:
        raise ScaleError(
            f"{n_experts} experts cannot be spread evenly over {ep} ranks",
            expected=f"one of {', '.join(map(str, divisors(n_experts)))}",
        )
