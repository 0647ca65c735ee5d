"""What the fork server imports once for members of a hot swap: the lab, and torchft where it is installed."""

from __future__ import annotations

import contextlib
import gc
import importlib

import moeproxy.lab.preload  # noqa: F401 - the first server stays, so it must suit the lab's runs too

for _name in ("torchft", "opentelemetry.sdk._logs.export", "transformers.models.qwen3_moe.modeling_qwen3_moe"):
    with contextlib.suppress(Exception):  # what is missing says so in the member that needs it
        importlib.import_module(_name)
with contextlib.suppress(Exception):
    importlib.import_module("moeproxy.recovery.swap_member")
gc.collect()
gc.freeze()
