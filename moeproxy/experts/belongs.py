"""Whether a profile belongs to a checkpoint: the same layout, and the same router weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.statistics import ExpertProfile

# Relative error of a value kept in bfloat16, for profiles of a pass in a lower dtype than the stored one.
_ROUNDING = 2.0**-8
_FLOATS = ("F64", "F32", "F16", "BF16")
_EXACT = ("float32", "float64", "auto")


def check_profile(profile: ExpertProfile, checkpoint: Checkpoint) -> None:
    """Raise ProfileError if the profile was made from other weights than the checkpoint's.

    A checkpoint's fingerprint covers config and headers, not values, so two steps of one training run share it; the
    routers' rows, which a profile holds, tell them apart unless the routers were frozen.

    Args:
        profile: calibration statistics.
        checkpoint: the model that experts are to be chosen for.
    """
    if profile.checkpoint_fingerprint != checkpoint.fingerprint:
        made, mine = profile.checkpoint_fingerprint[:12], checkpoint.fingerprint[:12]
        raise _other(checkpoint, f"fingerprints differ: {made}, not {mine}")
    for layer, stored_ED in router_rows_on_disk(checkpoint):
        if not _same(stored_ED, profile.router_LED[checkpoint.moe_layers.index(layer)], profile):
            raise _other(checkpoint, f"the router of layer {layer} has other weights")


def router_rows_on_disk(checkpoint: Checkpoint) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each decoder layer's router weight in float32 (E, D), one layer in memory at a time."""
    family = checkpoint.family
    names = {family.router[0].name, *(rule.name for rule in family.memory_router[:1])}
    for name, place in checkpoint.places.items():
        wanted = place.kind == "router" and place.rule is not None and place.rule.name in names
        if wanted and place.layer in checkpoint.moe_layers and checkpoint.tensors[name].dtype in _FLOATS:
            with safe_open(checkpoint.path / checkpoint.tensors[name].file, framework="pt") as stream:
                rows: torch.Tensor = stream.get_tensor(name)
            yield place.layer, rows[: checkpoint.n_experts].float().numpy()


def _same(stored_ED: np.ndarray, profiled_ED: np.ndarray, profile: ExpertProfile) -> bool:
    if stored_ED.shape != profiled_ED.shape:
        return True  # some families profile another part of their router
    tolerance = 0.0 if profile.provenance.get("dtype") in _EXACT else _ROUNDING
    return bool((np.abs(stored_ED - profiled_ED) <= tolerance * np.abs(stored_ED)).all())


def _other(checkpoint: Checkpoint, how: str) -> ProfileError:
    return ProfileError(
        f"the profile was made from another checkpoint ({how})",
        expected="a profile of this checkpoint",
        remedy="profile this checkpoint",
        where=Path(checkpoint.path),
    )
