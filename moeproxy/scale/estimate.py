"""A rank's peak in milliseconds, by the planner's sum: for a slider, where an emulation takes seconds.

The sum knows the same program, FSDP2's whole experts and padding, and how many rows the rank gets. How near it comes to
the emulation is measured in `SCALE.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from moeproxy.errors import ScaleError
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape
from moeproxy.proxy.terms import training_terms
from moeproxy.scale import checks
from moeproxy.scale.emulation import CATEGORIES, gib
from moeproxy.scale.layout import Layout, divisors
from moeproxy.scale.program import GRPOProgram

_CATEGORY = {
    "weights": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "one layer": "activations",
    "logits": "activations",
    "gathered weights": "gathered",
    "gradients to reduce": "communication",
    "reference": "parameters",
}


@dataclass(frozen=True)
class Estimate:
    """A rank's peak by the planner's sum.

    Args:
        peak: bytes at the fullest moment by category of `CATEGORIES`.
        moment: which moment that is, in words.
    """

    peak: Mapping[str, float]
    moment: str

    @property
    def peak_bytes(self) -> float:
        """Bytes in all."""
        return sum(self.peak.values())

    @property
    def phase(self) -> str:
        """Phase of the step in which the moment lies."""
        return "forward" if self.moment == "forward" else "backward"


def estimate(program: GRPOProgram, world: int, ep: int = 1, load: float = 1.0) -> Estimate:
    """Return the peak of a rank with the largest shards.

    Args:
        program: the update step.
        world, ep: ranks in all, and those over which experts are spread.
        load: rows that the rank gets over the mean (`rank_loads`).

    Raises:
        ScaleError: the world cannot be divided so.
        ProxyError: transformers cannot build the model.

    Example:
        >>> estimate(GRPOProgram(QWEN3_30B_A3B, prompt=1024, completion=3072), 1024, 64).moment
        'forward'
    """
    Layout(world, ep).check_experts(program.n_experts)
    checks.real(0, load=load)
    if load > ep * (1 + 1e-9):
        raise ScaleError(
            f"a load of {load:g} x the mean over {ep} ranks",
            expected=f"0 to {ep}: then the rank gets every row",
            remedy="pass what `rank_loads` returns",
        )
    terms = training_terms(_shape(program), _layout(program, ep, load), program.n_experts, world)
    moment = max(terms, key=lambda name: sum(terms[name].values()))
    peak: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for name, nbytes in terms[moment].items():
        peak[_CATEGORY[name]] += nbytes
    return Estimate(peak, moment)


def _layout(program: GRPOProgram, ep: int, load: float) -> RLLayout:
    return RLLayout(
        ep=ep,
        sequences=program.sequences,
        accumulate=program.micro_batches > 1,
        prompt=program.prompt,
        response=program.completion,
        checkpointing=program.checkpointing,
        skew=load,
        whole_experts=True,
        rollout_devices=1,
    )


def _shape(program: GRPOProgram) -> ModelShape:
    """Return the shape, built once for original and all proxies: weights are linear in the number of experts."""
    with suppress(ScaleError):  # nested counts: then each has its own
        program = program.pruned(program.possible_counts[0])
    return _built(json.dumps(dict(program.config), sort_keys=True))


@lru_cache(maxsize=64)
def _built(config: str) -> ModelShape:
    return ModelShape.of(json.loads(config))


def ways_to_fit(program: GRPOProgram, layout: Layout, load: float, room: float) -> list[str]:
    """Return single changes with which the rank fits into `room` bytes, each with what it would then take.

    Of every kind of change only the smallest that is enough.

    Args:
        program: the update step that does not fit.
        layout: world, expert parallelism and rank.
        load: rows that the rank gets over the mean.
        room: bytes that a device offers.
    """
    found: dict[str, str] = {}
    for kind, words, changed, world, ep, rows in _changes(program, layout, load):
        if kind in found:
            continue
        with suppress(ScaleError):  # that one cannot be divided so
            taken = estimate(changed, world, ep, rows).peak_bytes
            if taken <= room:
                found[kind] = f"{words} ({gib(round(taken))})"
    return list(found.values())


_Change = tuple[str, str, GRPOProgram, int, int, float]


def _changes(program: GRPOProgram, layout: Layout, load: float) -> Iterator[_Change]:
    """Yield (kind, in words, program, world, ep, load) of one change at a time, each kind in small steps away."""
    world, ep = layout.world, layout.ep
    if not program.checkpointing:
        yield "recompute", "recompute activations", replace(program, checkpointing=True), world, ep, load
    if load > 1:
        yield "balance", "balance the routing", program, world, ep, 1.0
    for sequences in _halves(program.sequences, 1):
        words = f"{sequences:,} sequence{'s' if sequences > 1 else ''} a micro-batch"
        yield "batch", words, replace(program, sequences=sequences), world, ep, load
    for tokens in _halves(program.tokens, 128):
        prompt = max(program.prompt * tokens // program.tokens, 1)
        shorter = replace(program, prompt=prompt, completion=tokens - prompt)
        yield "tokens", f"{tokens:,} tokens a sequence", shorter, world, ep, load
    for more in divisors(world):
        if more > ep and program.n_experts % more == 0:
            yield "ep", f"ep {more}", program, world, more, load
    for times in range(1, 11):
        yield "more", f"{world << times:,} ranks", program, world << times, ep, load
    for fewer in _halves(world, 2):  # among more ranks than experts, whole weights grow with the world
        yield "fewer", f"{fewer:,} ranks", program, fewer, ep, load
    smaller = [count for count in program.possible_counts if count < program.n_experts and count % ep == 0]
    for count in sorted({smaller[len(smaller) * part // 4] for part in (1, 2, 3)} if smaller else (), reverse=True):
        yield "proxy", f"a proxy of {count} experts", program.pruned(count), world, ep, load


def _halves(number: int, least: int) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number
