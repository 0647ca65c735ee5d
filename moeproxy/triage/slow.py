"""Slow departures of long runs, judged alone: what takes hundreds of steps changes nothing within a window of steps.

A contrast sets at most 60 steps after an onset against 60 before, and takes off the trend: a collapse over 200 steps is
one. Here a run is averaged in `BLOCKS` blocks, and each is set against the best that came before it, however long ago.
Learning moves signals far as well; so only what no learning does counts: a reward that is all but lost; entropy, a
response's length or the use of tools that all but vanish while the reward did not rise; truncation and failing tools
that become the rule. Nothing of it is learned from data: the shares below are what these words mean.

Axes: R row, S step, B block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeproxy.triage.arrays import known_mean
from moeproxy.triage.departure import smoothed, step_noise
from moeproxy.triage.judged import scale_of, signal_name

FROM = 120
"""Steps from which a run is long: twice those of the runs that the priors come from."""

BLOCKS = 60

LOST = 0.75
"""Share of the best level so far that must be lost."""

RISEN = 0.5
"""By how much a share of bad responses must rise."""

REWARD = "reward_mean"
FALLS = ("entropy", "response_length", "tool_call_rate")
"""Signals that must not vanish, unless the reward rises: then the run learned to do without."""
RISES = ("truncated", "tool_error_rate")

NOISES, BLOCK_NOISES = 3.0, 6.0
"""Noises of a step, and of a block, that the change must exceed: less cannot be seen in the curve."""

BEGUN = 0.1
"""Share of the change from which it has begun."""

POINTS = 120
"""Points, at most about, of a curve that is looked at for a bend."""

_WIDTH = 3


@dataclass(frozen=True)
class Slow:
    """A signal that departs slowly.

    Args:
        row: its index.
        start: index of the step from which it does.
        ratio: size over the smallest that counts; more than 1.
        level: mean over the best blocks before, transformed.
    """

    row: int
    start: int
    ratio: float
    level: float


def slow_changes(rows: Sequence[str], values_RS: np.ndarray, noise_R: np.ndarray) -> list[Slow]:
    """Return the signals of a long run that departed slowly; none of a shorter run.

    Args:
        rows: names.
        values_RS: transformed values without lone spikes; NaN is missing.
        noise_R: noise of single steps.
    """
    if values_RS.shape[1] < FROM:
        return []
    length = values_RS.shape[1] // BLOCKS
    first = values_RS.shape[1] % length
    blocks_RB = known_mean(values_RS[:, first:].reshape(len(values_RS), -1, length), axis=2)
    level_RB = smoothed(blocks_RB, _WIDTH)
    noise_R = np.fmax(NOISES * noise_R, BLOCK_NOISES * step_noise(blocks_RB, np.zeros(len(rows))))
    learned_B = _learned(rows, level_RB, noise_R)
    found = []
    for index, row in enumerate(rows):
        sign = _bad(signal_name(row))
        if sign and np.isfinite(level_RB[index]).all():
            counts_B = np.ones(level_RB.shape[1], bool) if signal_name(row) not in FALLS else ~learned_B
            found += _change(index, row, sign * level_RB[index], noise_R[index], counts_B, sign)
    return [Slow(one.row, first + one.start * length, one.ratio, one.level) for one in found]


def begun(deviation_S: np.ndarray, share: float) -> int | None:
    """Return the index from which a deviation grows beyond 1 (in limits), None where it never does.

    Args:
        deviation_S: signed deviation over its limit, averaged over the past few steps.
        share: of the limit, above which it must have stayed ever since.
    """
    sizes = np.nan_to_num(deviation_S)
    beyond = np.flatnonzero(np.abs(sizes) >= 1)
    if not len(beyond):
        return None
    below = np.flatnonzero(np.sign(sizes[beyond[0]]) * sizes[: beyond[0]] < share)
    return bend(sizes, int(below[-1]) + 1 if len(below) else 0, int(beyond[0]))


def bend(values_S: np.ndarray, start: int, stop: int) -> int:
    """Return the index where a curve that is on its way at `start` bends towards its value at `stop`.

    The least-squares knot of two lines that meet, from as far before `start` as `stop` lies after it. A slow course
    that was there before is one line, the departure the other.
    """
    first = max(0, 2 * start - stop)
    step = max(1, (stop - first) // POINTS)
    part = values_S[first : stop + 1 : step]
    place = np.arange(len(part), dtype=float)
    best, knot = np.inf, start
    for at in range(2, len(part) - 2):
        lines = np.stack([np.ones(len(part)), place, np.fmax(place - at, 0)], axis=1)
        slopes = np.linalg.lstsq(lines, part, rcond=None)[0]
        rest = float(((part - lines @ slopes) ** 2).sum())
        if rest < best and slopes[2] * (part[-1] - part[0]) > 0:
            best, knot = rest, first + at * step
    return knot


def _bad(name: str) -> int:
    """Return +1 for a signal that must not fall, -1 for one that must not rise, 0 for any other."""
    return 1 if name == REWARD or name in FALLS else -1 if name in RISES else 0


def _learned(rows: Sequence[str], level_RB: np.ndarray, noise_R: np.ndarray) -> np.ndarray:
    """Return at which blocks (B,) the reward is higher than at the beginning, and about as high as it ever was."""
    index = rows.index(REWARD) if REWARD in rows else -1
    if index < 0:
        return np.zeros(level_RB.shape[1], bool)
    level_B, start = level_RB[index], level_RB[index, 0]
    best_B = np.maximum.accumulate(np.nan_to_num(level_B, nan=-np.inf))
    return (best_B - start > noise_R[index]) & (level_B - start > (1 - LOST / 3) * (best_B - start))


def _change(index: int, row: str, level_B: np.ndarray, noise: float, counts_B: np.ndarray, sign: int) -> list[Slow]:
    """Return the largest fall of levels (of which more is better), when it is large enough."""
    best_B = np.maximum.accumulate(level_B)
    least_B = np.fmax(_least(row, level_B, best_B), noise)
    ratio_B = np.where(counts_B, (best_B - level_B) / np.fmax(least_B, 1e-12), 0)
    if not ratio_B.max() > 1:
        return []
    lowest = int(np.argmax(ratio_B > 1))
    top = best_B[lowest]
    near = np.flatnonzero(level_B[:lowest] >= top - BEGUN * (top - level_B[lowest]))
    start = bend(level_B, int(near[-1]), lowest)
    return [Slow(index, start, float(ratio_B.max()), float(sign * level_B[max(0, start - _WIDTH) : start + 1].mean()))]


def _least(row: str, level_B: np.ndarray, best_B: np.ndarray) -> np.ndarray:
    """Return the smallest fall (B,) that counts, on the transformed scale."""
    if signal_name(row) in RISES:
        return np.full(len(level_B), RISEN)
    if scale_of(row) == "log":
        return np.full(len(level_B), -np.log(1 - LOST))
    # Of rewards below zero the share is that of what was gained.
    gained_B = best_B - level_B[0]
    return LOST * np.fmax(np.abs(best_B), gained_B)
