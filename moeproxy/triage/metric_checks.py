"""Is the metric itself wrong? What no training can do, found before causes are looked for.

A wrong number sends people after a wrong cause: a KL below zero, a correlation above one, a share outside [0, 1], a
signal that repeats one value to the last bit while others move.

Axes: S step.
"""

from __future__ import annotations

import numpy as np

from moeproxy.traces.signals import signal_of
from moeproxy.traces.trace import Trace

_NEVER_NEGATIVE = (
    "kl",
    "entropy",
    "grad_norm",
    "update_norm",
    "response_length",
    "logprob_diff_mean",
    "logprob_diff_max",
    "reward_std",
)
_MAY_REST = ("truncated", "tool_call_rate", "tool_error_rate", "zero_variance_groups", "learning_rate", "staleness")
"""Signals that may stay the same for a whole run, or do so in many."""

_OFTEN_ZERO = ("clip_fraction_low", "clip_fraction_high", "kl", "kl_old", "total_loss", "policy_loss")

STUCK = 10
"""Steps with one and the same value, to the last bit, after which a signal counts as stuck."""


def wrong_metrics(trace: Trace) -> tuple[str, ...]:
    """Return a sentence for each metric that cannot be right, nothing when all can."""
    found = []
    for column in trace.signals:
        values_S = trace.values(column)
        known_S = np.isfinite(values_S)
        if known_S.any():
            if not (column == "kl" and _signed(trace)):
                found += _impossible(column, values_S[known_S], trace.steps.index.to_numpy()[known_S])
            found += _stuck(trace, column, values_S, trace.steps.index.to_numpy())
    return tuple(found)


def at_rest(trace: Trace) -> tuple[str, ...]:
    """Return a sentence that names the metrics with one value from the first step to the last; nothing without any.

    Such a metric shows nothing, whether it is not computed or training does not move it. Shares that are zero in many a
    good run (clipping, tool errors) are not named at zero.
    """
    named = []
    for column in trace.signals:
        values_S = trace.values(column)
        same = len(values_S) > STUCK and bool(np.isfinite(values_S).all()) and bool((values_S == values_S[0]).all())
        if same and not (values_S[0] == 0 and column.partition("/")[0] in (*_MAY_REST, *_OFTEN_ZERO)):
            named.append(f"{column} ({values_S[0]:.6g})")
    told = f"The same value at all {len(trace.steps)} steps, so that nothing can be seen in it: {', '.join(named)}."
    return (told,) if named else ()


def _signed(trace: Trace) -> bool:
    """Whether the log's own definition of its KL lets it be negative: with the penalty's sign, or a signed estimate."""
    definition = str(((trace.provenance.config.get("log") or {}).get("definitions") or {}).get("kl", ""))
    return any(word in definition for word in ("sign", "k1", "penalty", "estimate that"))


def _impossible(column: str, values_S: np.ndarray, steps_S: np.ndarray) -> list[str]:
    name, unit = column.partition("/")[0], signal_of(column).unit
    if name in _NEVER_NEGATIVE and values_S.min() < -1e-9:
        return [_sentence(column, values_S, steps_S, values_S < -1e-9, "cannot be negative: look at its estimator")]
    if unit == "share" and (values_S.min() < -1e-9 or values_S.max() > 1 + 1e-9):
        outside_S = (values_S < -1e-9) | (values_S > 1 + 1e-9)
        return [
            _sentence(column, values_S, steps_S, outside_S, "is a share and lies outside 0 to 1: look at its count")
        ]
    if name == "prob_pearson" and values_S.max() > 1 + 1e-6:
        return [_sentence(column, values_S, steps_S, values_S > 1 + 1e-6, "is a correlation and exceeds 1")]
    return []


def _sentence(column: str, values_S: np.ndarray, steps_S: np.ndarray, bad_S: np.ndarray, why: str) -> str:
    first = int(np.flatnonzero(bad_S)[0])
    return f"{column} {why} ({values_S[first]:.3g} at step {int(steps_S[first])}; {int(bad_S.sum())} steps)."


def _stuck(trace: Trace, column: str, values_S: np.ndarray, steps_S: np.ndarray) -> list[str]:
    """Return a sentence when a signal that moved before repeats one value for many steps, other than a bound of it."""
    if column.partition("/")[0] in _MAY_REST or len(values_S) <= STUCK:
        return []
    last = values_S[-1]
    if not np.isfinite(last) or last == 0 or (last == 1 and signal_of(column).unit == "share"):
        return []
    differs = np.flatnonzero(values_S != last)
    if not len(differs) or len(values_S) - differs[-1] - 1 < STUCK:
        return []
    first = int(differs[-1]) + 1
    if _explained(trace, column, values_S, first):
        return []
    n_steps = len(values_S) - first
    return [
        f"{column} repeats {last:.6g} to the last bit for {n_steps} steps, from step {int(steps_S[first])} on: "
        "is it still computed?"
    ]


def _explained(trace: Trace, column: str, values_S: np.ndarray, first: int) -> bool:
    """Whether a signal repeats its value since it has reached its bound: the length limit, or the best reward.

    Other signals say so where they are logged; else a whole number that is the largest of the run is taken for it.
    """
    says = {
        "response_length": [("truncated", 1.0)],
        "reward_mean": [("reward_std", 0.0), ("zero_variance_groups", 1.0)],
    }.get(column, [])
    told = [trace.values(name)[first:] == bound for name, bound in says if name in trace.signals]
    if told:
        return any(bool(same_S.all()) for same_S in told)
    return bool(says) and float(values_S[-1]).is_integer() and bool(values_S[-1] >= np.nanmax(values_S))
