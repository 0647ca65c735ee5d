"""Which signal a column of an unknown log may be: proposals for a mapping, for the reader to confirm."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from moeproxy.traces.keys import FRAMEWORKS, GENERIC, recognised
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS

KNOWN, TAIL = 1.0, 0.9
_ENOUGH = 0.75
_WORDS = re.compile(r"[a-z]+|\d+")
_SHORT = {"lr": "learning rate", "len": "length", "num": "number", "gnorm": "grad norm", "advs": "advantages"}
_SPARE = frozenset({"train", "actor", "mean", "avg", "metrics", "all", "per"})
_OPPOSED = (
    {"max", "maximum"},
    {"min", "minimum"},
    {"std", "stddev"},
    {"low", "lower"},
    {"high", "upper"},
    {"eval", "val", "validation", "test"},
    {"prob", "probs", "probability"},
    {"router"},
    {"critic", "vf"},
)


@dataclass(frozen=True)
class Suggestion:
    """A signal that a column may be.

    Args:
        column: the original key.
        signal: canonical name.
        score: 1 when a known framework uses this key, 0.9 when it does behind a prefix, below that by likeness.
        why: the reason, in words.
    """

    column: str
    signal: str
    score: float
    why: str


def suggest(columns: Iterable[str]) -> dict[str, Suggestion]:
    """Return the best match of every column that has one; each signal is proposed once, for its best column.

    Example:
        >>> suggest(["iter", "my/grad_norm", "colour"])
        {'my/grad_norm': Suggestion(column='my/grad_norm', signal='grad_norm', score=0.9, why=...)}
    """
    names = list(columns)
    # Of keys that several frameworks use in different senses, the sense of the likeliest framework goes first.
    order = [recognised(names).name, GENERIC.name, *FRAMEWORKS]
    found = [match for name in names if (match := _best(name, order)) is not None]
    best: dict[str, Suggestion] = {}
    for match in found:
        if match.signal not in best or match.score > best[match.signal].score:
            best[match.signal] = match
    return {match.column: match for match in found if best[match.signal] is match}


def _best(column: str, order: list[str]) -> Suggestion | None:
    tables = [FRAMEWORKS.get(name, GENERIC) for name in order]
    for table in tables:
        for key in table.keys:
            if column in table.names(key.name):
                return Suggestion(column, key.signal, KNOWN, f"a key of {table.name}")
    for table in tables:
        for key in table.keys:
            if column.endswith((f"/{key.name}", f".{key.name}", f" {key.name}")) and not _opposed(column, key.name):
                return Suggestion(column, key.signal, TAIL, f"ends like the key {key.name!r} of {table.name}")
    return _alike(column)


def _alike(column: str) -> Suggestion | None:
    mine = _words(column)
    if not mine:
        return None
    scored = [(_likeness(mine, _words(name)), name) for name in (*SIGNALS, *LOG_SIGNALS) if not _opposed(column, name)]
    score, name = max(scored, default=(0.0, ""))
    if score < _ENOUGH:
        return None
    return Suggestion(column, name, round(score * TAIL, 3), f"spelled like {name!r}")


def _words(name: str) -> tuple[str, ...]:
    """Return the words that carry the meaning: case, signs, short forms and spare words aside."""
    split = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    words = " ".join([_SHORT.get(str(word), str(word)) for word in _WORDS.findall(split)]).split()
    return tuple(word for word in words if word not in _SPARE) or tuple(words)


def _likeness(mine: tuple[str, ...], theirs: tuple[str, ...]) -> float:
    return difflib.SequenceMatcher(None, " ".join(sorted(mine)), " ".join(sorted(theirs))).ratio()


def _opposed(left: str, right: str) -> bool:
    """Whether one of two names has a word like max, std or eval that the other has not: then they differ."""
    mine, theirs = (set(_WORDS.findall(name.lower())) for name in (left, right))
    return any(bool(mine & words) != bool(theirs & words) for words in _OPPOSED)
