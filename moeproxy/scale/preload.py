"""What the fork server imports once: what the lab's runs need, the tasks of an emulation, the models most asked for."""

from __future__ import annotations

import contextlib
import gc
import importlib

import moeproxy.lab.preload  # noqa: F401 - the first server stays, so it must suit the lab's runs too

# An installation that lacks a part says so in the emulation that needs it.
with contextlib.suppress(Exception):
    importlib.import_module("moeproxy.scale.tasks")
    for _family in ("qwen3_moe", "deepseek_v3"):  # others import on first use
        importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
gc.collect()
gc.freeze()
