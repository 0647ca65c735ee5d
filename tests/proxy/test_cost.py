"""Cost: equal to what the built proxy weighs, with and without multi-token-prediction layers; devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build
from moeproxy.proxy.cluster import allowed_counts
from moeproxy.proxy.cost import Cost, cost, cost_table, devices
from tests import tiny
from tests.proxy.made_up import plan_for


def with_mtp(path: Path) -> Checkpoint:
    """A DeepSeek-V3 whose layer 2 is repeated as a multi-token-prediction layer, with a tensor of its own."""
    file = tiny.save(tiny.deepseek_v3(num_nextn_predict_layers=1), path) / "model.safetensors"
    tensors = load_file(file)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.ones(24, 48)}, file)
    return Checkpoint.open(path)


@pytest.mark.parametrize("mtp", ["drop", "prune"])
def test_multi_token_prediction_layers_are_counted_as_they_are_built(mtp: Any, tmp_path: Path) -> None:
    checkpoint = with_mtp(tmp_path / "m")
    assert checkpoint.extra_layers, "the checkpoint must have such layers"
    n_keep = allowed_counts(checkpoint)[0]
    proxy = build(checkpoint, plan_for(checkpoint, n_keep), tmp_path / "p", mtp=mtp)
    result = cost(checkpoint, n_keep, mtp=mtp)
    assert (result.params, result.nbytes) == (proxy.n_params, proxy.nbytes)
    assert cost(checkpoint).params == cost(checkpoint, mtp=mtp).params == checkpoint.n_params
    frame = cost_table(checkpoint, [n_keep], mtp=mtp)
    assert frame["params"].tolist() == [checkpoint.n_params, proxy.n_params]
    assert cost(checkpoint, n_keep, mtp="drop").params < cost(checkpoint, n_keep, mtp="prune").params


def of(params: int) -> Cost:
    return Cost(8, params, params, params, 2 * params)


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        (1, {}, 1),
        # 80 GiB * 0.8 / 18 bytes = 3.8e9 parameters a device.
        (3_817_748_707, {}, 1),
        (3_817_748_708, {}, 2),
        (30_000_000_000, {}, 8),
        (30_000_000_000, {"device_gib": 141.0}, 5),
        (30_000_000_000, {"bytes_per_param": 2.0}, 1),
        (30_000_000_000, {"usable": 1.0}, 7),
    ],
)
def test_devices(params: int, options: dict[str, float], expected: int) -> None:
    assert devices(of(params), **options) == expected


@pytest.mark.parametrize("options", [{"device_gib": 0.0}, {"bytes_per_param": -1.0}, {"usable": 1.5}, {"usable": 0.0}])
def test_impossible_devices_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ProxyError, match="a share of at most 1"):
        devices(of(10), **options)
