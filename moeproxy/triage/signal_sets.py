"""Sets of signals that logs hold: what the lab logs, what the frameworks do, and five that nearly everybody has."""

from __future__ import annotations

from collections.abc import Collection

from moeproxy.traces.keys import FRAMEWORKS
from moeproxy.triage.alone import Priors

EVERYTHING = "everything that the lab logs"
FEWEST = ("total_loss", "grad_norm", "reward_mean", "kl", "response_length")


def signal_sets() -> dict[str, frozenset[str] | None]:
    """Return by name the signals that a log holds; None is everything."""
    maps = {f"the keys of {name}": frozenset(key.signal for key in FRAMEWORKS[name].keys) for name in ("trl", "verl")}
    return {EVERYTHING: None, **maps, "loss, gradient norm, reward, KL, length": frozenset(FEWEST)}


def nearest_set(signals: Collection[str]) -> str:
    """Return the name of the set that shares most with these signals, of all that either holds.

    Args:
        signals: canonical names.
    """
    mine, everything = frozenset(signals), frozenset(Priors.load().contrast)
    known = {name: everything if one is None else one & everything for name, one in signal_sets().items()}
    return max(known, key=lambda name: len(known[name] & mine) / max(len(known[name] | mine), 1))
