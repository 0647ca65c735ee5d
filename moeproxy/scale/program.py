"""GRPOProgram: the update step whose memory and time are asked for, as data; `training.py` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moeproxy.errors import ScaleError
from moeproxy.experts.config import Counts
from moeproxy.experts.families import Family, family_of, lookup
from moeproxy.proxy.plan import possible_counts
from moeproxy.proxy.shape import check_values, no_expert_layer
from moeproxy.scale import checks

MOST_SEQUENCES = 4096
"""Most sequences of a step on a rank: the log-probs (TRL's) go through them one by one, some 7 ms each to emulate."""
PHASES = ("old log-probs", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class GRPOProgram:
    """One GRPO update of a Hugging Face MoE: old log-probs, forward, clipped loss, backward, AdamW.

    Weights are float32 shards that compute in bfloat16 with float32 gradients, as transformers' own FSDP2 engine
    does it (`fsdp_mixed_precision`); AdamW keeps two float32 moments.

    Args:
        config: the model's parsed `config.json`.
        sequences: sequences a micro-batch on each rank.
        prompt, completion: tokens of a sequence; the loss is over the completion.
        micro_batches: micro-batches whose gradients are summed before the optimizer acts.
        checkpointing: recompute each layer's activations in the backward pass.
        learning_rate, clip, max_norm, temperature: of AdamW, the ratio's clip, the gradient's largest norm, sampling.
        seed: of weights and tokens.

    Raises:
        ScaleError: a value is of the wrong type, a size is impossible, or the model's family is unknown.
        ProxyError: the config says a size that cannot be one, or no layer has experts.

    Example:
        >>> GRPOProgram(QWEN3_30B_A3B, sequences=1, prompt=1024, completion=3072).sliced(4)
        GRPOProgram(qwen3_moe, 4 layers x 128 experts, 1 x 1 x 4096 tokens a rank)
    """

    config: Mapping[str, Any]
    sequences: int = 1
    prompt: int = 512
    completion: int = 512
    micro_batches: int = 1
    checkpointing: bool = False
    learning_rate: float = 1e-6
    clip: float = 0.2
    max_norm: float = 1.0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.config(self.config)
        checks.whole(
            1,
            sequences=self.sequences,
            prompt=self.prompt,
            completion=self.completion,
            micro_batches=self.micro_batches,
        )
        self._check_sequences()
        checks.whole(0, seed=self.seed)
        checks.real(0, learning_rate=self.learning_rate, clip=self.clip)
        checks.real(0, above=True, temperature=self.temperature, max_norm=self.max_norm)
        longest = self.config.get("max_position_embeddings")
        if isinstance(longest, int) and self.tokens > longest:
            raise ScaleError(
                f"a sequence of {self.tokens} tokens in a model with {longest} positions",
                remedy="shorten prompt or completion",
            )
        self._check_config()

    def _check_sequences(self) -> None:
        if self.sequences * self.micro_batches > MOST_SEQUENCES:
            raise ScaleError(
                f"{self.sequences:,} sequences x {self.micro_batches:,} micro-batches on each rank",
                expected=f"at most {MOST_SEQUENCES:,} sequences a step and rank",
                remedy="take fewer sequences; where gradients are summed, 2 micro-batches show what many need",
            )

    def _check_config(self) -> None:
        for key in ("hidden_size", "vocab_size", "moe_intermediate_size", "num_attention_heads"):
            if (size := lookup(self.config, key)) is not None:
                checks.whole(1, **{key: size})
        check_values(self.config)
        count = next((key for key in self.family.count_keys if lookup(self.config, key) is not None), None)
        if count is not None:
            checks.whole(1, **{count: self.n_experts})
        else:
            raise ScaleError(
                f"the config of {self.family.model_type} says no number of experts",
                expected=f"one of the keys {', '.join(self.family.count_keys)}",
            )
        if not isinstance(lookup(self.config, self._layer_key()), int):
            raise ScaleError(
                f"the config of {self.family.model_type} says no number of layers",
                expected=f"one of the keys {', '.join(self.family.layer_keys)}",
            )
        checks.whole(1, **{self._layer_key(): self.n_layers})
        if self.n_dense >= self.n_layers:
            raise no_expert_layer(self.family.model_type)
        chosen = lookup(self.config, self.family.top_k_key)
        if not isinstance(chosen, int) or not 1 <= chosen <= self.n_experts:
            raise ScaleError(
                f"{self.family.top_k_key} is {chosen!r}: each token goes to so many experts",
                expected=f"1 to {self.n_experts}, the experts of a layer",
            )

    @property
    def family(self) -> Family:
        """The row of the family table."""
        return family_of(self.config, "the program's config")

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.completion

    @property
    def n_experts(self) -> int:
        """Routed experts a layer (E)."""
        return next((n for key in self.family.count_keys if (n := lookup(self.config, key)) is not None), 0)

    @property
    def top_k(self) -> int:
        """Experts a token (K)."""
        return int(lookup(self.config, self.family.top_k_key))

    @property
    def n_layers(self) -> int:
        """Decoder layers, with and without experts."""
        return int(lookup(self.config, self._layer_key()))

    @property
    def n_dense(self) -> int:
        """Leading layers without experts (DeepSeek's `first_k_dense_replace`)."""
        return min(int(self.config.get("first_k_dense_replace") or 0), self.n_layers)

    def sliced(self, layers: int) -> GRPOProgram:
        """Return the program for the first `layers` layers, of which at most one is dense.

        A slice answers in seconds what the whole depth answers in minutes; embeddings, head and loss stay whole.
        """
        checks.whole(layers=layers)
        if not 1 <= layers <= self.n_layers:
            raise ScaleError(f"a slice of {layers} layers", expected=f"1 to {self.n_layers}")
        changed = {self._layer_key(): layers}
        if self.n_dense:
            changed["first_k_dense_replace"] = min(self.n_dense, 1, layers - 1)
        return replace(self, config={**self.config, **changed})

    @property
    def possible_counts(self) -> list[int]:
        """Numbers of experts a layer that a proxy of this model can have, the original's included."""
        counts = Counts.read(self.config, self.family, Path("the program's config"))
        return possible_counts(counts.n_experts, counts.top_k, counts.n_group, counts.topk_group, self.family.min_group)

    def pruned(self, n_keep: int) -> GRPOProgram:
        """Return the program for a proxy that keeps `n_keep` experts a layer.

        Raises:
            ScaleError: no proxy can have so many, or the config nests its counts.
        """
        checks.whole(n_keep=n_keep)
        if n_keep not in (possible := self.possible_counts):
            near = sorted(possible, key=lambda count: abs(count - n_keep))[:2]
            raise ScaleError(
                f"a proxy of {n_keep} experts",
                expected=f"one of {len(possible)} counts from {possible[0]} to {possible[-1]}, such as "
                f"{' or '.join(map(str, sorted(near)))}",
            )
        if "." in "".join(self.family.count_keys):
            raise ScaleError(f"{self.family.model_type} nests its counts", remedy="give the proxy's own config")
        present = {key: n_keep for key in self.family.count_keys if key in self.config}
        return replace(self, config={**self.config, **present})

    def _layer_key(self) -> str:
        return next(
            (key for key in self.family.layer_keys if lookup(self.config, key) is not None), self.family.layer_keys[0]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        return {item.name: getattr(self, item.name) for item in fields(self)} | {"config": dict(self.config)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> GRPOProgram:
        """Return the program that `to_dict` wrote."""
        return cls(**stored)

    def __repr__(self) -> str:
        size = f"{self.n_layers} layers x {self.n_experts} experts"
        batch = f"{self.micro_batches} x {self.sequences} x {self.tokens} tokens a rank"
        return f"GRPOProgram({self.family.model_type}, {size}, {batch})"
