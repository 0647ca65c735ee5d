"""Helpers of the family tests: save a tiny model in shards, plan, compare logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moeproxy.experts.checkpoint import Checkpoint
from tests.families import configs

SHARD = "40KB"


def write(path: Path, model_type: str, **options: Any) -> Checkpoint:
    """Save the tiny model of a type in several shards and open it."""
    configs.model(model_type).save_pretrained(path, max_shard_size=SHARD, **options)
    return Checkpoint.open(path)


def logits(model: Any) -> torch.Tensor:
    """Logits of random token ids, float32 (B, T, V)."""
    ids_BT = torch.randint(3, configs.VOCABULARY - 4, (2, 13), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        return model(input_ids=ids_BT, use_cache=False).logits.float()
