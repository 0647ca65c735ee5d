"""Names of single experts in a quantisation config: renumbered with the experts that stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.places import place_of
from moeproxy.proxy.plan import KeepPlan

__all__ = ["renumber_modules"]

_SECTIONS = ("quantization_config", "compression_config")
# "experts.3", in a pattern also "experts\.3"; not "shared_experts.0".
_ONE_EXPERT = re.compile(r"(?<![a-z_])experts\\?\.\d")


def renumber_modules(
    config: dict[str, Any], checkpoint: Checkpoint, plan: KeepPlan, mtp_from: int | None = None
) -> None:
    """Rewrite, in place, lists of a quantisation config that name modules by the number of an expert.

    "model.layers.3.mlp.experts.17.up_proj", to be left in full precision, is another expert in a proxy; a dropped
    expert's name goes.

    Args:
        config: the parsed config of the proxy.
        checkpoint: the original.
        plan: experts to keep.
        mtp_from: decoder layer whose experts multi-token-prediction layers keep; None if these are left out.

    Raises:
        ProxyError: an expert's number stands where it cannot be renumbered (in a pattern or as a key).
    """
    for name in _SECTIONS:
        if isinstance(config.get(name), dict):
            config[name] = _renumbered(config[name], checkpoint, plan, mtp_from)
    for part in config.values():
        if isinstance(part, dict):  # composite configs keep a text model's part of their own
            renumber_modules(part, checkpoint, plan, mtp_from)


def _renumbered(value: Any, checkpoint: Checkpoint, plan: KeepPlan, mtp_from: int | None) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            _refuse_number(key, checkpoint)
        return {key: _renumbered(item, checkpoint, plan, mtp_from) for key, item in value.items()}
    if isinstance(value, list):
        items = [_renumbered(item, checkpoint, plan, mtp_from) for item in value]
        return [new for new, old in zip(items, value, strict=True) if not (new is None and isinstance(old, str))]
    return _renamed(value, checkpoint, plan, mtp_from) if isinstance(value, str) else value


def _renamed(name: str, checkpoint: Checkpoint, plan: KeepPlan, mtp_from: int | None) -> str | None:
    """The name with the expert's new number, None if the expert goes; other text as it is."""
    place = place_of(f"{name}.weight", checkpoint.family)
    if place is None or place.kind != "each" or place.expert is None:
        _refuse_number(name, checkpoint)
        return name
    layer = mtp_from if place.mtp or place.layer not in plan.keep else place.layer
    if place.expert >= checkpoint.n_experts:
        new = plan.n_keep + place.expert - checkpoint.n_experts
    elif layer is None or place.expert not in plan.keep[layer]:
        return None
    else:
        new = plan.keep[layer].index(place.expert)
    start, stop = place.digits
    return f"{name[:start]}{new}{name[stop:]}"


def _refuse_number(text: object, checkpoint: Checkpoint) -> None:
    if isinstance(text, str) and _ONE_EXPERT.search(text):
        raise ProxyError(
            f"the quantisation config names an expert by its number in a way that cannot be renumbered: '{text}'",
            expected="whole module names in lists, or patterns that hold for all experts",
            remedy="rewrite that entry of the config as a list of module names",
            where=checkpoint.path / "config.json",
        )
