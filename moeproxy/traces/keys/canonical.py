"""Logs that name their keys as the traces here do: tables that `moeproxy read --to csv` wrote, above all."""

from __future__ import annotations

from moeproxy.traces.keys.base import Framework, Key
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS

CANONICAL = Framework(
    name="moeproxy",
    keys=tuple(
        Key(name, name, "of the log that the table was made of")
        for name, signal in (SIGNALS | LOG_SIGNALS).items()
        if not signal.per_layer
    ),
    steps=("step",),
    marks=("total_loss", "policy_loss&grad_norm", "reward_mean&grad_norm", "logprob_diff_mean", "zero_variance_groups"),
)
