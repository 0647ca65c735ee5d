"""The calibration pass against a brute-force twin, and the saved profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeproxy.errors import CheckpointError, ProfileError
from moeproxy.experts.batches import pieces
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.observe import LayerTotals, projection
from moeproxy.experts.profile import ExpertProfile, profile, run
from tests import tiny

ARRAYS = [f.name for f in dataclasses.fields(ExpertProfile) if f.name[-1].isupper()]


@pytest.fixture(scope="module")
def result(checkpoint_path: Path) -> ExpertProfile:
    return profile(checkpoint_path, tiny.TEXTS, batch_size=3)


def brute_force(path: Path, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The same statistics token by token, from unpadded texts, the eager experts and written-out formulas."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    calls: list[tuple[int, Any]] = []
    for row, layer in enumerate(checkpoint.moe_layers):
        experts = model.model.layers[layer].mlp.experts
        experts.register_forward_hook(lambda module, args, out, row=row: calls.append((row, (module, *args))))
    tokenizer = tiny.tokenizer()
    with torch.no_grad():
        for text in tiny.TEXTS:
            model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
    shape = (len(checkpoint.moe_layers), checkpoint.n_experts)
    width = model.config.hidden_size
    sums = {name: np.zeros(shape) for name in ("load", "gate", "saliency", "norm", "peak")}
    sums |= {"cooccur": np.zeros((*shape, shape[1]))}
    sums |= {"context": np.zeros((*shape, width)), "output": np.zeros((*shape, width))}
    for row, (module, hidden_TD, index_TK, weight_TK) in calls:
        for hidden, index, weight in zip(hidden_TD, index_TK.tolist(), weight_TK.tolist(), strict=True):
            for e, w in zip(index, weight, strict=True):
                gate, up = (module.gate_up_proj[e].detach() @ hidden).chunk(2)
                out = module.down_proj[e].detach() @ (torch.nn.functional.silu(gate) * up)
                sums["load"][row, e] += 1
                sums["gate"][row, e] += w
                sums["norm"][row, e] += float(out.norm())
                sums["saliency"][row, e] += w * float(out.norm())
                sums["peak"][row, e] = max(sums["peak"][row, e], float(out.abs().max()))
                sums["context"][row, e] += w * hidden.numpy()
                sums["output"][row, e] += out.numpy()
                for other in index:
                    sums["cooccur"][row, e, other] += 1
    return sums


def test_statistics_equal_a_brute_force_twin(checkpoint_path: Path, result: ExpertProfile) -> None:
    twin = brute_force(checkpoint_path, Checkpoint.open(checkpoint_path))
    load_LE = np.maximum(twin["load"], 1)
    np.testing.assert_array_equal(result.load_LE, twin["load"])
    np.testing.assert_array_equal(result.cooccur_LEE, twin["cooccur"])
    np.testing.assert_allclose(result.gate_LE, twin["gate"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.saliency_LE, twin["saliency"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.output_norm_LE, twin["norm"] / load_LE, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.output_LED, twin["output"] / load_LE[..., None], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(result.peak_LE, twin["peak"], rtol=1e-4, atol=1e-6)
    gate_LE = np.where(twin["gate"] > 0, twin["gate"], 1)
    np.testing.assert_allclose(result.context_LED, twin["context"] / gate_LE[..., None], rtol=1e-3, atol=1e-5)


def test_sums_agree_with_each_other(result: ExpertProfile) -> None:
    tokens = sum(len(tiny.tokenizer()(text)["input_ids"]) for text in tiny.TEXTS)
    assert result.n_tokens == tokens, "padding must not count"
    assert (result.load_LE.sum(axis=1) == tokens * result.top_k).all()
    np.testing.assert_array_equal(np.diagonal(result.cooccur_LEE, axis1=1, axis2=2), result.load_LE)
    np.testing.assert_array_equal(result.cooccur_LEE, result.cooccur_LEE.transpose(0, 2, 1))
    counted = np.stack(
        [np.bincount(c.ravel(), minlength=result.n_experts) for c in result.choices_TLK.transpose(1, 0, 2)]
    )
    np.testing.assert_array_equal(counted, result.load_LE)
    assert (result.context_LED[result.load_LE == 0] == 0).all()


def test_dtypes_are_those_promised(result: ExpertProfile) -> None:
    found = {name: str(getattr(result, name).dtype) for name in ARRAYS}
    assert found == {
        "load_LE": "int64",
        "gate_LE": "float64",
        "saliency_LE": "float64",
        "cooccur_LEE": "int64",
        "context_LED": "float32",
        "output_LED": "float32",
        "output_norm_LE": "float32",
        "peak_LE": "float32",
        "router_LED": "float32",
        "choices_TLK": "int16",
        "weights_TLK": "float16",
        "tokens_T": "int32",
        "fold_cooccur_FLEE": "int32",
        "fold_gate_FLE": "float64",
        "fold_context_FLEP": "float32",
    }


def test_folds_add_up_and_hold_the_texts_dealt_to_them(checkpoint_path: Path, result: ExpertProfile) -> None:
    n_folds = len(tiny.TEXTS)
    assert result.fold_gate_FLE.shape[0] == n_folds, "one fold a text where there are few"
    np.testing.assert_array_equal(result.fold_cooccur_FLEE.sum(axis=0), result.cooccur_LEE)
    np.testing.assert_allclose(result.fold_gate_FLE.sum(axis=0), result.gate_LE, rtol=1e-6)
    gate_LE1 = np.where(result.gate_LE > 0, result.gate_LE, 1)[..., None]
    np.testing.assert_allclose(
        result.fold_context_FLEP.sum(axis=0) / gate_LE1, result.context_LED, rtol=1e-4, atol=1e-6
    )
    for fold, text in enumerate(tiny.TEXTS):
        alone = profile(checkpoint_path, [text])
        np.testing.assert_array_equal(result.fold_cooccur_FLEE[fold], alone.cooccur_LEE)
        np.testing.assert_allclose(result.fold_context_FLEP[fold], alone.fold_context_FLEP[0], rtol=1e-3, atol=1e-5)


def test_tokens_stand_in_the_order_of_the_choices(result: ExpertProfile) -> None:
    ids = [i for text in tiny.TEXTS for i in tiny.tokenizer()(text)["input_ids"]]
    assert result.tokens_T.tolist() == ids
    assert len(result.choices_TLK) == len(ids)


def test_projection_keeps_the_angles_of_wide_contexts() -> None:
    matrix_DP = projection(1024)
    assert matrix_DP is not None
    rng = np.random.default_rng(0)
    common = rng.normal(size=1024)
    wide_ED = np.stack([common + scale * rng.normal(size=1024) for scale in (0.1, 0.5, 1, 3)]).astype(np.float32)
    narrow_EP = wide_ED @ matrix_DP.numpy()

    def cosines(vectors: np.ndarray) -> np.ndarray:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit @ unit.T

    np.testing.assert_allclose(cosines(narrow_EP), cosines(wide_ED), atol=0.2)
    assert projection(96) is None


def test_batch_size_changes_nothing(checkpoint_path: Path, result: ExpertProfile) -> None:
    other = profile(checkpoint_path, tiny.TEXTS, batch_size=100, keep_choices=False)
    np.testing.assert_array_equal(other.load_LE, result.load_LE)
    np.testing.assert_allclose(other.context_LED, result.context_LED, rtol=1e-3, atol=1e-5)
    assert other.choices_TLK.shape[0] == 0


def test_the_observed_model_computes_the_same_hidden_states(checkpoint_path: Path) -> None:
    checkpoint = Checkpoint.open(checkpoint_path)
    model = load_model(checkpoint)
    ids = tiny.tokenizer()(tiny.TEXTS[0])["input_ids"]
    seen = []
    handle = model.model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append("the head is not needed"))
    width = model.config.hidden_size
    totals = {n: LayerTotals.zeros(checkpoint.n_experts, width, checkpoint.top_k, False) for n in checkpoint.moe_layers}
    run(model, checkpoint, totals, [ids], 1)
    handle.remove()
    assert len(seen) == 1
    with torch.inference_mode():
        plain = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    assert torch.equal(seen[0], plain)
    experts = model.get_submodule(checkpoint.family.block_in_memory(checkpoint.moe_layers[0])).experts
    assert not experts._forward_hooks
    assert not experts._forward_pre_hooks


def test_progress_reaches_the_end(checkpoint_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    profile(checkpoint_path, tiny.TEXTS, batch_size=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 7), (7, 7)]


def test_save_and_load_keep_every_field(result: ExpertProfile, tmp_path: Path) -> None:
    loaded = ExpertProfile.load(result.save(tmp_path / "p.npz"))
    for item in dataclasses.fields(ExpertProfile):
        one, other = getattr(result, item.name), getattr(loaded, item.name)
        if item.name in ARRAYS:
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        else:
            assert one == other, item.name
    assert [file.name for file in tmp_path.iterdir()] == ["p.npz"]
    assert "\n" not in repr(loaded)
    assert "never used" in loaded._repr_html_()


def test_a_cut_or_wrong_profile_is_refused(result: ExpertProfile, tmp_path: Path) -> None:
    file = result.save(tmp_path / "p.npz")
    data = file.read_bytes()
    for content in (data[: len(data) // 2], data[:-1], data[:10], b"", b"not a profile", _flipped(data)):
        file.write_bytes(content)
        with pytest.raises(ProfileError, match=r"p\.npz: the file is cut off.*run moeproxy\.profile again"):
            ExpertProfile.load(file)
    with pytest.raises(ProfileError, match="no such file"):
        ExpertProfile.load(tmp_path / "none.npz")
    np.savez(file, facts=np.array('{"format": 99}'))
    with pytest.raises(ProfileError, match="another format version"):
        ExpertProfile.load(file)
    with pytest.raises(ProfileError, match=r"saved as \.npz"):
        result.save(tmp_path / "p.json")


def _flipped(data: bytes) -> bytes:
    """The same file with one bit of the largest array turned over."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def test_a_failed_save_keeps_the_old_file(
    result: ExpertProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = result.save(tmp_path / "p.npz")
    before = file.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(ProfileError, match=r"p\.npz: the profile cannot be written \(No space"):
        result.save(file)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["p.npz"]


def test_nan_weights_are_refused_naming_tensor_and_file(qwen_copy: Path) -> None:
    shard = sorted(qwen_copy.glob("*.safetensors"))[2]
    tensors = load_file(shard)
    name = max(tensors, key=lambda key: "experts" in key)
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        profile(qwen_copy, tiny.TEXTS)
    assert f"{shard}: tensor '{name}' holds NaN" in str(caught.value)


@pytest.mark.parametrize("prompts", [[], ["", ""]])
def test_no_text_is_refused(qwen_copy: Path, prompts: list[str]) -> None:
    with pytest.raises(ProfileError, match="hold no token"):
        profile(qwen_copy, prompts)


def test_one_string_is_refused_as_prompts(qwen_copy: Path) -> None:
    with pytest.raises(ProfileError, match="one string"):
        profile(qwen_copy, "12+7=19")
    with pytest.raises(ProfileError, match="batch_size is 0"):
        profile(qwen_copy, ["1"], batch_size=0)


def test_a_missing_damaged_or_foreign_tokenizer_is_named(qwen_copy: Path) -> None:
    file = qwen_copy / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"9": 12', '"9": 99'))
    with pytest.raises(ProfileError, match="token 99, but the model has 22 embeddings"):
        profile(qwen_copy, ["9"])
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ProfileError, match="no usable tokenizer"):
        profile(qwen_copy, tiny.TEXTS)
    file.unlink()
    with pytest.raises(ProfileError, match="no usable tokenizer"):
        profile(qwen_copy, tiny.TEXTS)


def test_infinite_activations_of_finite_weights_are_refused(tmp_path: Path) -> None:
    model = tiny.qwen3_moe()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.fill_(3e38)
    with pytest.raises(ProfileError, match="activations of layer 1 are NaN or infinite"):
        profile(tiny.save(model, tmp_path / "m"), tiny.TEXTS)


def test_one_long_text_pads_few_others() -> None:
    texts = [[1] * 4 for _ in range(31)] + [[1] * 3000] + [[1] * 4 for _ in range(31)]
    made = list(pieces(texts, 32, 10))
    assert [piece.stop for piece in made] == [31, 36, 63]
    assert max(piece.ids_BT.numel() for piece in made) <= 512 * 32
    assert sum(int(piece.mask_BT.sum()) for piece in made) == 62 * 4 + 3000
    assert [piece.ids_BT.shape for piece in pieces([[1] * 99_999], 32, 10)] == [(1, 99_999)], "one text is never cut"


@pytest.mark.bad_types
@pytest.mark.parametrize("texts", [[None], ["12", 5]])
def test_what_is_no_text_is_refused(checkpoint_path: Path, texts: list[Any]) -> None:
    with pytest.raises(ProfileError, match="no text"):
        profile(checkpoint_path, texts)
