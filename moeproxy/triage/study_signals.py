"""Signals of the fidelity study: canonical step signals, ratios of them, and aggregates of the trajectory table.

Aggregates over trajectories carry more than what a trainer logs (arXiv 2605.04431): whether an advantage belongs to
the response it stands beside shows in no scalar of the step.

Axes: X signal, S step, N response within a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.traces.signals import SIGNALS, Scale, Signal
from moeproxy.traces.trace import Trace
from moeproxy.triage.response import LOG_FLOOR, matrix

STEP_SIGNALS = (
    "policy_loss",
    "kl",
    "aux_loss",
    "total_loss",
    "grad_norm",
    "grad_norm_router",
    "grad_norm_experts",
    "grad_norm_attention",
    "grad_norm_embeddings",
    "update_norm",
    "reward_mean",
    "reward_std",
    "zero_variance_groups",
    "entropy",
    "response_length",
    "clip_fraction_low",
    "clip_fraction_high",
    "logprob_diff_mean",
    "logprob_diff_max",
    "logprob_diff_k3",
    "logprob_diff_k1",
    "logprob_diff_first",
    "prob_pearson",
    "router_load_entropy",
    "router_max_violation",
    "router_agreement",
    "tool_call_rate",
    "tool_error_rate",
    "truncated",
)


@dataclass(frozen=True)
class Derived:
    """A signal that is made from others.

    Args:
        name: its name.
        scale: how differences are judged, see `traces.signals.Signal`.
        resolution: smallest difference worth seeing; on the log scale everything below it counts as zero.
        doc: what it measures.
        needs: step signals it is made from, or trajectory columns.
        of: from the rows that `needs` names to values by step; transformed rows (X, S) for step signals, padded
            columns for trajectories. NaN is missing, inf was not finite.
        table: whether it is made from the trajectory table.
        floor: smallest spread believed, on the signal's scale; by default the resolution, or two per cent on the log
            scale. Extremes and rare shares are constant in most healthy runs and move by one response in some.
    """

    name: str
    scale: Scale
    resolution: float
    doc: str
    needs: tuple[str, ...]
    of: Callable[..., np.ndarray]
    table: bool = True
    floor: float | None = None


@dataclass(frozen=True)
class Padded:
    """A trajectory table as arrays (S, N); places that a step does not fill are out of `here`."""

    columns: dict[str, np.ndarray]
    prompts: np.ndarray
    here: np.ndarray

    @staticmethod
    def of(trace: Trace, steps_S: np.ndarray) -> Padded | None:
        """Arrange the trajectories of these steps; None when the run has none."""
        if trace.trajectories is None:
            return None
        table: Any = trace.trajectories
        table = table[table["step"].isin(steps_S)]
        row = np.searchsorted(steps_S, table["step"].to_numpy())
        place = table.groupby("step").cumcount().to_numpy()
        shape = (len(steps_S), int(place.max()) + 1 if len(place) else 1)
        here = np.zeros(shape, bool)
        here[row, place] = True
        columns = {name: _placed(table[name], row, place, shape) for name in map(str, table) if name != "step"}
        return Padded(columns, columns.pop("prompt"), here)


def _placed(values: pd.Series, row: np.ndarray, place: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape)
    padded[row, place] = values.to_numpy(np.float64)
    return padded


def _mean(values_SN: np.ndarray, here_SN: np.ndarray) -> np.ndarray:
    count_S = here_SN.sum(1)
    # A value that is not finite makes the mean so; a step without any response has none.
    return np.where(count_S > 0, np.where(here_SN, values_SN, 0).sum(1) / np.maximum(count_S, 1), np.nan)


def _std(values_SN: np.ndarray, here_SN: np.ndarray) -> np.ndarray:
    mean_S1 = _mean(values_SN, here_SN)[:, None]
    return np.sqrt(_mean((values_SN - mean_S1) ** 2, here_SN))


def _largest(values_SN: np.ndarray, here_SN: np.ndarray) -> np.ndarray:
    most_S = np.where(here_SN, values_SN, -np.inf).max(1)
    return np.where(here_SN.any(1), most_S, np.nan)


def _correlation(one_SN: np.ndarray, other_SN: np.ndarray, here_SN: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation by step; missing where one side is constant, inf where one is not finite."""
    one_SN = one_SN - _mean(one_SN, here_SN)[:, None]
    other_SN = other_SN - _mean(other_SN, here_SN)[:, None]
    scale_S = np.sqrt(_mean(one_SN**2, here_SN) * _mean(other_SN**2, here_SN))
    product_S = _mean(one_SN * other_SN, here_SN)
    known_S = scale_S > 1e-12
    result_S = np.where(known_S, product_S / np.where(known_S, scale_S, 1), np.nan)
    return np.where(np.isnan(scale_S) & here_SN.any(1), np.inf, result_S)


def _grouped(values_SN: np.ndarray, padded: Padded) -> np.ndarray:
    """Return the mean of each response's own group (S, N)."""
    group_SN = padded.prompts[:, :, None] == padded.prompts[:, None, :]
    group_SN = group_SN & padded.here[:, None, :] & padded.here[:, :, None]
    total_SN = np.einsum("snm,sm->sn", group_SN.astype(float), np.where(padded.here, values_SN, 0))
    return total_SN / np.maximum(group_SN.sum(2), 1)


def _centred_reward(padded: Padded) -> np.ndarray:
    return padded.columns["reward"] - _grouped(padded.columns["reward"], padded)


def _advantage_before(padded: Padded) -> np.ndarray:
    before_SN = np.roll(_centred_reward(padded), 1, axis=0)
    here_SN = padded.here & np.roll(padded.here, 1, axis=0)
    result_S = _correlation(padded.columns["advantage"], before_SN, here_SN)
    result_S[0] = np.nan
    return result_S


def _advantage_peak(padded: Padded) -> np.ndarray:
    size_SN = np.abs(padded.columns["advantage"])
    mean_S = _mean(size_SN, padded.here)
    return np.where(mean_S > 1e-6, _largest(size_SN, padded.here) / np.where(mean_S > 1e-6, mean_S, 1), np.nan)


def _part(padded: Padded, name: str, with_tool: bool) -> np.ndarray:
    used_SN = (padded.columns["tool_calls"] > 0) == with_tool
    return _mean(padded.columns[name], padded.here & used_SN)


def _column(name: str, statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Padded], np.ndarray]:
    return lambda padded: statistic(padded.columns[name], padded.here)


def _table_signals() -> tuple[Derived, ...]:
    adv, rew, length = ("advantage",), ("reward",), ("length",)
    tool = ("tool_calls",)
    return (
        Derived("advantage_spread", "log", 1e-2, "standard deviation of advantages", adv, _column("advantage", _std)),
        Derived(
            "advantage_group_mean",
            "log",
            1e-2,
            "mean over responses of |mean advantage of the group|, 0 by construction of GRPO",
            adv,
            lambda p: _mean(np.abs(_grouped(p.columns["advantage"], p)), p.here),
            floor=0.1,
        ),
        Derived("advantage_peak", "log", 1e-2, "largest |advantage| over the mean one", adv, _advantage_peak),
        Derived(
            "advantage_reward",
            "linear",
            1e-2,
            "correlation of advantage and reward within the group",
            (*adv, *rew),
            lambda p: _correlation(p.columns["advantage"], _centred_reward(p), p.here),
        ),
        Derived(
            "advantage_before",
            "linear",
            1e-2,
            "correlation of advantage and the reward in the same place of the step before",
            (*adv, *rew),
            _advantage_before,
        ),
        Derived("reward_largest", "linear", 0.1, "largest reward", rew, _column("reward", _largest)),
        Derived(
            "reward_between",
            "linear",
            1e-2,
            "share of rewards strictly between 0 and 1",
            rew,
            lambda p: _mean(_inside(p.columns["reward"]), p.here),
        ),
        Derived(
            "reward_length",
            "linear",
            1e-2,
            "correlation of reward and length",
            (*rew, *length),
            lambda p: _correlation(p.columns["reward"], p.columns["length"], p.here),
        ),
        Derived("length_spread", "log", 1e-1, "standard deviation of lengths", length, _column("length", _std)),
        Derived("length_longest", "log", 0.5, "longest response", length, _column("length", _largest), floor=0.1),
        Derived(
            "length_shortest",
            "log",
            0.5,
            "shortest response",
            length,
            lambda p: -_largest(-p.columns["length"], p.here),
            floor=0.1,
        ),
        Derived(
            "short_share",
            "linear",
            1e-2,
            "share of responses of at most one token",
            length,
            lambda p: _mean((p.columns["length"] <= 1).astype(float), p.here),
        ),
        Derived(
            "repetition",
            "linear",
            1e-3,
            "mean share of repeated tokens",
            ("repetition_ratio",),
            _column("repetition_ratio", _mean),
        ),
        Derived("tool_calls", "linear", 1e-2, "tool calls a response", tool, _column("tool_calls", _mean)),
        Derived(
            "reward_tool",
            "linear",
            1e-2,
            "mean reward with a tool call",
            (*rew, *tool),
            lambda p: _part(p, "reward", True),
        ),
        Derived(
            "reward_plain",
            "linear",
            1e-2,
            "mean reward without one",
            (*rew, *tool),
            lambda p: _part(p, "reward", False),
        ),
        Derived(
            "length_tool",
            "log",
            1e-2,
            "mean length with a tool call",
            (*length, *tool),
            lambda p: _part(p, "length", True),
        ),
        Derived(
            "length_plain",
            "log",
            1e-2,
            "mean length without one",
            (*length, *tool),
            lambda p: _part(p, "length", False),
        ),
    )


def _inside(reward_SN: np.ndarray) -> np.ndarray:
    inside_SN = ((reward_SN > 0) & (reward_SN < 1)).astype(float)
    return np.where(np.isfinite(reward_SN), inside_SN, np.nan)


def _difference(one_S: np.ndarray, other_S: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # inf - inf
        result_S = one_S - other_S
    return np.where(np.isinf(one_S) | np.isinf(other_S), np.inf, result_S)


def _ratio(name: str, one: str, other: str, doc: str) -> Derived:
    return Derived(name, "log", 1e-9, doc, (one, other), _difference, table=False)


def _step_signals() -> tuple[Derived, ...]:
    shares = [
        _ratio(f"{part}_share", f"grad_norm_{part}", "grad_norm", f"gradient norm of the {part} over the whole one")
        for part in ("router", "experts", "attention", "embeddings")
    ]
    return (
        _ratio("update_per_gradient", "update_norm", "grad_norm", "weight change over gradient norm"),
        *shares,
        Derived(
            "loss_beside_policy",
            "linear",
            1e-5,
            "total loss minus policy loss",
            ("total_loss", "policy_loss"),
            _difference,
            table=False,
        ),
        _ratio("mismatch_peak", "logprob_diff_max", "logprob_diff_mean", "largest log-prob difference over the mean"),
        Derived(
            "mismatch_shape",
            "log",
            1e-9,
            "k3 over the squared mean log-prob difference",
            ("logprob_diff_k3", "logprob_diff_mean"),
            lambda k3_S, mean_S: _difference(k3_S, 2 * mean_S),
            table=False,
        ),
    )


DERIVED: dict[str, Derived] = {signal.name: signal for signal in (*_table_signals(), *_step_signals())}
"""Every derived signal by name."""


def floors(names: tuple[str, ...]) -> np.ndarray:
    """Return the smallest spread believed of each signal (X,), on its scale."""
    return np.array([_floor(DERIVED.get(name) or SIGNALS[name]) for name in names])


def _floor(signal: Derived | Signal) -> float:
    if isinstance(signal, Derived) and signal.floor is not None:
        return signal.floor
    return signal.resolution if signal.scale == "linear" else LOG_FLOOR


def logged(trace: Trace, names: tuple[str, ...]) -> frozenset[str]:
    """Return which of these signals the run can give."""
    columns = [column for column in trace.signals if not trace.missing(column).all()]
    steps = {column.partition("/")[0] for column in columns}
    table = set() if trace.trajectories is None else set(map(str, trace.trajectories))
    needs = {name: _needs(name) for name in names}
    return frozenset(name for name, need in needs.items() if need <= (table if _from_table(name) else steps))


def _needs(name: str) -> set[str]:
    return set(DERIVED[name].needs) if name in DERIVED else {name}


def _from_table(name: str) -> bool:
    return name in DERIVED and DERIVED[name].table


def signal_table(trace: Trace, names: tuple[str, ...], steps_S: np.ndarray) -> np.ndarray:
    """Return transformed signals (X, S) of one run; NaN is missing, ±inf was measured as not finite."""
    padded = Padded.of(trace, steps_S)
    can = logged(trace, names)
    wanted = {need for name in can if not _from_table(name) for need in _needs(name)}
    plain = tuple(name for name in SIGNALS if name in wanted)
    rows = dict(zip(plain, matrix(trace, plain, steps_S), strict=True)) if plain else {}
    missing_S = np.full(len(steps_S), np.nan)
    return np.stack([_row(name, rows, padded) if name in can else missing_S for name in names])


def _row(name: str, rows: dict[str, np.ndarray], padded: Padded | None) -> np.ndarray:
    signal = DERIVED.get(name)
    if signal is None:
        return rows[name]
    if not signal.table or padded is None:
        return signal.of(*(rows[need] for need in signal.needs))
    return _scaled(_broken(signal, padded), signal)


def _broken(signal: Derived, padded: Padded) -> np.ndarray:
    """Return the values by step, inf where a response's own value was not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        values_S = signal.of(padded)
    bad_SN = np.any([~np.isfinite(padded.columns[need]) for need in signal.needs], axis=0) & padded.here
    return np.where(bad_SN.any(1), np.inf, values_S)


def _scaled(values_S: np.ndarray, signal: Derived) -> np.ndarray:
    return np.log(np.maximum(values_S, signal.resolution)) if signal.scale == "log" else values_S
