"""What a tensor of a MoE layer is, by its name: router rows, stacked experts, one expert's own, or unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moeproxy.experts.family import Family, Sliced

Kind = Literal["router", "stacked", "each", "ids", "unknown"]

# Quantised experts come in two tensors that share the expert axis: MXFP4 blocks and scales, FP8 and its scale.
_QUANTISED = "(?:_blocks|_scales|_scale_inv|_scale)?"
_NUMBER = re.compile(r"\d+")
_MTP = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|mtp_block)\.")


@dataclass(frozen=True)
class Place:
    """What a tensor of a MoE block is.

    Attributes:
        kind: router rows, stacked experts, one expert's own tensor, a table of expert ids, or unknown.
        layer: decoder layer; for multi-token-prediction layers with a prefix of their own, their own number.
        rule: how its expert axis is cut, for router and stacked tensors.
        expert: number of the expert, for one expert's own tensor.
        rest: what follows the expert's prefix (or the block's, if unknown).
        digits: span of the expert's number in the name.
        mtp: it lies under a prefix of multi-token-prediction layers.
    """

    kind: Kind
    layer: int
    rule: Sliced | None = None
    expert: int | None = None
    rest: str = ""
    digits: tuple[int, int] = (0, 0)
    mtp: bool = False


def place_of(name: str, family: Family) -> Place | None:
    """Say what part of a MoE layer the tensor `name` is; None for tensors that have no expert axis."""
    mtp = is_mtp_name(name)
    if place := _match(name, family, _patterns(family, family.mtp_blocks if mtp else family.blocks), mtp):
        return place
    # A part called "experts" outside every block of the row: nothing that may be left alone.
    if ".experts." in name and not _is_shared(name, family):
        return Place("unknown", -1, rest=name, mtp=mtp)
    return None


def is_mtp_name(name: str) -> bool:
    """Whether a tensor lies under a prefix of multi-token-prediction layers."""
    return "mtp" in name and _MTP.search(name) is not None


def layer_of(name: str, family: Family) -> int | None:
    """Decoder layer that a tensor belongs to by its name, None if it belongs to none."""
    for start in {block.partition("{layer}")[0] for block in family.blocks}:
        if found := re.match(re.escape(start) + r"(\d+)\.", name):
            return int(found[1])
    return None


_Rule = tuple[re.Pattern[str], Kind, Sliced | None]


@dataclass(frozen=True)
class _Patterns:
    """Compiled name patterns of a family: its sliced tensors, one expert's tensors, the whole block."""

    sliced: tuple[_Rule, ...]
    each: re.Pattern[str]
    block: re.Pattern[str]


@lru_cache(maxsize=256)
def _patterns(family: Family, blocks: tuple[str, ...]) -> _Patterns:
    router = dict.fromkeys((*family.router, *family.memory_router))
    stacked = dict.fromkeys((*family.stacked, *family.memory_stacked))
    sliced: list[_Rule] = [(_whole(blocks, rule.name), "router", rule) for rule in router]
    sliced.extend((_whole(blocks, rule.name, _QUANTISED), "stacked", rule) for rule in stacked)
    sliced.extend((_whole(blocks, name), "ids", None) for name in (*family.id_tables, *family.memory_id_tables))
    rest = "(?P<rest>.+)$"
    return _Patterns(
        tuple(sliced), re.compile(_regex(blocks, family.each) + rest), re.compile(_regex(blocks, "") + rest)
    )


def _whole(blocks: tuple[str, ...], name: str, end: str = "") -> re.Pattern[str]:
    return re.compile(_regex(blocks, name) + end + "$")


def _regex(blocks: tuple[str, ...], name: str) -> str:
    """Pattern of a name below any of the blocks, or of an absolute name."""
    if "{layer}" in name:
        return _number(re.escape(name))
    below = "|".join(re.escape(block).replace(r"\{layer\}", r"\d+") for block in blocks)
    # Which block matched is known; the layer is the number in it.
    return f"(?P<block>{below})" + _number(re.escape(f".{name}"))


def _number(escaped: str) -> str:
    return escaped.replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")


def _match(name: str, family: Family, patterns: _Patterns, mtp: bool) -> Place | None:
    if found := patterns.each.match(name):  # by far the most frequent
        return Place("each", _layer(found), None, int(found["expert"]), found["rest"], found.span("expert"), mtp)
    for pattern, kind, rule in patterns.sliced:
        if found := pattern.match(name):
            return Place(kind, _layer(found), rule, mtp=mtp)
    found = patterns.block.match(name)
    if found is None or _is_shared(found["rest"], family):
        return None
    return Place("unknown", _layer(found), rest=found["rest"], mtp=mtp)


def _layer(found: re.Match[str]) -> int:
    if "layer" in found.re.groupindex:
        return int(found["layer"])
    return int(_NUMBER.findall(found["block"])[-1])


def _is_shared(rest: str, family: Family) -> bool:
    """Whether a name, relative to the block or absolute, is listed as having no expert axis."""
    names = (re.sub(r"\.\d+\.", ".{layer}.", rest, count=1), rest)
    return any(one == name or one.startswith(f"{name}.") for name in family.shared for one in names)
