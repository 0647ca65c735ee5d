"""What a framework's key map is made of: data, no code. `moeproxy.traces.keys` gathers all of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MAPPED = "as mapped by the user"
ANY_LOSS = "whatever the program calls its loss"
ANY_MEAN = "averaging is not known"
ANY_REWARD = "whatever the program calls its reward"
ANY_POLICY = "against which policy is not known"
ANY_NORM = "clipped or not is not known"
UNDEFINED = frozenset({MAPPED, ANY_LOSS, ANY_MEAN, ANY_REWARD, ANY_POLICY, ANY_NORM})
"""Definitions that say that nobody knows: two signals that both have one need not be the same."""


@dataclass(frozen=True)
class Key:
    """One key of a framework and the signal it stands for.

    Args:
        name: the key as the framework writes it; "*" stands for any text.
        signal: canonical name, of `SIGNALS` or `LOG_SIGNALS`.
        definition: how the quantity differs from the signal's own text; "" when it does not. Two traces whose
            definitions of a signal differ are not laid over each other without saying so.
        divisor: what the logged number is divided by to have the signal's unit.
    """

    name: str
    signal: str
    definition: str = ""
    divisor: float = 1.0


@dataclass(frozen=True)
class Framework:
    """How one framework logs.

    Args:
        name: short name.
        keys: of several keys for one signal the first that a log has is taken.
        steps: keys that hold the step; each is a clock of its own, the first that a row has counts.
        marks: patterns (`fnmatch`) of keys that tell it from others; "a&b" needs both.
        hints: what the readers of containers saw that tells it from others.
        prefixes: that loggers put before every key.
        ordinal: a key whose rows are numbered when a log has no step at all; "" when that would be a guess.
        hides_nan: (loss, gradient norm): the loss is 0 or an average of others when it was not finite.
        infinite: key to the number that it writes for infinity.
        notes: what a reader of every such log must know.
        console_notes: what a reader of its console output must know.
    """

    name: str
    keys: tuple[Key, ...]
    steps: tuple[str, ...]
    marks: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    ordinal: str = ""
    hides_nan: tuple[str, str] | None = None
    infinite: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    console_notes: tuple[str, ...] = ()

    def names(self, key: str) -> tuple[str, ...]:
        """Return the key with every prefix."""
        return tuple(prefix + key for prefix in self.prefixes)

    def among(self, key: str, columns: Collection[str]) -> tuple[str, ...]:
        """Return the names under which a log has a key; a pattern counts where it fits one of its keys only."""
        if "*" not in key:
            return tuple(name for name in self.names(key) if name in columns)
        fitting = [name for pattern in self.names(key) for name in fnmatch.filter(columns, pattern)]
        return tuple(fitting) if len(fitting) == 1 else ()
