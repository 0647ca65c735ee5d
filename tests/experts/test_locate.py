"""Finding a model: hub caches with their links, homes, read-only folders, pickled weights, wrong layer counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moeproxy.errors import CheckpointError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.build import build, check
from tests import tiny
from tests.proxy.made_up import plan_for

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A hub cache folder as huggingface_hub lays it out: links from snapshots into blobs."""
    folder = tmp_path / "hub" / "models--some org--tiny-moe"
    snapshot, blobs = folder / "snapshots" / REVISION, folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    source = tiny.write(tmp_path / "source", max_shard_size="20KB")
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return folder


def test_a_hub_cache_is_opened_and_pruned_by_either_name(cache: Path, tmp_path: Path) -> None:
    by_folder, by_snapshot = Checkpoint.open(cache), Checkpoint.open(cache / "snapshots" / REVISION)
    assert by_folder.fingerprint == by_snapshot.fingerprint
    assert by_folder.name == "some org/tiny-moe"
    assert "some org/tiny-moe" in repr(by_folder)
    proxy = check(build(by_folder, plan_for(by_folder, 4), tmp_path / "a proxy"))
    assert proxy.check is not None
    assert proxy.check.passed
    assert not any(item.is_symlink() for item in proxy.path.iterdir()), "a proxy must outlive the cache"


def test_a_cache_without_a_clear_snapshot_says_so(cache: Path) -> None:
    (cache / "refs" / "main").unlink()
    assert Checkpoint.open(cache).n_experts == 8, "one snapshot is clear enough"
    (cache / "snapshots" / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"2 snapshots.*name one of them: 0123"):
        Checkpoint.open(cache)
    shutil.rmtree(cache / "snapshots")
    (cache / "snapshots").mkdir()
    with pytest.raises(CheckpointError, match=r"0 snapshots.*finish the download"):
        Checkpoint.open(cache)


def test_a_link_to_a_blob_that_is_not_there_is_named(cache: Path) -> None:
    shard = next((cache / "snapshots" / REVISION).glob("*.safetensors"))
    shard.resolve().unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        Checkpoint.open(cache)


def test_home_and_read_only_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write(tmp_path / "models" / "my model")
    monkeypatch.setenv("HOME", str(tmp_path))
    before = {file: file.stat().st_mtime_ns for file in source.rglob("*")}
    for folder in (source, *source.iterdir()):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    try:
        checkpoint = Checkpoint.open("~/models/my model")
        proxy = build(checkpoint, plan_for(checkpoint, 4), tmp_path / "proxy")
        assert (proxy.path / "config.json").stat().st_mode & 0o200, "the copy of a read-only file is an ordinary file"
        assert {file: file.stat().st_mtime_ns for file in source.rglob("*")} == before
    finally:
        source.chmod(0o755)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    source = tiny.write(tmp_path / "m")
    for file in source.glob("*.safetensors"):
        file.unlink()
    (source / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=rf"{name}.*can run any code"):
        Checkpoint.open(source)


def test_pickled_weights_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "m")
    (source / "optimizer.pt").write_bytes(b"\x80\x04.")
    checkpoint = Checkpoint.open(source)
    proxy = build(checkpoint, plan_for(checkpoint, 4), tmp_path / "proxy")
    assert not (proxy.path / "optimizer.pt").exists()


def test_fewer_layers_in_the_config_are_no_prediction_heads(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"experts in layer 2, but the config says 2 layers and no multi-token"):
        Checkpoint.open(source)
