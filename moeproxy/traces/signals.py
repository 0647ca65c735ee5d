"""The canonical names of what a run logs, with unit and scale: the vocabulary of lab, traces and triage."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moeproxy.errors import TraceError

Scale = Literal["linear", "log", "logit"]


@dataclass(frozen=True)
class Signal:
    """One quantity logged once a step.

    Args:
        name: canonical column name; per-layer signals are stored as `name/<layer>`.
        unit: unit in words; "" when the quantity has none.
        scale: how differences are judged: "log" for norms and other positive quantities whose size depends on
            the model, "logit" for shares that live close to 1, "linear" otherwise.
        doc: what it measures, in one clause.
        per_layer: whether there is one column for each MoE layer.
        resolution: smallest difference worth seeing, in the signal's unit. On the log scale everything below
            it counts as zero; on the linear scale it is the smallest spread that is believed.
        compared: whether two runs may be compared by it (clock time may not: it depends on the machine).
    """

    name: str
    unit: str
    scale: Scale
    doc: str
    per_layer: bool = False
    resolution: float = 1e-6
    compared: bool = True


_TABLE = (
    Signal("policy_loss", "nats", "linear", "policy part of the loss (it may be negative)"),
    Signal("kl", "nats", "log", "KL divergence from the reference policy, per token", resolution=1e-4),
    Signal("aux_loss", "", "log", "load-balancing loss before its coefficient", resolution=1e-6),
    Signal("total_loss", "nats", "linear", "the loss that is differentiated"),
    Signal("grad_norm", "", "log", "L2 norm of all gradients before clipping", resolution=1e-9),
    Signal("grad_norm_router", "", "log", "L2 norm of the routers' gradients", resolution=1e-9),
    Signal("grad_norm_experts", "", "log", "L2 norm of the experts' gradients", resolution=1e-9),
    Signal("grad_norm_attention", "", "log", "L2 norm of the attention's gradients", resolution=1e-9),
    Signal("grad_norm_embeddings", "", "log", "L2 norm of the embeddings' gradients", resolution=1e-9),
    Signal("update_norm", "", "log", "L2 norm of the change of all weights in this step", resolution=1e-9),
    Signal("reward_mean", "reward", "linear", "mean reward of the step's samples", resolution=1e-3),
    Signal("reward_std", "reward", "linear", "mean standard deviation of rewards within groups", resolution=1e-3),
    Signal("zero_variance_groups", "share", "linear", "share of groups with equal rewards", resolution=1e-3),
    Signal("entropy", "nats", "linear", "mean entropy of the policy, per token", resolution=1e-3),
    Signal("response_length", "tokens", "log", "mean length of the responses", resolution=1e-2),
    Signal("truncated", "share", "linear", "share of responses cut off at the length limit", resolution=1e-3),
    Signal("tool_call_rate", "share", "linear", "share of responses that call a tool", resolution=1e-3),
    Signal("tool_error_rate", "share", "linear", "share of tool calls answered by an error", resolution=1e-3),
    Signal("clip_fraction_low", "share", "linear", "share of tokens clipped at the lower bound", resolution=1e-3),
    Signal("clip_fraction_high", "share", "linear", "share of tokens clipped at the upper bound", resolution=1e-3),
    Signal("logprob_diff_mean", "nats", "log", "mean |rollout - training log-prob|", resolution=1e-4),
    Signal("logprob_diff_max", "nats", "log", "largest |rollout - training log-prob|", resolution=1e-3),
    Signal("logprob_diff_k3", "nats", "log", "k3 estimate of KL(rollout || training)", resolution=1e-8),
    Signal("logprob_diff_k1", "nats", "linear", "mean rollout minus training log-prob", resolution=1e-4),
    Signal("logprob_diff_first", "nats", "log", "mean |rollout - training log-prob| of first tokens", resolution=1e-4),
    Signal("prob_pearson", "", "logit", "correlation of rollout and training probabilities", resolution=1e-6),
    Signal("router_load_entropy", "share", "linear", "entropy of the experts' load over its maximum", True, 1e-3),
    Signal("router_max_violation", "", "log", "largest load over the mean load, minus 1", True, 1e-2),
    Signal("router_agreement", "share", "linear", "share of experts chosen alike in rollout and training", True, 1e-3),
    Signal("seconds_per_step", "s", "log", "wall-clock time of the step", resolution=1e-3, compared=False),
)

SIGNALS: MappingProxyType[str, Signal] = MappingProxyType({signal.name: signal for signal in _TABLE})
"""Every canonical signal by name, in display order."""

_LOGGED = (
    Signal("lm_loss", "nats", "linear", "cross-entropy of the text, per token (pre-training and fine-tuning)"),
    Signal("value_loss", "", "log", "loss of the value model"),
    Signal("learning_rate", "", "log", "learning rate of the policy's first parameter group", resolution=1e-12),
    Signal("kl_old", "nats", "linear", "estimated KL divergence from the policy at the start of the update"),
    Signal("clip_fraction", "share", "linear", "share of tokens clipped, both bounds together", resolution=1e-3),
    Signal("is_ratio_mean", "", "log", "mean importance ratio of training to rollout policy", resolution=1e-3),
    Signal("is_ratio_max", "", "log", "largest importance ratio of training to rollout policy", resolution=1e-3),
    Signal("is_ratio_min", "", "log", "smallest importance ratio of training to rollout policy", resolution=1e-3),
    Signal("logprob_diff_std", "nats", "log", "spread of |rollout - training log-prob|", resolution=1e-4),
    Signal("sequence_logprob_diff", "nats", "log", "mean over sequences of |difference of mean log-prob|"),
    Signal("prob_diff_mean", "probability", "log", "mean |rollout - training probability|", resolution=1e-4),
    Signal("prob_diff_max", "probability", "log", "largest |rollout - training probability|", resolution=1e-3),
    Signal("prob_diff_std", "probability", "log", "spread of |rollout - training probability|", resolution=1e-4),
    Signal("response_length_max", "tokens", "log", "length of the longest response", resolution=1),
    Signal("response_length_min", "tokens", "log", "length of the shortest response", resolution=1),
    Signal("shaped_reward_mean", "reward", "linear", "mean reward after penalties such as the KL", resolution=1e-3),
    Signal("staleness", "steps", "linear", "mean age of the policy that made the samples", resolution=1e-3),
    Signal("z_loss", "", "log", "router z-loss before its coefficient"),
    Signal("mtp_loss", "nats", "linear", "loss of the first multi-token-prediction head"),
    Signal("expert_load_violation", "", "log", "largest expert load over the mean, minus 1, all layers together"),
    Signal("skipped_updates", "updates", "linear", "updates that the optimizer skipped", resolution=0.5),
    Signal("nan_updates", "updates", "linear", "updates whose loss or gradient was NaN", resolution=0.5),
)

LOG_SIGNALS: MappingProxyType[str, Signal] = MappingProxyType({signal.name: signal for signal in _LOGGED})
"""Further quantities, which only other programs log; runs of the lab have none of them, so nothing compares them."""

TRAJECTORY_COLUMNS = ("prompt", "reward", "length", "repetition_ratio", "advantage")
"""Columns of the trajectory table beside `step`: prompt index, reward, tokens, repeated share, advantage."""

TOOL_COLUMNS = ("tool_calls", "tool_error", "truncated")
"""Further columns where tools are used: calls made, whether one failed, whether the limit cut the response (0 or 1)."""


def signal_of(column: str) -> Signal:
    """Return the signal that a column of a trace holds.

    Args:
        column: a canonical name, or `name/<layer>` for a per-layer signal.

    Raises:
        TraceError: the name is not canonical; the nearest canonical name is suggested.

    Example:
        >>> signal_of("router_load_entropy/2").scale
        'linear'
    """
    name, slash, layer = column.partition("/")
    signal = SIGNALS.get(name) or LOG_SIGNALS.get(name)
    if signal is not None and signal.per_layer == bool(slash) and (not slash or layer.isdigit()):
        return signal
    raise TraceError(f"unknown signal {column!r}", expected=_expected(name), remedy="rename the column or drop it")


def layer_of(column: str) -> int | None:
    """Return the layer of a per-layer column such as `router_load_entropy/2`, or None for other columns."""
    signal_of(column)
    _, slash, layer = column.partition("/")
    return int(layer) if slash else None


def _expected(name: str) -> str:
    signal = SIGNALS.get(name)
    if signal is not None:
        return f"`{name}/<layer>`" if signal.per_layer else f"`{name}` without a layer"
    near = difflib.get_close_matches(name, [*SIGNALS, *LOG_SIGNALS], n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return f"a name of moeproxy.traces.SIGNALS{hint}"
