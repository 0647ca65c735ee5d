"""A hand-made emulation with known numbers, for tests of what is drawn and said about one."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeproxy.scale import Emulation, GRPOProgram
from moeproxy.scale.emulation import Holder, Traffic
from tests.scale.conftest import TINY

GIB = 2**30


def made_emulation(**changes: Any) -> Emulation:
    """Six moments of a step; the third, in the forward pass, is the peak of 6 GiB."""
    totals = [1, 2, 6, 3, 5, 1]
    timeline_PC = np.zeros((6, 6), np.int64)
    timeline_PC[:, 0] = GIB
    timeline_PC[:, 4] = [(total - 1) * GIB for total in totals]
    fields: dict[str, Any] = {
        "program": GRPOProgram(TINY, prompt=8, completion=8).to_dict(),
        "world": 16,
        "ep": 4,
        "rank": 3,
        "level": "fake",
        "routing": "made up",
        "peak_bytes": 6 * GIB,
        "peak": {
            "parameters": GIB,
            "gathered": 0,
            "gradients": 0,
            "optimizer": 0,
            "activations": 5 * GIB,
            "communication": 0,
        },
        "peak_phase": "forward",
        "peak_module": "model.layers.1.mlp",
        "holders": (Holder("activations", "model", 5 * GIB, 2),),
        "phases": ("before", "old log-probs", "forward", "loss", "backward", "optimizer"),
        "timeline_PC": timeline_PC,
        "phase_P": np.array([0, 1, 2, 2, 4, 5]),
        "traffic": (
            Traffic("all_gather", 16, 8 * 10**9, "forward", 2),
            Traffic("all_to_all", 4, 4 * 10**9, "forward", 1),
            Traffic("all_reduce", 16, 10**9, "optimizer", 1),
            Traffic("all_gather", 1, 10**12, "forward", 5),
        ),
        "flops": {"forward": 4 * 10**14, "backward": 6 * 10**14},
        "scratch_bytes": {"gloo": 0, "nccl": None},
    }
    return Emulation(**(fields | changes))
