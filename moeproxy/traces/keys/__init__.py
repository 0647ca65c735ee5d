"""The key maps of all frameworks, and which of them a log belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import cache

from moeproxy.errors import TraceError
from moeproxy.traces.keys.base import MAPPED, Framework, Key
from moeproxy.traces.keys.canonical import CANONICAL
from moeproxy.traces.keys.hf import HF, LLAMA_FACTORY, SWIFT, TRL
from moeproxy.traces.keys.megatron import GENERIC, MEGATRON
from moeproxy.traces.keys.rl import AREAL, NEMO, OPENRLHF, PRIME_RL, ROLL, SKYRL, SLIME
from moeproxy.traces.keys.verl import VERL
from moeproxy.traces.signals import signal_of

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        HF,
        TRL,
        SWIFT,
        LLAMA_FACTORY,
        VERL,
        OPENRLHF,
        SLIME,
        NEMO,
        SKYRL,
        AREAL,
        ROLL,
        PRIME_RL,
        MEGATRON,
        CANONICAL,
    )
}
"""Every known framework by name."""

_MARK, _HINT = 3, 8

__all__ = ["FRAMEWORKS", "GENERIC", "Framework", "Key", "custom", "recognised", "scores"]


def recognised(columns: Iterable[str], hints: Iterable[str] = ()) -> Framework:
    """Return the framework that wrote a log with these keys, `GENERIC` when none or more than one fits best.

    Example:
        >>> recognised(["step", "actor/grad_norm", "critic/score/mean"]).name
        'verl'
    """
    ranked = sorted(scores(columns, hints).items(), key=lambda item: -item[1])
    (best, top), (_, second) = ranked[0], ranked[1]
    return FRAMEWORKS[best] if top > second else GENERIC


def scores(columns: Iterable[str], hints: Iterable[str] = ()) -> dict[str, int]:
    """Return how well each framework fits: a known key counts 1, a mark of it 3, a hint of container or name 8.

    A framework of which no mark and no hint is there scores 0.
    """
    names, seen = set(columns), set(hints)
    return {name: _score(framework, names, seen) for name, framework in FRAMEWORKS.items()}


def custom(mapping: Mapping[str, str], step: str | None, base: Framework) -> Framework:
    """Return a framework whose keys are those of a user's mapping from keys to signals.

    Raises:
        TraceError: a signal is not canonical; the nearest name is suggested.
    """
    for key, signal in mapping.items():
        try:
            signal_of(signal)
        except TraceError as error:
            raise TraceError(f"{key!r} is mapped to {error.found}", expected=error.expected) from error
    keys = tuple(Key(name, signal, MAPPED) for name, signal in mapping.items())
    steps = (step,) if step else base.steps
    # Only "what hides NaN" is kept: it speaks of the file, not of the names.
    return Framework(base.name, keys, steps, hides_nan=base.hides_nan, notes=base.notes)


def _score(framework: Framework, names: set[str], hints: set[str]) -> int:
    marks = sum(
        all(any(pattern.match(name) for name in names) for pattern in _patterns(mark)) for mark in framework.marks
    )
    seen = sum(hint in hints for hint in framework.hints)
    if not marks and not seen:
        return 0
    known = sum(bool(framework.among(key.name, names)) for key in framework.keys)
    return known + _MARK * marks + _HINT * seen


@cache
def _patterns(mark: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(translate(part.replace("[", "[[]"))) for part in mark.split("&"))
