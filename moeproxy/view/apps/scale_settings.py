"""What the scale panel's controls say, and the ranks that follow from it. No widgets here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from moeproxy.errors import ScaleError
from moeproxy.places import data_dir
from moeproxy.scale.hottest import hottest_rank, rank_loads
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
            routing.rank_shares(self.ep, program.top_k)
            moe_layers = program.n_layers - program.n_dense
            saved = self.checkpointing
            loads_R = rank_loads(routing, self.ep, moe_layers, saved)
            hottest = hottest_rank(routing, layout, n_layers=moe_layers, checkpointing=saved)
            for rank in dict.fromkeys((self.rank, hottest)):
                load = float(loads_R[rank % self.ep])
                found.append(Case(model, replace(layout, rank=rank), rank == hottest, program, routing, load))
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
        load: rows of this rank over the mean.
    """

    model: str
    layout: Layout
    hottest: bool
    program: GRPOProgram
    routing: Routing
    load: float

    @property
    def label(self) -> str:
        """Short name, with the hottest rank marked."""
        model = self.model if self.model == "original" else f"proxy-{self.program.n_experts}"
        return f"{model}, rank {self.layout.rank}{' (hottest)' if self.hottest else ''}"

    def sliced(self, layers: int | None) -> GRPOProgram:
        """Return the program for so many layers; whole depth for None, or where the model has fewer."""
        return self.program if layers is None else self.program.sliced(min(layers, self.program.n_layers))


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
