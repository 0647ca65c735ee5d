"""What the fork server imports once for jobs with hot swap, so that a member is there in a second and not in ten."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")  # torch reads it when it is imported; the engine polls its store

import moeproxy.lab.preload  # noqa: F401 - the first server stays, so it must suit the lab's runs too

for _name in (
    "moeproxy.recovery.swap_member",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "torch.distributed.fsdp",
    "torchft",
    "opentelemetry.sdk._logs.export",
    "nvidia_resiliency_ext.inprocess",
):
    with contextlib.suppress(Exception):  # what is missing is reported by the job that needs it
        importlib.import_module(_name)
gc.collect()
gc.freeze()
