"""Experts picked by text, for those who do not use a mouse: "3, 17, 40-44", with "2:5" for another layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from moeproxy.errors import MoeproxyError

Pick = tuple[int, int]  # decoder layer, expert
_ITEM = re.compile(r"(?:(\d+)\s*:\s*)?(\d+)(?:\s*[-–]\s*(\d+))?")


def parse(text: str, layer: int, layers: Sequence[int], n_experts: int) -> frozenset[Pick]:
    """Return the experts that a text names.

    Args:
        text: numbers and ranges, separated by commas or blanks; a layer and a colon before one names another layer.
        layer: the layer meant where none is named.
        layers: decoder layers that have experts.
        n_experts: experts a layer.

    Raises:
        MoeproxyError: a part is no such item, or names an expert or layer that does not exist.
    """
    joined = re.sub(r"\s*([-–:])\s*", r"\1", text.strip())
    picks: set[Pick] = set()
    for item in filter(None, re.split(r"[,;\s]+", joined)):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _refused(f"'{item}' names no expert")
        where = layer if match[1] is None else int(match[1])
        first, last = int(match[2]), int(match[3] or match[2])
        if where not in layers:
            raise _refused(f"layer {where} has no experts here", f"one of {', '.join(map(str, layers))}")
        if not first <= last < n_experts:
            raise _refused(f"'{item}' names no expert", f"0 to {n_experts - 1}, the smaller number first")
        picks |= {(where, expert) for expert in range(first, last + 1)}
    return frozenset(picks)


def written(picks: Iterable[Pick], layer: int) -> str:
    """Return the text that names these experts; those of `layer` without their layer."""
    by_layer: dict[int, list[int]] = {}
    for where, expert in sorted(picks, key=lambda pick: (pick[0] != layer, pick)):
        by_layer.setdefault(where, []).append(expert)
    parts = []
    for where, ids in by_layer.items():
        prefix = "" if where == layer else f"{where}:"
        parts += [prefix + run for run in runs(ids).split(", ")]
    return ", ".join(parts)


def runs(ids: Sequence[int]) -> str:
    """Return ascending numbers with runs of three or more as first to last: 0-2, 5, 6."""
    found: list[list[int]] = []
    for i in ids:
        if found and i == found[-1][-1] + 1:
            found[-1].append(i)
        else:
            found.append([i])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def _refused(found: str, expected: str = "") -> MoeproxyError:
    return MoeproxyError(
        found, expected=expected or "numbers and ranges such as 3, 17, 40-44", remedy="correct the text"
    )
