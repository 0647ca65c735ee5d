"""What the fork server imports once for emulations: what the lab's runs need, then the parts of torch.distributed."""

from __future__ import annotations

import contextlib
import gc
import importlib

# An installation that lacks a part says so in the emulation that needs it.
with contextlib.suppress(Exception):
    for _family in ("qwen3_moe", "deepseek_v3"):  # the families most asked for; others import on first use
        importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
gc.collect()
gc.freeze()
