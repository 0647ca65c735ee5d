"""How ill a run is: one number without a unit, from 0 (as healthy runs are) to 1, and what it is made of.

Everything is judged against healthy runs of the same model, over the steps from the onset to the end of the last window
of `study_protocol.Protocol`, so nothing depends on a model's size. Three parts, each from 0 to 1, count alike:

- *reward loss*: which share of the healthy twin's mean reward is lost, beyond what healthy runs differ by (a reward
  that is too high is no loss; it shows in the departure);
- *departure*: the mean over groups of signals (reward, policy, updates, responses, engines, routing, credit) of
  1 - 1/s, with s the strongest response of the group over its threshold: 0 up to the threshold, a half at twice it,
  0.9 at ten times. Groups count alike, so that ten signals of one cause are no ten causes. Signals that may only
  improve by falling, such as the difference between the engines, count in the bad direction only;
- *not finite*: the share of steps that logged a NaN or an infinity where no healthy run does.

What severity healthy runs have is measured: calibration runs are judged by one another in a spread to which neither
contributed. A change of severity below the 95 % quantile of those is no change. Their seeds differ, those of a run and
its twin do not, so this is on the safe side.

Axes: C calibration run, X signal, S step, W window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moeproxy.errors import ComparisonError
from moeproxy.traces.trace import Trace
from moeproxy.triage.response import CAP
from moeproxy.triage.study_protocol import Protocol
from moeproxy.triage.study_signals import logged, signal_table
from moeproxy.triage.study_spread import FEWEST, HealthySpread, calibrate, window_means

GROUPS: dict[str, dict[str, int]] = {
    "reward": {"reward_mean": 0, "reward_std": 0, "zero_variance_groups": 0},
    "policy": {"kl": 0, "entropy": 0},
    "updates": dict.fromkeys(
        ("grad_norm", "grad_norm_router", "grad_norm_experts", "grad_norm_attention", "update_norm"), 0
    ),
    "responses": {"response_length": 0, "tool_call_rate": 0, "tool_error_rate": +1, "truncated": +1},
    "engines": {
        **dict.fromkeys(("logprob_diff_mean", "logprob_diff_max", "logprob_diff_k3", "clip_fraction_high"), +1),
        "clip_fraction_low": +1,
        "prob_pearson": -1,
        "router_agreement": -1,
    },
    "routing": {"router_load_entropy": 0, "router_max_violation": 0},
    "credit": {"advantage_group_mean": +1, "advantage_peak": +1, "advantage_spread": 0, "advantage_reward": -1},
}
"""Signals of each group, and the direction that is bad: +1 up, -1 down, 0 both."""

LEAST_REWARD = 0.05
"""Mean reward below which losses are measured against this instead: a model that earns nothing has nothing to lose."""

QUANTILE = 0.95

_DIRECTION = {name: direction for group in GROUPS.values() for name, direction in group.items()}


@dataclass(frozen=True)
class Severity:
    """How ill a run is.

    Args:
        reward_loss: share of the healthy twin's reward that is lost, beyond what healthy runs differ by.
        departure: how far the groups of signals are from healthy.
        not_finite: share of steps with a value that is not finite.
        groups: departure of each group that the run logs.
    """

    reward_loss: float
    departure: float
    not_finite: float
    groups: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The mean of the three parts: 0 is healthy, 1 is as bad as can be."""
        return (self.reward_loss + self.departure + self.not_finite) / 3

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `Severity(**...)` reads back."""
        return asdict(self)

    def __str__(self) -> str:
        parts = f"reward loss {self.reward_loss:.2f}, departure {self.departure:.2f}, not finite {self.not_finite:.2f}"
        return f"{self.value:.3f} ({parts})"


@dataclass(frozen=True)
class Margin:
    """What healthy runs reach when they are judged as ill ones are: less is no illness, and no change.

    Args:
        value: severity that 95 % of them stay below.
        reward_loss: the same for the loss of reward alone.
    """

    value: float
    reward_loss: float


@dataclass(frozen=True)
class Calibrated:
    """What healthy runs of one model are like.

    Args:
        traces: healthy runs, with seeds of their own.
        names: signals that all of them log.
        steps_S: steps that all of them have.
        spread: their spread, and thresholds.
        protocol: windows and levels.
        folds: parts of the traces, each with the spread of all others.
        margins: what `margin` has found so far.
    """

    traces: tuple[Trace, ...]
    names: tuple[str, ...]
    steps_S: np.ndarray
    spread: HealthySpread
    protocol: Protocol
    folds: tuple[tuple[tuple[Trace, ...], HealthySpread], ...]
    margins: dict[int, Margin] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(traces: Sequence[Trace], protocol: Protocol | None = None) -> Calibrated:
        """Calibrate on healthy runs of one model.

        Raises:
            ComparisonError: too few of them, too short, or of several models.
        """
        rules = protocol or Protocol()
        if len({trace.provenance.model for trace in traces}) > 1 or not all(t.provenance.healthy for t in traces):
            raise ComparisonError("runs of several models, or broken ones", expected="healthy runs of one model")
        if len(traces) < FEWEST + 2:
            raise ComparisonError(
                f"{len(traces)} healthy runs", expected=f"at least {FEWEST + 2}", remedy="record more healthy runs"
            )
        names = tuple(name for name in _DIRECTION if all(name in logged(trace, (name,)) for trace in traces))
        if "reward_mean" not in names:
            raise ComparisonError("healthy runs without a reward", expected="the signal reward_mean")
        steps_S = np.array(sorted(set.intersection(*(set(trace.steps.index) for trace in traces))), np.int64)
        values_CXS = np.stack([signal_table(trace, names, steps_S) for trace in traces])
        spread = calibrate(values_CXS, steps_S, names, rules)
        folds = []
        n_folds = min(rules.folds, len(traces) // 2)
        for fold in range(n_folds):
            others = np.delete(values_CXS, np.s_[fold::n_folds], axis=0)
            folds.append((tuple(traces[fold::n_folds]), calibrate(others, steps_S, names, rules)))
        return Calibrated(tuple(traces), names, steps_S, spread, rules, tuple(folds))

    def margin(self, onset: int) -> Margin:
        """Return what 95 % of healthy runs stay below, judged from this step on."""
        if onset not in self.margins:
            self.margins[onset] = _margin(self, onset)
        return self.margins[onset]


@dataclass(frozen=True)
class Healthy:
    """What a run is judged by: its healthy twin (the same model and seed) and the healthy spread of the model."""

    twin: Trace
    calibrated: Calibrated

    def margin(self, onset: int) -> Margin:
        """Return what 95 % of healthy runs stay below, judged from this step on."""
        return self.calibrated.margin(onset)


def severity(trace: Trace, healthy: Healthy, onset: int) -> Severity:
    """Return how ill a run is from a step on.

    Args:
        trace: the run.
        healthy: its healthy twin and the healthy spread.
        onset: first step that is judged.

    Raises:
        ComparisonError: the run and its twin are of different models or seeds, or no step lies after the onset.

    Example:
        >>> severity(trace, Healthy(twin, Calibrated.of(healthy_runs)), onset=20).value
        0.41
    """
    ours, twin = trace.provenance, healthy.twin.provenance
    if (ours.model, ours.seed) != (twin.model, twin.seed):
        raise ComparisonError(f"a run of {ours.model}, seed {ours.seed}", expected=f"the twin of {twin}")
    return _severity(trace, healthy.twin, healthy.calibrated, healthy.calibrated.spread, onset)


def _severity(trace: Trace, twin: Trace, known: Calibrated, spread: HealthySpread, onset: int) -> Severity:
    steps_S, names = known.steps_S, known.names
    stop = onset + max(stop for _, stop in known.protocol.windows)
    after_S = (steps_S >= onset) & (steps_S < stop)
    if not (after_S & np.isin(steps_S, trace.steps.index)).any():
        raise ComparisonError(
            f"no step from {onset} on that healthy runs have too", expected="a run that goes on after the onset"
        )
    both = [signal_table(one, names, steps_S) for one in (trace, twin)]
    scores_XW = spread.scores(*(window_means(values_XS, steps_S, onset, known.protocol) for values_XS in both))
    groups = _departures(scores_XW, names)
    broken_XS = np.isinf(both[0]) & ~np.isinf(both[1]).any(1, keepdims=True)
    return Severity(
        reward_loss=_reward_loss(trace, twin, steps_S[after_S], _reward_noise(names, spread)),
        departure=float(np.mean(list(groups.values()))),
        not_finite=float(broken_XS[:, after_S].any(0).mean()),
        groups=groups,
    )


def _departures(scores_XW: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    bad_XW = np.nan_to_num(scores_XW)
    sign_X = np.array([_DIRECTION[name] for name in names])[:, None]
    # A value that is not finite has no direction: it is bad in any.
    both_XW = (sign_X == 0) | (np.abs(bad_XW) >= CAP)
    strongest_X = np.where(both_XW, np.abs(bad_XW), sign_X * bad_XW).max(1)
    found = {}
    for group, signals in GROUPS.items():
        here = [strongest_X[x] for x, name in enumerate(names) if name in signals]
        if here:
            found[group] = float(1 - 1 / max(1.0, *here))
    return found


def _reward_noise(names: tuple[str, ...], spread: HealthySpread) -> float:
    """Return by how much the mean reward of healthy runs differs over the longest window."""
    x = names.index("reward_mean")
    return float(spread.threshold_X[x] * spread.unit_XW[x].min())


def _reward_loss(trace: Trace, twin: Trace, steps_S: np.ndarray, noise: float) -> float:
    ours, theirs = (_mean_reward(one, steps_S) for one in (trace, twin))
    return float(np.clip((theirs - noise - ours) / max(theirs - noise, LEAST_REWARD), 0, 1))


def _mean_reward(trace: Trace, steps_S: np.ndarray) -> float:
    # A reward that is not finite is none; a run that ended early earns nothing afterwards.
    here = np.isin(trace.steps.index, steps_S)
    return float(np.nan_to_num(trace.values("reward_mean")[here], nan=0.0, posinf=0.0, neginf=0.0).sum() / len(steps_S))


def _margin(known: Calibrated, onset: int) -> Margin:
    rows = [
        _severity(trace, twin, known, spread, onset)
        for part, spread in known.folds
        for trace, twin in zip(part, (*part[1:], part[0]), strict=True)
    ]
    value, loss = ([getattr(row, name) for row in rows] for name in ("value", "reward_loss"))
    return Margin(float(np.quantile(value, QUANTILE)), float(np.quantile(loss, QUANTILE)))
