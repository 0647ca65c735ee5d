"""Building from or to something unusable: a clear error, nothing left behind, nothing overwritten."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import CheckpointError, ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy import build as build_module
from moeproxy.proxy.build import build
from moeproxy.proxy.plan import KeepPlan
from tests import tiny
from tests.proxy.made_up import plan_for


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A tiny checkpoint in shards, alone in its directory."""
    return Checkpoint.open(tiny.write(tmp_path / "source" / "m", max_shard_size="20KB"))


def refused(checkpoint: Checkpoint, plan: KeepPlan, out: Path, kind: type[Exception] = ProxyError) -> str:
    folder = out.parent
    while not folder.exists():
        folder = folder.parent
    before = listing(folder) if folder.is_dir() else None
    with pytest.raises(kind) as caught:
        build(checkpoint, plan, out)
    assert (listing(folder) if folder.is_dir() else None) == before
    return str(caught.value)


def test_an_existing_directory_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out" / "p"
    out.mkdir(parents=True)
    (out / "mine").write_text("x")
    assert f"{out}: the output directory exists already" in refused(checkpoint, plan_for(checkpoint, 4), out)
    assert (out / "mine").read_text() == "x"
    refused(checkpoint, plan_for(checkpoint, 4), checkpoint.path)


def test_a_file_in_the_way_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    text = refused(checkpoint, plan_for(checkpoint, 4), tmp_path / "file" / "p")
    assert "the proxy cannot be written" in text
    assert "choose a path you may write to" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only"), (errno.ENOSPC, "the disk is full")],
)
@pytest.mark.parametrize("parents", ["out", "out/deep/er"])
def test_an_unwritable_directory_is_refused(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    words: str,
    parents: str,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    (tmp_path / "out").mkdir()
    assert words in refused(checkpoint, plan_for(checkpoint, 4), tmp_path / parents / "p")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_fills_up_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    calls = 0
    write = build_module.write_shard

    def fill_up(*args: Any) -> None:
        nonlocal calls
        calls += 1
        write(*args)
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build_module, "write_shard", fill_up)
    (tmp_path / "out").mkdir()
    text = refused(checkpoint, plan_for(checkpoint, 4), tmp_path / "out" / "deep" / "p")
    assert "the disk is full" in text
    assert "free space" in text
    assert calls == after + 1


def test_an_interrupt_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, plan_for(checkpoint, 4), tmp_path / "out" / "a" / "p", progress=stop)
    assert listing(tmp_path / "out") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_weights_are_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    source = tiny.write(tmp_path / "source" / "m")
    file = source / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(source)
    build(checkpoint, plan_for(checkpoint, 4), tmp_path / "finite")
    tensors["model.layers.1.self_attn.q_proj.weight"][2, 3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(source)
    text = refused(checkpoint, plan_for(checkpoint, 4), tmp_path / "p")
    assert f"{file}: tensor 'model.layers.1.self_attn.q_proj.weight' holds NaN or infinite" in text


def test_a_shard_that_shrinks_or_vanishes_meanwhile_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shard = checkpoint.shards[-1].path
    data = shard.read_bytes()
    shard.write_bytes(data[:-40])
    assert f"{shard}: the shard cannot be read" in refused(
        checkpoint, plan_for(checkpoint, 4), tmp_path / "p", CheckpointError
    )
    shard.unlink()
    assert str(shard) in refused(checkpoint, plan_for(checkpoint, 4), tmp_path / "p", CheckpointError)


@pytest.mark.parametrize("n_keep", [0, 1, 9])
def test_impossible_counts_are_refused_before_writing(checkpoint: Checkpoint, tmp_path: Path, n_keep: int) -> None:
    plan = dataclasses.replace(plan_for(checkpoint, 4), n_keep=n_keep)
    assert "one of 2, 3, 4, 5, 6, 7, 8" in refused(checkpoint, plan, tmp_path / "p")


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 2), (3, 2, 1, 0), (0, 1, 2, 8), (-1, 0, 1, 2), ()])
def test_a_wrong_plan_is_refused(checkpoint: Checkpoint, tmp_path: Path, ids: tuple[int, ...]) -> None:
    plan = plan_for(checkpoint, 4)
    broken = dataclasses.replace(plan, keep={**plan.keep, 1: ids})
    assert "the keep plan is wrong for layer 1" in refused(checkpoint, broken, tmp_path / "p")


def test_a_plan_with_uneven_groups_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny.write(tmp_path / "source" / "m", "deepseek_v3"))
    plan = plan_for(checkpoint, 8)
    broken = dataclasses.replace(plan, keep={**plan.keep, 2: tuple(range(8))})
    assert "as many from every group" in refused(checkpoint, broken, tmp_path / "p")


def test_a_plan_of_another_checkpoint_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = dataclasses.replace(plan_for(checkpoint, 4), checkpoint_fingerprint="0" * 64)
    assert "made for another checkpoint" in refused(checkpoint, plan, tmp_path / "p")


def test_prediction_layers_are_refused_not_left_at_full_width(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source" / "m", "deepseek_v3")
    file = source / "model.safetensors"
    tensors = load_file(file)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    text = (source / "config.json").read_text()
    assert '"num_nextn_predict_layers": 0' in text
    (source / "config.json").write_text(text.replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1'))
    checkpoint = Checkpoint.open(source)
    assert (checkpoint.moe_layers, checkpoint.extra_layers) == ((1, 2), (3,))
    assert "multi-token-prediction" in refused(checkpoint, plan_for(checkpoint, 8), tmp_path / "p")
