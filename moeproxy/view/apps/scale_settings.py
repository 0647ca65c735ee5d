"""What the scale panel's controls say, and the ranks that follow from it. No widgets here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from moeproxy.errors import ScaleError
from moeproxy.places import data_dir
from moeproxy.scale.hottest import certain, fullest_by_sum, rank_loads, rank_rows
from moeproxy.scale.layout import Layout
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.routing import Routing
from moeproxy.traces.trace import Trace

ROUTINGS = {
    "balanced": "balanced",
    "skewed": "skewed: one rank of each group gets the hot rank's load",
    "recorded": "upper bound from a recorded RL run (worst step, busiest experts side by side)",
}
_RECORDED = {"original": "original--healthy--s0--*.parquet", "proxy": "cluster-16--healthy--s0--*.parquet"}


@dataclass(frozen=True)
class Settings:
    """The controls' values.

    Args:
        name, config: the original model.
        n_keep: experts a layer of the proxy.
        world, ep, rank: ranks in all, those over which experts are spread, the one looked at.
        sequences, tokens: of a micro-batch on each rank; a quarter of the tokens is prompt.
        checkpointing: recompute activations.
        routing: one of `ROUTINGS`.
        load: for "skewed", rows of the last rank of each expert-parallel group, in percent of the mean.
        own: routing by model ("original", "proxy") that takes the place of "recorded".
    """

    name: str
    config: Mapping[str, Any]
    n_keep: int
    world: int
    ep: int
    rank: int
    sequences: int
    tokens: int
    checkpointing: bool
    routing: str
    load: int
    own: Mapping[str, Routing] | None = None

    def program(self, model: str) -> GRPOProgram:
        """Return the update step of "original" or "proxy", whole depth.

        Raises:
            ScaleError: no such proxy, or sizes that are impossible.
        """
        prompt = max(self.tokens // 4, 1)
        whole = GRPOProgram(
            self.config,
            sequences=self.sequences,
            prompt=prompt,
            completion=self.tokens - prompt,
            checkpointing=self.checkpointing,
        )
        return whole if model == "original" else whole.pruned(self.n_keep)

    def route(self, model: str) -> Routing:
        """Return the routing of "original" or "proxy".

        Raises:
            ScaleError: the skew is impossible.
        """
        n_experts = self.program(model).n_experts
        if self.routing == "skewed":
            Layout(self.world, self.ep).check_experts(n_experts)
            return Routing.skewed(n_experts, self.load / 100, ep=self.ep, ep_rank=self.ep - 1)
        if self.routing == "recorded":
            return (self.own[model] if self.own else recorded(model)).stretched(n_experts)
        return Routing.balanced(n_experts)

    def cases(self) -> list[Case]:
        """Return the ranks to look at: chosen and hottest one of original and proxy, once where they are the same.

        Raises:
            ScaleError: the world, the experts or the routing cannot be so; says what can.
        """
        Layout(self.world, self.ep, self.rank)
        found = []
        for model in ("original", "proxy"):
            program, routing = self.program(model), self.route(model)
            layout = Layout(self.world, self.ep, self.rank)
            layout.check_experts(program.n_experts)
            moe_layers, pairs = _moe_layers(program), program.sequences * program.tokens * program.top_k
            hottest = certain(rank_rows(routing, self.ep, moe_layers, pairs, program.top_k))
            sure = hottest is not None
            if hottest is None:
                hottest = fullest_by_sum(routing, layout, n_layers=moe_layers, checkpointing=self.checkpointing)
            # Where the sum's rank may turn out not to be the fullest, the chosen one stands apart in any case.
            ranks = [(hottest, True)] if sure and self.rank == hottest else [(self.rank, False), (hottest, True)]
            found += [Case(model, replace(layout, rank=rank), hot, program, routing, sure) for rank, hot in ranks]
        return found


@dataclass(frozen=True)
class Case:
    """One rank of one model.

    Args:
        model: "original" or "proxy".
        layout: world, expert parallelism and rank.
        hottest: whether no rank holds more.
        program: its update step, whole depth.
        routing: how many rows go where.
        sure: the hottest is so whatever a row weighs; otherwise `find_hottest` must find it.
    """

    model: str
    layout: Layout
    hottest: bool
    program: GRPOProgram
    routing: Routing
    sure: bool = True

    @property
    def label(self) -> str:
        """Short name, with the hottest rank marked, and whether it is the sum alone that says so."""
        model = self.model if self.model == "original" else f"proxy-{self.program.n_experts}"
        how = "" if self.sure else " by the sum"
        return f"{model}, rank {self.layout.rank}{f' (hottest{how})' if self.hottest else ''}"

    def load(self, layers: int | None = None) -> float:
        """Return the rows over the mean with which the planner's sum counts for so many layers (`rank_loads`)."""
        program = self.sliced(layers)
        loads_R = rank_loads(self.routing, self.layout.ep, _moe_layers(program), program.checkpointing)
        return float(loads_R[self.layout.ep_rank])

    def rows(self, layers: int | None = None) -> float:
        """Return the rows that this rank gets over the mean rank's, in all of so many layers."""
        share_L = self.routing.rank_shares(self.layout.ep)[:, self.layout.ep_rank]
        numbers = np.arange(_moe_layers(self.sliced(layers))) % len(share_L)
        return float(share_L[numbers].mean() * self.layout.ep)

    def found(self, rank: int) -> Case:
        """Return the case of the rank that was emulated for this one: where the hottest was searched, another maybe."""
        return self if self.sure else replace(self, layout=replace(self.layout, rank=rank), sure=True)

    def sliced(self, layers: int | None) -> GRPOProgram:
        """Return the program for so many layers; whole depth for None, or where the model has fewer."""
        return self.program if layers is None else self.program.sliced(min(layers, self.program.n_layers))


def _moe_layers(program: GRPOProgram) -> int:
    return max(program.n_layers - program.n_dense, 1)


@lru_cache(maxsize=4)
def recorded(model: str) -> Routing:
    """Return the worst placement that fits a shipped RL run of the testbed's original or 16-expert proxy.

    Raises:
        ScaleError: the recorded runs are not there.
    """
    files = sorted((data_dir() / "runs").glob(_RECORDED[model]))
    if not files:
        raise ScaleError(
            f"no recorded run of the {model}", where=data_dir() / "runs", remedy="choose another routing, or pass `own`"
        )
    return Routing.from_trace(Trace.load(files[0]))
