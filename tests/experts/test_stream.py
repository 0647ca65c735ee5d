"""The streamed calibration pass gives what the ordinary one gives, reads every tensor once and leaves nothing."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import CheckpointError, ProfileError
from moeproxy.experts import stream, stream_memory
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from moeproxy.experts.stream_read import TensorReader
from moeproxy.experts.stream_weights import StreamedModel
from tests import tiny

TOLERANCE = 1e-6
FACTS = [field.name for field in dataclasses.fields(ExpertProfile) if field.name != "provenance"]


def assert_same(one: ExpertProfile, other: ExpertProfile) -> None:
    """All fields equal, floats within TOLERANCE of the largest value."""
    for name in FACTS:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray) and a.dtype.kind == "f" and a.size:
            assert a.shape == b.shape
            np.testing.assert_allclose(b, a, rtol=0, atol=TOLERANCE * np.abs(a).max(), err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_equals_the_ordinary_pass(checkpoint_path: Path, tmp_path: Path) -> None:
    ordinary = profile(checkpoint_path, tiny.TEXTS, batch_size=3, stream=False)
    streamed = profile(checkpoint_path, tiny.TEXTS, batch_size=3, stream=True, scratch=tmp_path)
    assert_same(ordinary, streamed)
    assert streamed.load_LE.sum() > 0
    assert (ordinary.provenance["stream"], streamed.provenance["stream"]) == (False, True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def even_widths(tmp_path: Path) -> Path:
    """A tiny checkpoint in bfloat16 whose widths grouped matrix multiplication takes in 16 bits."""
    return tiny.save(tiny.qwen3_moe(moe_intermediate_size=16).bfloat16(), tmp_path / "even")


@pytest.mark.parametrize("dtype", ["bfloat16", "auto", "float32"])
def test_equals_the_ordinary_pass_in_other_dtypes(even_widths: Path, dtype: str) -> None:
    ordinary, streamed = (profile(even_widths, tiny.TEXTS, dtype=dtype, stream=how) for how in (False, True))
    assert_same(ordinary, streamed)


@pytest.mark.parametrize("fused", [False, True])
def test_every_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    path = tmp_path / "m"
    tiny.qwen3_moe(tie_word_embeddings=False).save_pretrained(
        path, max_shard_size="20KB", save_original_format=not fused
    )
    tiny.tokenizer().save_pretrained(path)
    reads: Counter[tuple[str, int]] = Counter()
    fill = TensorReader._fill

    def counted(self: TensorReader, name: str, value: torch.Tensor, start: int = 0) -> None:
        reads[name, start] += 1
        fill(self, name, value, start)

    monkeypatch.setattr(TensorReader, "_fill", counted)
    checkpoint = Checkpoint.open(path)
    assert len(checkpoint.shards) > 3
    profile(checkpoint, tiny.TEXTS, batch_size=2, stream=True)
    assert reads == Counter({(name, 0): 1 for name in checkpoint.tensors})


def test_only_one_layer_holds_weights_at_a_time(qwen_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []
    compute = stream._Walker.compute

    with StreamedModel.open(Checkpoint.open(qwen_copy)) as streamed:
        assert repr(streamed) == "StreamedModel(model, 3 layers, on cpu)"

        def watched(self: Any, device: str) -> Any:
            seen.append([any(not p.is_meta for p in layer.parameters()) for layer in streamed.layers])
            return compute(self, device)

        monkeypatch.setattr(stream._Walker, "compute", watched)
        from moeproxy.experts.batches import zeros

        totals = {n: zeros(streamed.model, streamed.checkpoint, False) for n in streamed.checkpoint.moe_layers}
        stream.run_streamed(streamed, totals, [[3, 4, 5], [6, 7]], 1)
        assert all(p.is_meta for layer in streamed.layers for p in layer.parameters())
        assert streamed.model.lm_head.weight.is_meta
    assert seen == [[n == k for n in range(3)] for k in range(3) for _ in range(2)]


def test_hidden_states_lie_in_files_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_memory, "_SMALL", 0)
    value = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    copy = stream_memory.mapped(value, tmp_path)
    assert torch.equal(copy, value)
    assert copy.data_ptr() != value.data_ptr()
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) in maps.read_text()
        del copy
        assert str(tmp_path) not in maps.read_text()


def test_mapped_hidden_states_change_nothing(checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = profile(checkpoint_path, tiny.TEXTS, batch_size=3, stream=False)
    monkeypatch.setattr(stream_memory, "_SMALL", 0)
    assert_same(ordinary, profile(checkpoint_path, tiny.TEXTS, batch_size=3, stream=True))


def test_no_room_for_hidden_states_is_said(qwen_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_memory, "_SMALL", 0)
    with pytest.raises(ProfileError, match=r"nowhere: the scratch folder is not there"):
        profile(qwen_copy, tiny.TEXTS, stream=True, scratch=tmp_path / "nowhere")
    if hasattr(os, "posix_fallocate"):

        def full(handle: int, start: int, size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ProfileError, match="No space left"):
            profile(qwen_copy, tiny.TEXTS, stream=True, scratch=tmp_path)
    assert walkers() == []
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def walkers() -> list[threading.Thread]:
    """Threads of batches that are still alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("calibration")]


@pytest.mark.parametrize("layer", [0, 2])
def test_an_error_in_a_layer_surfaces_and_ends_all_threads(
    qwen_copy: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

    forward = Qwen3MoeAttention.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == layer:
            raise ZeroDivisionError("broken")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3MoeAttention, "forward", broken)
    with pytest.raises(ZeroDivisionError, match="broken"):
        profile(qwen_copy, tiny.TEXTS, batch_size=2, stream=True)
    assert walkers() == []


@pytest.mark.parametrize("at_start", [True, False])
def test_an_error_between_the_layers_surfaces_too(
    qwen_copy: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    kind: Any = modeling.Qwen3MoeRotaryEmbedding if at_start else modeling.Qwen3MoeRMSNorm
    forward = kind.forward
    width = 24

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        final = not at_start and threading.current_thread().name.startswith("calibration")
        if at_start or (final and self.weight.shape == (width,)):
            raise ZeroDivisionError("broken")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", broken)
    with pytest.raises(ZeroDivisionError, match="broken"):
        profile(qwen_copy, tiny.TEXTS, batch_size=2, stream=True)
    assert walkers() == []


def test_settings_of_the_process_are_put_back(even_widths: Path) -> None:
    before = (threading.stack_size(), torch.get_num_threads(), torch.get_default_dtype())
    profile(even_widths, tiny.TEXTS, stream=True, dtype="bfloat16")
    assert (threading.stack_size(), torch.get_num_threads(), torch.get_default_dtype()) == before


@pytest.mark.parametrize("which", ["experts.3.up_proj", "lm_head", "embed_tokens", "layers.2.self_attn.q_proj"])
def test_nan_weights_are_refused_naming_tensor_and_file(tmp_path: Path, which: str) -> None:
    path = tmp_path / "m"
    tiny.qwen3_moe(tie_word_embeddings=False).save_pretrained(path, max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(path)
    name = next(name for name in Checkpoint.open(path).tensors if which in name)
    shard = path / Checkpoint.open(path).tensors[name].file
    tensors = load_file(shard)
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    for how in (False, True):
        with pytest.raises(CheckpointError) as caught:
            profile(path, tiny.TEXTS, stream=how)
        assert f"{shard}: tensor '{name}' holds NaN" in str(caught.value)
    assert walkers() == []


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", "deepseek_v3")
    file = path / "model.safetensors"
    tensors = load_file(file)
    for gone in ("model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"):
        save_file({name: value for name, value in tensors.items() if name != gone}, file, metadata={"format": "pt"})
        for how in (False, True):
            with pytest.raises(CheckpointError, match=f"1 tensors are missing from the weights, first '{gone}'"):
                profile(path, tiny.TEXTS, stream=how)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", "qwen3_moe")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}' is \[15, 24\], but the model's is \[16, 24\]"):
        profile(path, tiny.TEXTS, stream=True)


def test_a_file_cut_after_it_was_opened_is_named(qwen_copy: Path) -> None:
    checkpoint = Checkpoint.open(qwen_copy)
    shard = checkpoint.shards[3].path
    os.truncate(shard, shard.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="the file ends within tensor"):
        profile(checkpoint, tiny.TEXTS, stream=True)


def test_a_file_removed_after_it_was_opened_is_named(qwen_copy: Path) -> None:
    checkpoint = Checkpoint.open(qwen_copy)
    checkpoint.shards[2].path.unlink()
    with pytest.raises(CheckpointError, match=rf"{checkpoint.shards[2].path.name}: the file cannot be read"):
        profile(checkpoint, tiny.TEXTS, stream=True)


def test_links_and_spaces_in_names_are_followed(qwen_copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a cache" / "snapshots" / "main"
    folder.mkdir(parents=True)
    for number, file in enumerate(sorted(qwen_copy.iterdir())):
        blob = tmp_path / "a cache" / f"blob {number}"
        file.rename(blob)
        (folder / file.name).symlink_to(blob)
    assert_same(profile(folder, tiny.TEXTS, stream=False), profile(folder, tiny.TEXTS, stream=True))


def test_quantised_checkpoints_are_not_streamed(qwen_copy: Path) -> None:
    file = qwen_copy / "config.json"
    file.write_text(file.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    checkpoint = Checkpoint.open(qwen_copy)
    with pytest.raises(ProfileError, match=r"a quantised checkpoint cannot be streamed.*stream=False"):
        profile(checkpoint, tiny.TEXTS, stream=True)


def test_streams_on_its_own_when_the_weights_fill_the_memory(
    even_widths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(even_widths)
    need = checkpoint.n_params * 4

    def streams(free: int | None, **options: Any) -> bool:
        monkeypatch.setattr(stream_memory, "free_bytes", lambda device: free)
        return bool(profile(checkpoint, ["12"], **options).provenance["stream"])

    assert streams(int(need / 0.69)) is False
    assert streams(int(need / 0.71)) is True
    assert streams(int(need / 0.71), dtype="bfloat16") is False
    assert streams(int(need / 0.71), stream=False) is False
    assert streams(int(need / 0.69), stream=True) is True
    assert streams(None) is False


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("4:memory:/job", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        ("0::/job", ("memory.max", "memory.current")),
    ],
)
def test_free_memory_is_what_the_control_group_leaves(
    line: str, files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "root"
    folder = root / "job"
    folder.mkdir(parents=True)
    groups.write_text(f"9:cpu:/other\n{line}\n")
    monkeypatch.setattr(stream_memory, "_GROUPS", groups)
    monkeypatch.setattr(stream_memory, "_VERSIONS", {line.split(":")[1]: (root, *files)})
    for name, text in zip((*files, "memory.stat"), ("1000000", "400000", "inactive_file 100000\nx 1"), strict=True):
        (folder / name).write_text(text + "\n")
    assert stream_memory.free_bytes("cpu") == 700_000
    (folder / files[0]).write_text("max\n")
    whole = stream_memory.free_bytes("cpu")
    assert whole is None or whole > 1_000_000
    groups.unlink()
    assert stream_memory.free_bytes("cpu") == pytest.approx(whole, rel=0.2)


def test_a_head_is_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.save(tiny.qwen3_moe(tie_word_embeddings=False), tmp_path / "m")
    sizes: list[int] = []
    fill = TensorReader._fill
    monkeypatch.setattr("moeproxy.experts.stream_read._MOST", 400)
    monkeypatch.setattr(
        TensorReader,
        "_fill",
        lambda self, name, value, start=0: (sizes.append(len(value)), fill(self, name, value, start)),
    )
    with TensorReader(Checkpoint.open(path)) as reader:
        reader.check(["lm_head.weight"])
        assert sum(sizes) == 22 * 24
        assert max(sizes) == 100
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"].view(-1)[-1] = float("inf")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with TensorReader(Checkpoint.open(path)) as reader, pytest.raises(CheckpointError, match=r"lm_head\.weight' holds"):
        reader.check(["lm_head.weight"])


def test_progress_counts_layers_times_texts(qwen_copy: Path) -> None:
    seen: list[tuple[int, int]] = []
    profile(qwen_copy, tiny.TEXTS, batch_size=4, stream=True, progress=lambda *done: seen.append(done))
    assert seen == [(4, 21), (7, 21), (11, 21), (14, 21), (18, 21), (21, 21)]
